"""Whether an answer is complete and possible: the one place that decides it, whatever brought the answer.

The engine may go through Python, a process, HTTP or a recorded file. Its finish reasons come in OpenAI's words, into
which each dialect translates its own:

length  all of max_tokens; fewer are a part of an answer that says it is whole
stop    a stop string, or an end-of-sequence token that the engine can't ignore: coverage.py requests what is missing
abort, content_filter  the engine cut the answer, which nobody asked for
error   the engine failed, and says so
none, or another word  believed of all tokens; of fewer nothing says why they are fewer
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lfm2np.oracle.engines.records import FAILED, IMPOSSIBLE, Answer, Request, failed, refuted
from lfm2np.oracle.engines.records_json import prompt_fault

ROUNDING = 0.01  # nats: may lift the log-probability of a certain token above 0
CUTS = ("abort", "content_filter")


def validate(request: Request, answer: Answer, vocab_size: int | None = None) -> Answer:
    """The answer, or what is wrong with it: refuted if no right engine gives it. `vocab_size` None: unknown."""
    if answer.error is not None or answer.token_ids is None:
        return answer
    if (why := impossible(request, answer, vocab_size)) is not None:
        return refuted(answer, why)
    if answer.finish_reason == "error":
        return failed("the engine ended it with finish_reason error")
    if answer.is_aborted:
        return answer
    count, reason = len(answer.token_ids), answer.finish_reason
    ended = f"finish_reason {reason!r} after {count} of {request.max_tokens} tokens"
    if reason in CUTS:
        return refuted(answer, f"{ended}, which nobody asked for")
    if count < request.max_tokens and reason != "stop" and not (reason is None and request.stop):
        return failed(f"{ended}, expected all of them, or 'stop'", IMPOSSIBLE if reason == "length" else FAILED)
    return answer


def impossible(request: Request, answer: Answer, vocab_size: int | None) -> str | None:
    """Too many tokens, ids outside the vocabulary, positive log-probabilities, or not one a prompt's token. Ids below 0
    and NaN are told as they are read, as no Answer holds them: records_json.py."""
    ids, tops = answer.token_ids or (), answer.top_logprobs or ()
    if len(ids) > request.max_tokens:
        return f"{len(ids)} tokens, {request.max_tokens} were asked for"
    named = [(f"token_ids[{index}]", token_id) for index, token_id in enumerate(ids)]
    named += [(f"top_logprobs[{index}]: token id", token_id) for index, top in enumerate(tops) for token_id in top]
    for where, token_id in named:
        if vocab_size is not None and token_id >= vocab_size:
            return f"{where} {token_id}: expected 0 to {vocab_size - 1}"
    for name, values in (("logprobs", answer.logprobs or ()), ("prompt_logprobs", answer.prompt_logprobs or ())):
        if (largest := max(values, default=0.0)) > ROUNDING:
            return f"{name}[{values.index(largest)}] {largest}: expected at most 0{why_positive(values)}"
    return prompt_fault(request, answer)


def why_positive(values: Sequence[float]) -> str:
    """What log-probabilities above 0 may be."""
    if all(0.0 <= value <= math.exp(ROUNDING) for value in values):
        return "; all are between 0 and 1, so they may be probabilities and not their logarithms"
    return "; none is below 0, so they may lack their sign" if min(values) >= 0.0 else ""
