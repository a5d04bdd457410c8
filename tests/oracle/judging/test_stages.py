"""Two emulated engines judge first, all eight where these leave a doubt: the verdict is that of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from engines import told
from hypothesis import given
from hypothesis import strategies as st

import lfm2np
from lfm2np.engine.loading import Model
from lfm2np.oracle.check import LEAST_JUDGED, Checked, as_far_as_needed, judged, num_tokens, until_wrong
from lfm2np.oracle.check_report import report_of
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Answer, Pair, greedy
from lfm2np.oracle.engines.target import Abilities
from lfm2np.oracle.judging import judge as judging
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.noise import DRAWS, FIRST, Noise, spread_of
from lfm2np.oracle.judging.position import is_wrong
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.judging.truth import Spoken, Truth
from lfm2np.oracle.judging.verdict import LIMIT, Position, Verdict
from lfm2np.oracle.report.as_json import as_json
from lfm2np.oracle.report.as_text import as_text
from lfm2np.oracle.sending import send_all

pytestmark = [pytest.mark.usefixtures("without_constants"), pytest.mark.slow]


@cache
def model() -> Model:
    return lfm2np.load()


@cache
def float32() -> list[Pair]:
    """A right engine's answers to twelve requests."""
    return told(model(), "engines:float32", ["short-prompts", "borders"])[:12]


def positions(ratio: float) -> list[Position]:
    request, verdict = greedy("a", (1,), 1, case="case"), Verdict.DRIFT if abs(ratio) > LIMIT else Verdict.EXACT
    return [Position(request, 0, True, 1, 1, 0.0, 0.0, 9.0, 0.0, ratio, ratio, verdict)]


@given(st.lists(st.tuples(st.floats(0.01, 3), st.floats(0, 30)), max_size=5), st.floats(0, 40), st.booleans())
def test_the_verdict_of_two_engines_is_that_of_all(
    squares: list[tuple[float, float]], error: float, is_mixture: bool
) -> None:
    """Each answer has one error. `squares` are the sums of two engines' squared errors and of the six others'."""

    def judge_by(draws: Sequence[int], indices: Sequence[int]) -> list[list[Position]]:
        asked.extend((len(draws), index) for index in indices)
        totals = [two + (others if draws == DRAWS else 0.0) for two, others in squares]
        return [positions(error / np.sqrt(totals[index] / len(draws))) for index in indices]

    asked: list[tuple[int, int]] = []
    by_some = judging.by_enough_engines(len(squares), judge_by, np.inf if is_mixture else 50.0)
    once, by_all = list(asked), judge_by(DRAWS, range(len(squares)))
    assert any(map(is_wrong, by_some)) == any(map(is_wrong, by_all))
    for index, answer in enumerate(by_some):
        if (len(DRAWS), index) in once or not any(map(is_wrong, by_all)) or is_mixture:
            assert is_wrong(answer) == is_wrong(by_all[index])
        assert is_wrong(answer) or not is_wrong(by_all[index])


def wrong(pairs: Sequence[Pair], place: int) -> list[Pair]:
    request, answer = pairs[place]
    return [
        *pairs[:place],
        (request, replace(answer, logprobs=tuple(logprob - 1.0 for logprob in answer.logprobs or ()))),
        *pairs[place + 1 :],
    ]


def found(pairs: Sequence[Pair], known: Known) -> Checked:
    return judged(model(), Abilities("recorded"), "float32", pairs, known=known)


@cache
def known_of_both() -> Known:
    """Of whole checks with one wrong answer: other formats, which are tried then, are emulated once."""
    known = Known()
    judge(model(), "float32", float32(), known=known, draws=FIRST)
    return known


@pytest.mark.rounding
@pytest.mark.parametrize("place", [0, 11])
def test_the_first_wrong_answer_ends_a_check(place: int) -> None:
    pairs, known = wrong(float32(), place), Known()
    needed = as_far_as_needed(pairs, until_wrong(model(), "float32", known))
    until = num_tokens(pairs[: place + 1])
    assert until <= num_tokens(needed) <= max(LEAST_JUDGED, 2 * until) + max(num_tokens([pair]) for pair in pairs)
    first = found(needed, known)
    assert first.total.verdict is found(pairs, known_of_both()).total.verdict
    assert (
        first.total.first_wrong is not None and first.total.first_wrong.request.request_id == pairs[place][0].request_id
    )


@pytest.mark.rounding
def test_a_refuted_answer_ends_it_too_and_a_right_engine_gets_every_request() -> None:
    pairs = list(float32())
    assert as_far_as_needed(pairs, until_wrong(model(), "float32", Known())) == pairs
    pairs[0] = pairs[0][0], Answer((0,) * 99)
    assert len(as_far_as_needed(pairs, until_wrong(model(), "float32", Known()))) < len(pairs)


@pytest.mark.rounding
def test_a_check_that_ends_early_says_what_it_left_out() -> None:
    target = PythonTarget("lfm2np.teaching.tutorial:wrong", model().path)
    known = Known()
    asked = send_all(model(), target, 2, cases=["short-prompts"], on=until_wrong(model(), "float32", known))
    assert len(asked.pairs) + asked.left == 10 and asked.left > 0
    result = replace(judged(model(), asked.abilities, "float32", asked.pairs, known=known), left=asked.left)
    assert (
        f"{asked.left} requests after one that is certainly wrong" in as_text(report_of(result))
        and as_json(report_of(result))["figures"]["left"] == asked.left
    )


@given(st.integers(0, 2**32 - 1), st.floats(0, 30), st.sampled_from([(1,), FIRST, DRAWS]))
def test_no_scale_of_some_engines_is_too_large_by_more_than_their_number(
    seed: int, power: float, draws: tuple[int, ...]
) -> None:
    """Also where only these err: then it is by that."""
    random = np.random.default_rng(seed)
    errors = (random.normal(size=(8, 2, 5)) * 2.0 ** -random.uniform(0, power, (8, 2, 5))).astype(np.float32)
    errors[[draw for draw in DRAWS if draw not in draws], 1] = 0.0
    logprobs = np.log(random.dirichlet(np.ones(5), 2))
    columns, zeros = np.tile(np.arange(5), (2, 1)), np.zeros(2, np.int64)
    truth = Truth(Spoken((1, 2, 3)), columns, logprobs, zeros, np.exp(logprobs * 2).sum(1), np.ones(2), 5)
    subset = errors[list(draws)]
    some, every = Noise(draws, subset, spread_of(subset)), Noise(DRAWS, errors, spread_of(errors))
    factor = np.sqrt(len(DRAWS) / len(draws))
    assert (some.gap_scales(zeros) <= factor * every.gap_scales(zeros) * (1 + 1e-12)).all()
    assert (some.scales(truth) <= factor * every.scales(truth) * (1 + 1e-12)).all()
    assert some.scales(truth)[1, 0] > 0.999 * factor * every.scales(truth)[1, 0]
