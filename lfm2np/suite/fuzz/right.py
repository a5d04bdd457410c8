"""The right answer to a request, in exact arithmetic, how far off the declared format may be, and where it stops.

Stop strings are judged only where each token has a text: some servers leave special tokens out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.engine.engine import Engine
from lfm2np.engine.loading import Model
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle.agreement import UNFINISHED, all_text
from lfm2np.oracle.check import fitting
from lfm2np.oracle.engines.records import Answer, Request, Trace, changed, greedy
from lfm2np.oracle.judging.allowed import Allowed
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.noise import DRAWS, allowed_by
from lfm2np.oracle.judging.scored import Known, add_noises, truths_of
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.suite.fuzz.trace import STOP_IN


@dataclass(frozen=True)
class Right:
    """One token. `bound` in nats; `decided`: another token is wrong here, not only as good."""

    token_id: int
    logprob: float
    bound: float
    decided: bool


def right_answer(model: Model, format_name: str, request: Request, seen: Answer | None) -> list[Right]:
    """For a greedy request the oracle's tokens; for a sampled one those that the engine gave."""
    tokens = fitted_tokens(model, request, seen) if request.is_sampled else best_tokens(model, request)
    if not tokens:
        return []
    asked, known = greedy("right", request.prompt_token_ids, len(tokens)), Known()
    pair = (asked, Answer(tuple(tokens)))
    (truth,) = truths_of(model, [pair], known).values()
    add_noises(model, format_name, [truth], known, DRAWS)
    allowed = allowed_by(truth, known.noises[format_name, truth.spoken], format_named(format_name).bits)
    start = len(request.prompt_token_ids) - 1
    return [right_token(token, allowed[row], request.is_sampled) for row, token in enumerate(tokens, start)]


def right_token(token_id: int, allowed: Allowed, is_drawn: bool) -> Right:
    column = allowed.at(token_id)
    return Right(
        token_id, float(allowed.logprobs[column]), allowed.bound(column), not is_drawn and allowed.next > LIMIT
    )


def fitted_tokens(model: Model, request: Request, seen: Answer | None) -> tuple[int, ...]:
    """Empty for an answer that can't be scored."""
    if seen is None or seen.error is not None:
        return ()
    return fitting(request, replace(seen, is_aborted=True), model.config).ids


def best_tokens(model: Model, request: Request) -> tuple[int, ...]:
    """Up to the token that completes the stop text; not ended by an end-of-sequence token."""
    engine = Engine(model)
    stop = (request.stop,) if request.stop is not None and model.has_tokenizer else ()
    params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, stop=stop)
    engine.add_request("right", request.prompt_token_ids, params)
    tokens: tuple[int, ...] = ()
    while engine.has_unfinished:
        for output in engine.step():
            tokens = tuple(output.outputs[0].token_ids)
    return tokens


def stop_fault(tokenizer: Tokenizer, ends: Collection[int], request: Request, answer: Answer) -> str | None:
    """Why an answer can't be right: it goes on behind its stop string, or ends though that never came; or None."""
    ids = answer.token_ids
    if not ids or request.stop is None or not all_text(tokenizer, ids):
        return None
    if request.stop in tokenizer.decode(ids[:-1]):
        return f"stop {request.stop!r} stands in the text of its first {len(ids) - 1} tokens, yet it goes on"
    if len(ids) < request.max_tokens and request.stop not in tokenizer.decode(ids) and ids[-1] not in ends:
        return f"ends after {len(ids)} of {request.max_tokens} tokens, and stop {request.stop!r} is not in its text"
    return None


def with_stops(model: Model, trace: Trace) -> Trace:
    """The trace with stop strings that its requests will meet: see STOP_IN."""
    if not model.has_tokenizer or all(STOP_IN not in request.tags for request in trace.requests):
        return trace
    return Trace(
        tuple(changed(request, stop=stop_in(model, request) or request.params.stop) for request in trace.requests)
    )


def stop_in(model: Model, request: Request) -> str | None:
    """A text that begins in the token before number `stop_in` of the right answer, and ends within that token if it has
    more than one character: an engine that looks only at the ends of tokens misses it. None where there is none."""
    if STOP_IN not in request.tags or request.is_sampled or request.stop is None:
        return None
    first = changed(request, stop=(), max_tokens=min(request.max_tokens, request.tags[STOP_IN] + 1))
    ids = best_tokens(model, first)
    if not all_text(model.tokenizer, ids):
        return None
    before, whole = model.tokenizer.decode(ids[:-1]), model.tokenizer.decode(ids)
    if UNFINISHED in whole:
        return None
    last = whole[len(before) :]
    return (before[-1:] + (last[:-1] or last)) or None
