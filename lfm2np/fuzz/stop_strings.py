"""The text of an answer, compared with that of its tokens: where a stop string ends it, what is shown, why it ended.

Judged only where each token has a text: some servers leave special tokens out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lfm2np.checkpoint.tokenizer import Tokenizer
from lfm2np.fuzz.right import greedy
from lfm2np.fuzz.trace import Sent, Trace
from lfm2np.loading import Model
from lfm2np.oracle.targets.records import Answer
from lfm2np.oracle.texts import UNFINISHED, all_text


def stop_fault(tokenizer: Tokenizer, ends: Collection[int], sent: Sent, answer: Answer) -> str | None:
    """Why an answer can't be right: it goes on behind its stop string, or ends though that never came; or None."""
    ids = answer.token_ids
    if not ids or sent.stop is None or not all_text(tokenizer, ids):
        return None
    if sent.stop in tokenizer.decode(ids[:-1]):
        return f"stop {sent.stop!r} stands in the text of its first {len(ids) - 1} tokens, yet it goes on"
    if len(ids) < sent.max_tokens and sent.stop not in tokenizer.decode(ids) and ids[-1] not in ends:
        return f"ends after {len(ids)} of {sent.max_tokens} tokens, and stop {sent.stop!r} is not in its text"
    return None


def with_stops(model: Model, trace: Trace) -> Trace:
    """The trace with stop strings that its requests will meet: see Sent.stop_in."""
    if not model.has_tokenizer or all(sent.stop_in is None for sent in trace.requests):
        return trace
    return Trace(tuple(replace(sent, stop=stop_in(model, sent) or sent.stop) for sent in trace.requests))


def stop_in(model: Model, sent: Sent) -> str | None:
    """A text that begins in the token before number `stop_in` of the right answer, and ends within that token if it has
    more than one character: an engine that looks only at the ends of tokens misses it. None where there is none."""
    if sent.stop_in is None or sent.temperature or sent.stop is None:
        return None
    first = replace(sent, stop=None, max_tokens=min(sent.max_tokens, sent.stop_in + 1))
    ids = greedy(model, first)
    if not all_text(model.tokenizer, ids):
        return None
    before, whole = model.tokenizer.decode(ids[:-1]), model.tokenizer.decode(ids)
    if UNFINISHED in whole:
        return None
    last = whole[len(before) :]
    return (before[-1:] + (last[:-1] or last)) or None
