"""Where an answer must end, for what reason and with what text: by its tokens, its length and its stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.oracle.engines.records import UNTOLD, Answer, Request
from lfm2np.suite.properties.property import Violation
from lfm2np.suite.strategies.tiny_models import AnyModel, loaded


@dataclass(frozen=True)
class Ending:
    """Of the first of its tokens that ends it."""

    tokens: int
    finish_reason: str
    stop_reason: int | str | None  # the stop token that is no end-of-sequence token, or the stop string


def require_ending(model: AnyModel, where: str, request: Request, answer: Answer, aborted: bool = False) -> None:
    """Violation unless it ends with the first token that ends it, for that reason, with the text of its tokens.

    One that was aborted may end before.
    """
    ending, tokens = ending_of(model, request, answer.ids), len(answer.ids)
    if answer.finish_reason == "error" or answer.error is not None:
        raise Violation(f"{where}: ended in an error{'' if answer.error is None else f': {answer.error}'}")
    if ending is None and not (aborted and answer.finish_reason in (None, "abort")):
        most = request.params.max_tokens
        raise Violation(f"{where}: ended after {tokens} tokens ({answer.finish_reason}), max_tokens is {most}")
    if ending is not None and ending.tokens < tokens:
        extra = answer.ids[ending.tokens]
        why = ending.finish_reason if ending.stop_reason is None else f"{ending.finish_reason} {ending.stop_reason!r}"
        raise Violation(f"{where}, output token {ending.tokens}: {extra}, but it had ended ({why})")
    if ending is not None and answer.finish_reason not in (None, ending.finish_reason):
        said, expected = answer.finish_reason, ending.finish_reason
        raise Violation(f"{where}: ended after {tokens} tokens ({said}), the reference says {expected}")
    stopped = None if ending is None else ending.stop_reason
    if answer.stop_reason not in (UNTOLD, stopped):
        raise Violation(f"{where}: stop reason {answer.stop_reason!r}, expected {stopped!r}")
    if answer.text is not None and (expected_text := text_of(model, request, answer.ids)) != answer.text:
        raise Violation(f"{where}: text {answer.text!r}, tokens and stop strings say {expected_text!r}")


def ending_of(model: AnyModel, request: Request, token_ids: Sequence[int]) -> Ending | None:
    """None if none of the tokens ends it. Of what comes with one token a stop string goes before the length."""
    params, stops = request.params, stop_ids(model, request)
    room = loaded(model).room_after(request.prompt_token_ids)
    longest = room if params.max_tokens is None else min(params.max_tokens, room)
    for count, token in enumerate(token_ids, start=1):
        if token in stops and count >= params.min_tokens:
            return Ending(count, "stop", token if is_told(model, request, token) else None)
        if params.stop:
            stop = stopped_text(model, request, token_ids[:count], count == longest)[1]
            if stop is not None:
                return Ending(count, "stop", stop)
        if count == longest:
            return Ending(count, "length", None)
    return None


def stop_ids(model: AnyModel, request: Request) -> set[int]:
    eos = () if request.params.ignore_eos else loaded(model).config.eos_token_ids
    return {*request.params.stop_token_ids, *eos}


def is_told(model: AnyModel, request: Request, token: int) -> bool:
    """Whether a stop token is a stop reason: an end-of-sequence token is none, unless it is ignored as such."""
    return request.params.ignore_eos or token not in loaded(model).config.eos_token_ids


def text_of(model: AnyModel, request: Request, token_ids: Sequence[int]) -> str:
    """What is shown in the end: all but a stop token, as far as the stop string that ended it."""
    stops = stop_ids(model, request)
    ends = bool(token_ids) and token_ids[-1] in stops and len(token_ids) >= request.params.min_tokens
    return stopped_text(model, request, token_ids[:-1] if ends else token_ids, True)[0]


def stopped_text(model: AnyModel, request: Request, token_ids: Sequence[int], is_over: bool) -> tuple[str, str | None]:
    """The text of tokens and the stop string that ended it."""
    params = request.params
    pieces = pieces_of(loaded(model).tokenizer, token_ids, is_over)
    return stop_text(pieces, tuple(params.stop), params.include_stop_str_in_output, params.min_tokens)


def stop_text(pieces: Sequence[str], stop: Sequence[str], include: bool, min_tokens: int) -> tuple[str, str | None]:
    """The text shown in the end and the stop string that ended it, from the text of each token.

    The match that ends first wins, of those that end together the longest; it has to end after the text of the first
    `min_tokens` tokens, but may begin in it.
    """
    text = "".join(pieces)
    for end in range(len("".join(pieces[:min_tokens])) + 1, len(text) + 1):
        for start in range(end):
            if text[start:end] in stop:
                return text[: end if include else start], text[start:end]
    return text, None


def pieces_of(tokenizer: Tokenizer, token_ids: Sequence[int], is_over: bool) -> list[str]:
    """The text that each token completes: an unfinished character counts with the last one, if nothing follows."""
    pieces, said, shown = [], b"", ""
    for count, token in enumerate(token_ids, start=1):
        said += tokenizer.token_bytes(token)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(said, is_over and count == len(token_ids))
        pieces.append(text[len(shown) :])
        shown = text
    return pieces
