"""The measure of rounding, and what is beyond it."""

from __future__ import annotations

import math
import random

import pytest

from lfm2np.suite.itself.pairs import Compared
from lfm2np.suite.itself.rounding_spread import (
    LEAST_ROUNDINGS,
    LIMIT,
    RATIO,
    TOGETHER,
    Outcome,
    Spread,
    beyond,
    limits_of,
    outcome,
    score_of,
    spread_of,
)

SPREAD = Spread(0.01, True)


def groups(size: float, count: int, seed: int = 0) -> list[list[float]]:
    choice = random.Random(seed)
    return [[abs(choice.gauss(0, size)) for _ in range(12)] for _ in range(count)]


def at(*noise: float, is_flip: bool = False, is_open: bool = False) -> Compared:
    is_equal = not any(noise) and not is_flip
    return Compared(0, noise[0] if noise else None, noise, is_equal, is_flip, is_open=is_open)


def test_a_broken_minority_does_not_raise_the_spread() -> None:
    clean = spread_of(groups(0.01, 20), [], "float16")
    leaking = spread_of(groups(0.01, 8) + groups(0.35, 12, seed=1), [], "float16")
    assert clean.is_measured and 0.005 < clean.nats < 0.02
    assert clean.nats / 2 < leaking.nats < 2 * clean.nats


def test_pairs_without_any_difference_measure_nothing() -> None:
    equal, coarse = (spread_of([[0.0] * 5] * 30, [], name) for name in ("float32", "bfloat16"))
    assert not equal.is_measured and equal.limit == pytest.approx(limits_of("float32")[0])
    assert not coarse.is_measured and coarse.nats == LEAST_ROUNDINGS * 2.0**-8
    assert spread_of([[0.0] * 5] * 30, groups(0.01, 10), "bfloat16").is_measured
    moved = [[1e-4], [1e-4], *[[0.02]] * 5]  # few pairs that move measure nothing
    assert not spread_of([*moved, *[[0.0]] * 25], [], "bfloat16").is_measured
    assert spread_of(moved, [], "bfloat16").is_measured


def test_the_spread_is_bounded_by_the_format_and_by_other_orders() -> None:
    assert spread_of(groups(1.0, 20), [], "float32").nats == limits_of("float32")[0]
    other = spread_of([], groups(0.01, 20), "float16").nats
    both = spread_of(groups(0.3, 20), groups(0.01, 20), "float16").nats
    assert both == pytest.approx(min(RATIO * other, limits_of("float16")[0]))
    least = LEAST_ROUNDINGS * 2.0**-24
    assert spread_of(groups(1e-4, 20), [[0.0]] * 20, "float32").nats == pytest.approx(RATIO * least)
    assert spread_of(groups(1e-9, 20), [], "float32").nats == least


def test_one_position_and_all_together_are_beyond() -> None:
    assert beyond(SPREAD, [at(0.0), at(0.01), at(0.05)]) is None
    excess = beyond(SPREAD, [at(0.01), at(0.01, 1.01 * LIMIT * 0.01)])
    assert excess is not None and excess[1] == 1 and "times the spread" in excess[0]
    assert beyond(SPREAD, [at(0.01)] * 9 + [at(0.99 * LIMIT * 0.01)]) is None
    together = beyond(SPREAD, [at(1.1 * RATIO * 0.01)] * TOGETHER)
    assert together is not None and together[0].startswith("all positions together")


@pytest.mark.parametrize(("format_name", "size", "amplified"), [("float32", 1e-6, 200.0), ("bfloat16", 0.03, 20.0)])
def test_a_position_that_amplifies_rounding_is_explained(format_name: str, size: float, amplified: float) -> None:
    """As llama.cpp's of a random Gemma 3 do in float32, and near ties of experts in bfloat16."""
    spread = spread_of(groups(size, 20), [], format_name)
    quiet = [at(size)] * 400
    assert beyond(spread, [*quiet, at(amplified * spread.nats)]) is None
    assert beyond(spread, [*quiet, at(2.0 * amplified * spread.nats)]) is not None
    assert beyond(spread, [at(size)] * 4 + [at(amplified * spread.nats)]) is None  # a short answer
    assert beyond(spread, [*quiet, at(1e-3)]) is not None or format_name == "bfloat16"  # a wrong state


def test_another_token_without_a_log_probability_is_not_judged() -> None:
    assert beyond(SPREAD, [at(is_flip=True)]) is None
    assert outcome([at(is_flip=True)], SPREAD) is Outcome.UNKNOWN
    assert outcome([], SPREAD) is Outcome.UNKNOWN
    assert outcome([at()], SPREAD) is Outcome.TOKENS and score_of([[at()]]).equal == 0
    assert outcome([at(0.0)], SPREAD) is Outcome.EQUAL and outcome([at(0.0), at(0.01)], SPREAD) is Outcome.WITHIN


def test_other_tokens_that_may_be_near_ties_are_judged_by_how_many_they_are() -> None:
    tie = at(0.0, is_flip=True, is_open=True)
    few, some, many = ([at(0.0)] * (100 - count) + [tie] * count for count in (3, 8, 20))
    assert beyond(SPREAD, few) is None and outcome(few, SPREAD) is Outcome.WITHIN
    assert beyond(SPREAD, some) is None and outcome(some, SPREAD) is Outcome.UNKNOWN
    excess = beyond(SPREAD, many)
    assert excess is not None and excess[1] == 80 and "20 of 100 positions have other tokens" in excess[0]
    large = beyond(SPREAD, [at(9.8, is_flip=True, is_open=True)])
    assert large is not None and "at least 9.8 nat" in large[0]


def test_the_score_has_the_divergence_of_sglangs_tests() -> None:
    """Mean over requests of the mean of exp(d) - 1 - d."""
    first = [Compared(0, 0.1, (0.1,), False), Compared(1, 0.0, (0.0,), True)]
    second = [Compared(0, -0.2, (0.2,), False), Compared(1, 0.4, (0.4,), False, True)]
    score = score_of([first, second])
    by_hand = ((math.exp(0.1) - 1.1) / 2 + (math.exp(-0.2) - 0.8)) / 2
    assert score.kl == pytest.approx(by_hand) and (score.positions, score.equal, score.flips) == (4, 1, 1)
    assert score.largest == 0.2
    assert score_of([[at(is_flip=True)]]).kl is None
