"""Engines that round: an answer need not be exact, but must lie within the rounding error of the number format.

A factory says how its engine computes with an attribute `number_format`, a name of `FORMATS` in
oracle/judging/formats.py. Where the suite would demand equal answers, of two runs or of a run and the reference, each
answer is then judged by itself, as lfm2np/oracle/ does: its own tokens are scored in exact arithmetic, under the noise
of that format. Tokens that are drawn, or chosen from logits that were changed, can't be judged so: those examples are
greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lfm2np.oracle.engines.protocol import Factory
from lfm2np.oracle.engines.records import Answer, greedy
from lfm2np.oracle.engines.records_json import checked_answer
from lfm2np.oracle.engines.validate import validate
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.judging.verdict import FLIPS_LIMIT, Position, Verdict, flip_probability, probability_words
from lfm2np.oracle.report.report import are
from lfm2np.suite.properties.property import Violation
from lfm2np.suite.strategies.tiny_models import AnyModel, loaded

UNJUDGED = frozenset({"reference-noise", "processors"})  # features that no model of rounding errors speaks of
SMALL_RANGE = ("float16", "q8", "int8", "int4")  # formats that can't hold the weights of models that overflow


@dataclass(frozen=True)
class Rounding:
    """A factory whose engine computes in a number format. RequestError for a format that is none."""

    factory: Factory
    number_format: str

    def __post_init__(self) -> None:
        format_named(self.number_format)

    def __call__(self, model: str, sizes: dict[str, Any]) -> Any:
        return self.factory(model, sizes)


def format_of(factory: Factory) -> str | None:
    """None: exact, so that answers must be equal."""
    name: str | None = getattr(factory, "number_format", None)
    return name


def unjudged(factory: Factory) -> frozenset[str]:
    """Features that examples for this engine do without, since the number format allows no verdict."""
    name = format_of(factory)
    if name is None:
        return frozenset()
    return UNJUDGED | {"overflow"} if name in SMALL_RANGE else UNJUDGED


@lru_cache(maxsize=256)
def known_of(model: AnyModel) -> Known:
    return Known()


def require_explained(number_format: str, model: AnyModel, said: Sequence[tuple[str, tuple[int, ...], Answer]]) -> None:
    """Violation at the first token or log-probability that the format does not explain; `said` names each answer and
    gives its prompt."""
    pairs = []
    for where, prompt, answer in said:
        if answer.ids:
            request = greedy(where, prompt, len(answer.ids), case="conformance")
            fields = {"token_ids": answer.ids, "logprobs": answer.logprobs}
            if answer.finish_reason in ("stop", "length"):  # else only a part of the prompt may be computed
                fields["prompt_logprobs"] = answer.prompt_logprobs
            checked = validate(request, checked_answer(request, fields), model.vocab_size)
            if checked.error is not None:
                raise Violation(f"{where}: {checked.error}")
            pairs.append((request, checked))
    positions = judge(loaded(model), number_format, pairs, known=known_of(model))
    for position in positions:
        if position.verdict in (Verdict.BUG, Verdict.DRIFT):
            raise Violation(f"{wrong_words(position)} of {number_format}")
    flips, chance = flip_probability(positions)
    if chance < FLIPS_LIMIT:
        likely = f"probability {probability_words(chance)} together in {number_format}"
        raise Violation(f"{are(flips, 'token')} not the reference's: {likely}")


def require_rounded_scores(
    number_format: str, model: AnyModel, token_ids: tuple[int, ...], scores: Sequence[float]
) -> None:
    """Violation at the first log-probability that the format does not explain; of all tokens but the first."""
    request = greedy("score", token_ids, 1, case="conformance")
    checked = validate(request, Answer((0,), prompt_logprobs=tuple(scores)), model.vocab_size)
    if checked.error is not None:
        raise Violation(checked.error)
    for position in judge(loaded(model), number_format, [(request, checked)], known=known_of(model)):
        if position.verdict is Verdict.DRIFT:
            raise Violation(f"{wrong_words(position)} of {number_format}")


def wrong_words(position: Position) -> str:
    """What is wrong at a position, and by how much."""
    place = position.row - len(position.request.prompt_token_ids) + 1
    where = f"output token {place}" if place >= 0 else f"prompt token {position.row + 1}"
    if position.is_flip and position.verdict is Verdict.BUG:
        what = f"{position.token_id}, but the oracle's is {position.best}, {position.gap:.4g} nat ahead"
        ratio = position.gap_ratio
    else:
        what = f"token {position.token_id} with a log-probability that is off by {position.error or 0.0:+.4g} nat"
        ratio = abs(position.error_ratio or 0.0)
    return f"{position.request.request_id}, {where}: {what}: {ratio:.3g} times the noise"
