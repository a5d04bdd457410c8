"""Engines that round: an answer need not be the exact one, but must lie within what the number format explains.

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

from lfm2np.conformance.draining import Violation
from lfm2np.conformance.strategies.models import AnyModel, loaded
from lfm2np.engine_protocol import Completion, Factory
from lfm2np.oracle.check import fitting_tokens
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.judging.verdict import FLIPS_LIMIT, Position, Verdict, flip_probability, probability_words
from lfm2np.oracle.targets.checked import checked_answer
from lfm2np.oracle.targets.records import Answer, Ask

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
    """What was computed for this model so far."""
    return Known()


def require_explained(
    number_format: str, model: AnyModel, said: Sequence[tuple[str, tuple[int, ...], Completion]], how: str = ""
) -> None:
    """Violation at the first token or log-probability that the format does not explain; `said` names each answer and
    gives its prompt."""
    pairs = []
    for where, prompt, answer in said:
        if answer.token_ids:
            ask = Ask(where, "conformance", prompt, len(answer.token_ids))
            fields = {"token_ids": answer.token_ids, "logprobs": answer.logprobs}
            if answer.finish_reason in ("stop", "length"):  # else only a part of the prompt may be computed
                fields["prompt_logprobs"] = answer.prompt_logprobs
            checked = fitting_tokens(ask, checked_answer(ask, fields), model.vocab_size)
            if checked.error is not None:
                raise Violation(f"{where}: {checked.error}")
            pairs.append((ask, checked))
    positions = judge(loaded(model), number_format, pairs, known=known_of(model))
    for one in positions:
        if one.verdict in (Verdict.BUG, Verdict.DRIFT):
            raise Violation(f"{described(one, number_format)} {how}".rstrip())
    flips, chance = flip_probability(positions)
    if chance < FLIPS_LIMIT:
        likely = f"probability {probability_words(chance)} together in {number_format}"
        raise Violation(f"{flips} tokens are not the reference's: {likely} {how}")


def require_scores(number_format: str, model: AnyModel, token_ids: tuple[int, ...], scores: Sequence[float]) -> None:
    """Log-probabilities of all tokens but the first."""
    pair = (Ask("score", "conformance", token_ids, 1), Answer("score", (0,), prompt_logprobs=tuple(scores)))
    for one in judge(loaded(model), number_format, [pair], known=known_of(model)):
        if one.verdict is Verdict.DRIFT:
            raise Violation(described(one, number_format))


def described(one: Position, number_format: str) -> str:
    output = one.row + 1 - len(one.ask.prompt_token_ids)
    place = f"{one.ask.id}, output token {output}" if one.is_new else f"{one.ask.id}, prompt token {one.row + 1}"
    if one.verdict is Verdict.BUG:
        return (
            f"{place}: {one.token_id}, the reference has {one.best}, {one.gap:.3g} nats ahead: "
            f"{one.gap_ratio:.1f} times the noise of {number_format}"
        )
    return (
        f"{place}: log-probability off by {one.error:.3g}: {abs(one.error_ratio or 0.0):.1f} times the noise of "
        f"{number_format}"
    )
