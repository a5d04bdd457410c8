"""Compares the text and the finish_reason of an answer with its tokens.

Judged only if every token has a text: some servers leave special tokens out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lfm2np.checkpoint.tokenizer import Tokenizer
from lfm2np.oracle.targets.records import Answer

UNFINISHED = "\ufffd"  # for bytes that are no character; how many of them, each decoder chooses


def text_fault(
    tokenizer: Tokenizer, ends: Collection[int], stop: str | None, max_tokens: int, answer: Answer
) -> str | None:
    """Where a whole answer's text or finish_reason contradicts its tokens; None if it does not.

    ends  end-of-sequence tokens: the last may be one, whose text is not shown
    """
    ids = answer.token_ids
    if not ids:
        return None
    ended = ids[-1] in ends
    if not all_text(tokenizer, ids[:-1] if ended else ids):
        return None
    whole = tokenizer.decode(ids)
    stopped = stop is not None and stop in whole
    if answer.finish_reason == "stop" and not (ended or stopped):
        return f"finish_reason 'stop' after {len(ids)} tokens, expected 'length': nothing in its text stops it"
    if answer.finish_reason == "length" and len(ids) < max_tokens:
        return f"finish_reason 'length' after {len(ids)} of {max_tokens} tokens, expected 'stop'"
    if answer.text is None:
        return None
    expected = whole[: whole.index(stop)] if stopped and stop is not None else whole
    certain, broken, _ = expected.partition(UNFINISHED)
    if answer.text == expected or (broken and answer.text.startswith(certain)):
        return None
    what = f"its tokens before stop {stop!r}" if stopped else "its tokens"
    return f"text {excerpt(answer.text)}, expected {excerpt(expected)}, that of {what}"


def excerpt(text: str, most: int = 80) -> str:
    return repr(text) if len(text) <= most else f"{text[: most // 2]!r}...{text[-most // 2 :]!r}"


def all_text(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    return all(map(tokenizer.token_bytes, ids))
