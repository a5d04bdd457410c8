"""The right answer to a request, in exact arithmetic, and how far off the declared format may be at each token."""

from __future__ import annotations

from dataclasses import dataclass

from lfm2np.engine.engine import Engine
from lfm2np.fuzz.trace import Sent
from lfm2np.loading import Model
from lfm2np.oracle.check import fitting
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.noise import DRAWS
from lfm2np.oracle.judging.position import margins, most_shift
from lfm2np.oracle.judging.scored import Known, truths_of
from lfm2np.oracle.judging.verdict import LIMIT
from lfm2np.oracle.targets.records import Answer, Ask
from lfm2np.sampling.params import SamplingParams


@dataclass(frozen=True)
class Right:
    """One token. `bound` in nats; `decided`: another token is wrong here, not only as good."""

    token_id: int
    logprob: float
    bound: float
    decided: bool


def right_answer(model: Model, format_name: str, sent: Sent, seen: Answer | None) -> list[Right]:
    """For a greedy request the oracle's tokens; for a sampled one those that the engine gave."""
    tokens = fitted_tokens(model, sent, seen) if sent.temperature else greedy(model, sent)
    if not tokens:
        return []
    ask, known = Ask("right", "fuzz", sent.prompt, len(tokens)), Known()
    pair = (ask, Answer("right", tuple(tokens)))
    positions = judge(model, format_name, [pair], known=known, stages=[DRAWS])
    (truth,) = truths_of(model, [pair], known).values()
    allowed = margins(truth, known.noises[format_name, truth.spoken], format_named(format_name).bits)
    answer = []
    for position in positions:
        row, column = position.row, truth.at(position.row, position.token_id)
        bound = float(allowed.units[row] + LIMIT * allowed.scales[row, column]) + most_shift(truth.vocab_size)
        decided = not sent.temperature and position.margin_ratio > LIMIT
        answer.append(Right(position.token_id, float(truth.logprobs[row, column]), bound, decided))
    return answer


def fitted_tokens(model: Model, sent: Sent, seen: Answer | None) -> tuple[int, ...]:
    """Empty for an answer that can't be scored."""
    if seen is None:
        return ()
    return fitting(Ask("right", "fuzz", sent.prompt, sent.max_tokens), seen, model.config).token_ids or ()


def greedy(model: Model, sent: Sent) -> tuple[int, ...]:
    """Up to the token that completes the stop text; not ended by an end-of-sequence token."""
    engine = Engine(model)
    stop = (sent.stop,) if sent.stop is not None and model.has_tokenizer else ()
    params = SamplingParams(temperature=0.0, max_tokens=sent.max_tokens, ignore_eos=True, stop=stop)
    engine.add_request("right", sent.prompt, params)
    tokens: tuple[int, ...] = ()
    while engine.has_unfinished:
        for output in engine.step():
            tokens = tuple(output.outputs[0].token_ids)
    return tokens
