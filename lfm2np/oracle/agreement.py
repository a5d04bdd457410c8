"""Answers that must agree with another one, or with themselves: text with its tokens and stop strings, tokens drawn
with the same seed.

A stop string is taken from the engine's answer without it, which the oracle judges by itself. So a token that may tie
is no mismatch here. Nor is a draw that rounding decides: see seed_mismatches.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.oracle.coverage import CONTINUES
from lfm2np.oracle.engines.records import Answer, Pair, Request, refuted
from lfm2np.oracle.judging.verdict import SPREAD, Position, so_many_or_more
from lfm2np.oracle.workloads import option_of

LONGEST_STOP, LEAST_TEXT = 3, 4  # characters of a stop string, and of a text that one is taken from
SEEDS_LIMIT = 1e-6  # probability below which so many different draws are not rounding
UNFINISHED = "\ufffd"  # for bytes that are no character; how many of them, each decoder chooses


def stop_string(tokenizer: Tokenizer, ids: Sequence[int], is_last: bool) -> str | None:
    """Characters from the middle or end of this text that do not occur earlier in it; None if there are none.

    In the middle preferably such that end within a token. The text ends before the first token that adds none, such as
    a special one, which servers show in different ways.
    """
    text, borders = "", set()
    for count in range(1, len(ids) + 1):
        longer = tokenizer.decode(ids[:count])
        if len(longer) <= len(text) or UNFINISHED in longer:
            break
        text = longer
        borders.add(len(text))
    last = len(text) - LONGEST_STOP

    def order(start: int) -> tuple[bool, int]:
        return start + LONGEST_STOP in borders, abs(2 * start - last)

    starts = [last] if is_last else sorted(range(1, last), key=order)
    candidates = [(start, text[start : start + LONGEST_STOP]) for start in starts if len(text) >= LEAST_TEXT]
    return next((some for start, some in candidates if some.strip() and text.find(some) == start), None)


def with_mismatches(
    pairs: Sequence[Pair],
    positions: Sequence[Position],
    tokenizer: Tokenizer | None,
    ends: Collection[int],
    more: Mapping[str, str],
) -> list[Pair]:
    """The same pairs, with an error in place of each answer that disagrees with another or with itself.

    ends  end-of-sequence tokens
    more  other errors, by id
    """
    faults = seed_mismatches(pairs, positions) | stream_mismatches(pairs) | end_mismatches(pairs, ends) | dict(more)
    if tokenizer is not None:
        faults |= stop_mismatches(pairs, tokenizer) | text_mismatches(pairs, tokenizer, ends)
    return [
        (request, refuted(answer, faults[request.request_id]) if request.request_id in faults else answer)
        for request, answer in pairs
    ]


def without_refusals(pairs: Sequence[Pair]) -> list[Pair]:
    """Without requests with a stop string if all of them were refused, and likewise with each other option: an engine
    without such a feature is not wrong, and it is not tested. And without continuations that brought no token: those
    tokens are lost, but no answer is missing.
    """
    taken = {option_of(request) for request, answer in pairs if answer.error is None or answer.is_refuted}
    return [
        (request, answer)
        for request, answer in pairs
        if option_of(request) in ("", *taken)
        and (CONTINUES not in request.tags or answer.token_ids or answer.is_refuted)
    ]


def stop_mismatches(pairs: Sequence[Pair], tokenizer: Tokenizer) -> dict[str, str]:
    """By id, texts that do not end where their stop string begins, or whose tokens continue."""
    pairs = without_empty_texts(pairs)
    whole = {
        (request.prompt_token_ids, request.max_tokens): answer.token_ids
        for request, answer in pairs
        if not option_of(request)
    }
    faults = {}
    for request, answer in pairs:
        ids = whole.get((request.prompt_token_ids, request.max_tokens))
        if request.stop and answer.token_ids and ids and (fault := stop_fault(request, answer, ids, tokenizer)):
            faults[request.request_id] = fault
    return faults


def text_mismatches(pairs: Sequence[Pair], tokenizer: Tokenizer, ends: Collection[int]) -> dict[str, str]:
    """By id, complete answers without a stop string whose text or finish_reason contradicts their tokens."""
    complete = [
        (request, answer)
        for request, answer in without_empty_texts(pairs)
        if not request.stop and len(answer.token_ids or ()) == request.max_tokens
    ]
    faults = {request.request_id: text_fault(tokenizer, ends, request, answer) for request, answer in complete}
    return {name: fault for name, fault in faults.items() if fault is not None}


def without_empty_texts(pairs: Sequence[Pair]) -> Sequence[Pair]:
    """An engine all of whose texts are empty reports none."""
    if any(answer.text for _, answer in pairs):
        return pairs
    return [(request, replace(answer, text=None)) for request, answer in pairs]


def stop_fault(request: Request, answer: Answer, whole: Sequence[int], tokenizer: Tokenizer) -> str | None:
    """`whole` are the tokens without the stop string; if the engine chose others before it, nothing can be said.

    The tokens of the stop string are up to the engine: some return them, some do not. The last is the one that
    completes it.
    """
    stop = request.stop or ""
    ends = [count for count in range(1, len(whole) + 1) if stop in tokenizer.decode(whole[:count])]
    ids = tuple(answer.token_ids or ())
    if not ends or ids[: ends[0]] != tuple(whole[: min(len(ids), ends[0])]):
        return None
    expected = tokenizer.decode(whole).partition(stop)[0]
    if answer.text is not None and expected not in texts_of(tokenizer, request, answer.text):
        return f"stop string {stop!r}: text {answer.text!r}, expected {expected!r}"
    if len(ids) > ends[0] or (answer.text is None and len(tokenizer.decode(ids)) < len(expected)):
        return f"stop string {stop!r}: {len(ids)} tokens, expected an end at token {ends[0]}"
    return None


def seed_mismatches(pairs: Sequence[Pair], positions: Sequence[Position]) -> dict[str, str]:
    """By id, answers that differ from the first one to the same prompt and seed, if rounding can't explain so many.

    With the same random numbers two runs that differ by rounding draw other tokens with a probability of about the
    error of the log-probabilities. Requests alone and in batches are counted separately: one may be right.
    """
    scales: dict[str, list[float]] = {}
    for position in positions:
        if position.request.params.seed is not None:
            scales.setdefault(position.request.request_id, []).append(position.scale)
    faults: dict[str, str] = {}
    for is_beside, words in ((False, "alone"), (True, "beside others")):
        compared = [repeat for repeat in repeats(pairs) if bool(repeat[1].tags.get("beside")) == is_beside]
        wrong = [request for first, request, answer in compared if answer.token_ids != first.token_ids]
        chances = [min(1.0, SPREAD * math.fsum(scales.get(request.request_id, [1.0]))) for _, request, _ in compared]
        alike = [id(first) for first, _, _ in compared]  # if that is off, all others differ
        if wrong and so_many_or_more(len(wrong), chances, alike) < SEEDS_LIMIT:
            share = f"{len(wrong)} of {len(compared)}"
            for request in wrong:
                faults[request.request_id] = (
                    f"seed {request.params.seed}: other tokens than the same request before, {words} in {share}"
                )
    return faults


def stream_mismatches(pairs: Sequence[Pair]) -> dict[str, str]:
    """By id, streams whose text differs from that of the same sampled tokens in one piece; see itself/pairs.py."""
    faults = {}
    for first, request, answer in repeats(pairs):
        is_same = request.streamed and answer.token_ids == first.token_ids and None not in (answer.text, first.text)
        if is_same and answer.text != first.text:
            words = f"{excerpt(answer.text or '')}, expected {excerpt(first.text or '')}"
            faults[request.request_id] = f"streamed text {words}, as in one piece, of the same tokens"
    return faults


def end_mismatches(pairs: Sequence[Pair], ends: Collection[int]) -> dict[str, str]:
    """By id, samples that ended at an end-of-sequence token behind which another of the same request went on."""
    passed = {
        (request.prompt_token_ids, request.params.seed, token)
        for request, answer in pairs
        if request.params.n > 1
        for token in (answer.token_ids or ())[:-1]
        if token in ends
    }
    faults = {}
    for request, answer in pairs:
        ids = answer.token_ids or ()
        is_cut = request.params.n > 1 and ids and len(ids) < request.max_tokens and not request.stop
        if is_cut and (request.prompt_token_ids, request.params.seed, ids[-1]) in passed:
            count = f"{len(ids)} of {request.max_tokens} tokens"
            ended = f"sample {request.sample} ended at token {ids[-1]} (end of sequence), {count}"
            faults[request.request_id] = (
                f"{ended}; another of the {request.params.n} went on behind it: ignore_eos is for all of them"
            )
    return faults


def repeats(pairs: Sequence[Pair]) -> Iterator[tuple[Answer, Request, Answer]]:
    """The first answer to the same sampled request, with each later one and its answer."""
    first: dict[tuple[object, ...], Answer] = {}
    for request, answer in pairs:
        if request.params.seed is not None and answer.token_ids:
            key = request.prompt_token_ids, request.params, request.sample
            if key in first:
                yield first[key], request, answer
            first.setdefault(key, answer)


# --- one answer: its text and finish_reason against its tokens


def text_fault(tokenizer: Tokenizer, ends: Collection[int], request: Request, answer: Answer) -> str | None:
    """Where a whole answer's text or finish_reason contradicts its tokens; None if it does not, or if some of them have
    no text, as some servers leave special tokens out.

    ends  end-of-sequence tokens: the last may be one, whose text is not shown
    """
    ids, stop = answer.token_ids, request.stop
    if not ids:
        return None
    ended = ids[-1] in ends
    if not all_text(tokenizer, ids[:-1] if ended else ids):
        return None
    whole = tokenizer.decode(ids)
    stopped = stop is not None and stop in whole
    if answer.finish_reason == "stop" and not (ended or stopped):
        return f"finish_reason 'stop' after {len(ids)} tokens, expected 'length': nothing in its text stops it"
    if answer.text is None:
        return None
    expected = whole[: whole.index(stop)] if stopped and stop is not None else whole
    certain, broken, _ = expected.partition(UNFINISHED)
    for text in texts_of(tokenizer, request, answer.text):
        if text == expected or (broken and text.startswith(certain)):
            return None
    if answer.text == expected.removeprefix(" "):
        return "its text lacks the blank that its tokens begin with"
    what = f"its tokens before stop {stop!r}" if stopped else "its tokens"
    return f"text {excerpt(answer.text)}, expected {excerpt(expected)}, that of {what}"


def texts_of(tokenizer: Tokenizer, request: Request, text: str) -> Iterator[str]:
    """The text; after a prompt that ends within a character also without the rest of that, with which vLLM begins."""
    yield text
    if UNFINISHED in text and tokenizer.decode(request.prompt_token_ids).endswith(UNFINISHED):
        for index, character in enumerate(text, start=1):
            if character == UNFINISHED:
                yield text[index:]


def excerpt(text: str, most: int = 80) -> str:
    return repr(text) if len(text) <= most else f"{text[: most // 2]!r}...{text[-most // 2 :]!r}"


def all_text(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    return all(map(tokenizer.token_bytes, ids))
