"""Log-probabilities that are right but for the way in which they are told: each way is named, and no bug is one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engines import known_of

from lfm2np.engine.loading import Model
from lfm2np.oracle.check import judged
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Answer, Pair
from lfm2np.oracle.engines.target import Abilities
from lfm2np.oracle.judging.scored import spoken, truths_of
from lfm2np.oracle.judging.verdict import Verdict
from lfm2np.oracle.sending import send_all
from lfm2np.oracle.total import Total

pytestmark = [pytest.mark.rounding, pytest.mark.slow]

Row = Mapping[int, float]
TOP = 5


@pytest.fixture(scope="module")
def pairs(model: Model) -> list[Pair]:
    """What an engine in float32 says of some prompts, with the TOP alternatives that it would tell."""
    target = PythonTarget("engines:float32", Path(model.path))
    answered = send_all(model, target, 4, cases=["short-prompts"]).pairs
    truths = truths_of(model, answered, known_of(model))
    with_tops = []
    for request, answer in answered:
        truth, tops = truths[spoken(request, answer)], []
        for index, (token, logprob) in enumerate(zip(answer.token_ids or (), answer.logprobs or (), strict=True)):
            row = len(request.prompt_token_ids) - 1 + index
            best = np.argsort(-truth.logprobs[row])[:TOP]
            top = dict(zip(truth.columns[row, best].tolist(), truth.logprobs[row, best].tolist(), strict=True))
            tops.append({**top, token: logprob})
        with_tops.append((request, replace(answer, top_logprobs=tuple(tops))))
    return with_tops


Change = Callable[[Answer], Answer]


@pytest.fixture
def total_of(model: Model, pairs: list[Pair]) -> Callable[[Change], Total]:
    """What comes of these answers, each of them changed."""

    def total(change: Change) -> Total:
        changed = [(request, change(answer)) for request, answer in pairs]
        return judged(model, Abilities("other"), "float32", changed, known=known_of(model)).total

    return total


def of_all(change: Callable[[float], float]) -> Change:
    def changed(answer: Answer) -> Answer:
        prompt = answer.prompt_logprobs
        return replace(
            of_tops(lambda row: {token: change(value) for token, value in row.items()})(answer),
            logprobs=tuple(map(change, answer.logprobs or ())),
            prompt_logprobs=None if prompt is None else tuple(map(change, prompt)),
        )

    return changed


def of_tops(change: Callable[[Row], Row]) -> Change:
    return lambda answer: replace(answer, top_logprobs=tuple(map(change, answer.top_logprobs or ())))


def of_new(change: Callable[[tuple[float, ...]], tuple[float, ...]]) -> Change:
    return lambda answer: replace(answer, logprobs=change(answer.logprobs or ()))


def normalised(row: Row) -> Row:
    total = math.log(math.fsum(map(math.exp, row.values())))
    return {token: value - total for token, value in row.items()}


WAYS: dict[str, tuple[Change, str]] = {
    "base 2": (
        of_all(lambda value: value / math.log(2.0)),
        "the log-probabilities of the new tokens, the alternatives and the prompts' tokens are to base 2, not natural",
    ),
    "base 10": (of_all(lambda value: value / math.log(10.0)), "prompts' tokens are to base 10, not natural"),
    "normalised": (
        of_tops(normalised),
        f"of the alternatives are normalised over the top {TOP}, not over the vocabulary (those of the new tokens and "
        "the prompts' tokens are right)",
    ),
    "temperature": (
        of_tops(lambda row: normalised({token: value / 0.7 for token, value in row.items()})),
        "of the alternatives are of temperature 0.7, not 1",
    ),
    "raw": (
        of_tops(lambda row: {token: value - 0.1 * len(row) for token, value in row.items()}),
        "of the alternatives are not normalised over the vocabulary: all of a position are off by the same",
    ),
    "zeros": (of_new(lambda logprobs: (0.0,) * len(logprobs)), "of the new tokens are all 0, as after a sampler"),
    "late": (of_new(lambda logprobs: (-1.0, *logprobs[:-1])), "of the new tokens are one position too late"),
    "floor": (
        of_all(lambda value: max(value, -1.0)),
        "of the new tokens, the alternatives and the prompts' tokens are never below -1",
    ),
    "decimals": (of_all(lambda value: round(value, 3)), "prompts' tokens are rounded to 3 decimals"),
    "float16": (of_all(lambda value: float(np.float16(value))), "prompts' tokens are rounded to float16"),
    "early": (of_new(lambda logprobs: (*logprobs[1:], -1.0)), "of the new tokens are one position too early"),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_way_of_telling_is_named(total_of: Callable[[Change], Total], name: str) -> None:
    change, words = WAYS[name]
    result = total_of(change)
    assert result.verdict is Verdict.BUG
    assert result.causes[0].sure == "certain" and words in result.reasons[0], result.reasons


def test_what_is_reported_correctly_or_can_not_be_divided_by_a_step_matches_no_way(
    total_of: Callable[[Change], Total],
) -> None:
    """Pinned: an OverflowError, where a mask's lowest float64 was reported."""
    assert total_of(lambda answer: answer).verdict is Verdict.EXACT
    assert total_of(of_all(lambda value: -sys.float_info.max)).verdict is Verdict.BUG


def test_a_bug_is_no_way_of_telling(total_of: Callable[[Change], Total]) -> None:
    """Each token off by something else behind the third new one: a state that is lost. All alternatives say so, too."""

    def off(token: int, logprob: float) -> float:
        return logprob - 0.3 - 0.2 * (token % 7)

    def worse(answer: Answer) -> Answer:
        tops = [{token: off(token, value) for token, value in row.items()} for row in (answer.top_logprobs or ())[3:]]
        shifted = tuple(map(off, (answer.token_ids or ())[3:], (answer.logprobs or ())[3:]))
        return replace(
            answer,
            logprobs=(*(answer.logprobs or ())[:3], *shifted),
            top_logprobs=(*(answer.top_logprobs or ())[:3], *tops),
        )

    result = total_of(worse)
    assert result.verdict is Verdict.BUG and "wrong from position 3 on" in result.reasons[0], result.reasons


def test_a_token_that_is_reported_twice_is_judged_twice(total_of: Callable[[Change], Total]) -> None:
    """Its own log-probability is right, the one among the alternatives is not."""

    def twice(answer: Answer) -> Answer:
        tops = zip(answer.token_ids or (), answer.top_logprobs or (), strict=True)
        return replace(answer, top_logprobs=tuple({**row, token: row[token] + 0.7} for token, row in tops))

    result = total_of(twice)
    assert result.verdict is Verdict.BUG
    assert any("tokens have two log-probabilities, first short-prompts-1" in reason for reason in result.reasons)
    assert any("have probabilities that sum above 1, first" in reason for reason in result.reasons)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (math.exp, "they may be probabilities and not their logarithms"),
        (lambda value: -value, "they may lack their sign"),
    ],
)
def test_positive_log_probabilities_get_an_explanation(
    total_of: Callable[[Change], Total], change: Callable[[float], float], words: str
) -> None:
    result = total_of(of_new(lambda logprobs: tuple(map(change, logprobs))))
    assert result.verdict is Verdict.BUG and words in result.reasons[0]
    assert not any("wrong" in reason for reason in result.reasons)  # all cases are, so that none is a suspect
