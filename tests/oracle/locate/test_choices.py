"""Chosen experts against what they are preferred by, and whose numbers are wrong, in words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.oracle.locate import choice
from lfm2np.oracle.locate.choice import NOBODY
from lfm2np.oracle.locate.spread import LIMIT, Measured

NOISE = 0.01  # of each score
BOUND = LIMIT * NOISE * np.sqrt(2.0)


def scores(*rows: list[float]) -> Measured:
    return Measured(np.array(rows), np.full((len(rows), len(rows[0])), NOISE))


@pytest.mark.parametrize(("apart", "is_wrong"), [(0.99 * BOUND, False), (1.01 * BOUND, True)])
@pytest.mark.parametrize("order", [[1, 0], [0, 1]])
def test_what_is_farther_apart_than_four_times_the_noise_is_no_tie(
    apart: float, is_wrong: bool, order: list[int]
) -> None:
    judgement = choice.judged(np.array([[0, 3]])[:, order], scores([0.9, 0.5, 0.1, 0.5 - apart]))
    place = order.index(1)
    assert judgement.errors[0, place] == pytest.approx(apart / BOUND)
    assert (judgement.errors[0] > 1.0).tolist() == [is_wrong and row == place for row in range(2)]
    assert (judgement.instead[0, place], judgement.instead[0, 1 - place]) == (1, NOBODY)


def test_a_wrong_expert_is_compared_with_the_missing_one_that_gives_the_largest_error() -> None:
    judgement = choice.judged(np.array([[2, 3]]), scores([0.9, 0.6, 0.3, 0.2]))
    assert judgement.instead.tolist() == [[0, 0]]
    times = 0.7 / (NOISE * 2**0.5)
    words = f"routed to expert 3 instead of 0, although their scores are {times:.3g} times the noise apart"
    assert judgement.in_words(0, 1) == words
    assert judgement.described() == "chosen wrongly: experts 2 to 3 of 4; left out: expert 0 of 4"


@given(st.integers(0, 2**32 - 1), st.integers(1, 8))
def test_whatever_noise_chooses_is_right_and_was_in_doubt(seed: int, count: int) -> None:
    """Scores that are moved by up to their noise: no choice by them is wrong, nor one that it was thought sure of."""
    random = np.random.default_rng(seed)
    measured = Measured(random.integers(0, 12, (6, 8)) / 100.0, 0.02 * random.random((6, 8)))
    moved = measured.values + measured.spread * random.uniform(-1.0, 1.0, (6, 8))
    ids = np.argsort(-moved, axis=-1, kind="stable")[:, :count]
    assert choice.judged(random.permuted(ids, axis=1).astype(float), measured).errors.max() <= 1.0
    expected = choice.best(measured, count)
    assert not ((expected.values != ids) & (expected.spread == 0.0)).any()


def test_the_last_rows_alone_may_be_dumped_and_those_that_cannot_be_are_what_they_should() -> None:
    expected = choice.best(scores([0.9, 0.5, 0.1], [0.1, 0.5, 0.9], [0.9, 0.1, 0.5]), 2)
    read = choice.as_read(np.array([[0.0, 1.0], [7.0, 1.0]]), expected, 3)
    assert read.values.tolist() == [[0, 1], [0, 1], [0, 2]]
    judgement = choice.judged(np.array([[2, 1], [0, 2]]), scores([0.0] * 3, [0.1, 0.5, 0.9], [0.9, 0.1, 0.5]))
    assert judgement.errors.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("row", "is_open"),
    [([0.5, 0.5, 0.3, 0.1], True), ([0.9, 0.5, 0.5, 0.1], True), ([0.9, 0.8, 0.5, 0.5], False)],
)
def test_a_token_whose_experts_or_their_order_are_open_is_not_judged(row: list[float], is_open: bool) -> None:
    """The best two, or the second and the third; not those behind."""
    assert choice.best(scores(row, [0.9, 0.8, 0.5, 0.1]), 2).spread.any(axis=1).tolist() == [is_open, False]


def test_how_many_nearly_tie_with_the_last_that_is_chosen() -> None:
    tied = scores([0.5, 0.5, 0.5, 0.1])
    assert [choice.share_open(tied, count) for count in (2, 4)] == [0.75, 0.0]  # all four are chosen
    assert choice.share_open(scores([0.9, 0.8, 0.5, 0.1]), 2) == 0.25  # itself


WHOSE = np.array([[5, 1], [1, 2], [5, 0], [2, 0]])


@pytest.mark.parametrize(
    ("wrong", "by_place", "text"),
    [
        ([[1, 0], [0, 0], [1, 0], [0, 0]], True, "expert 5: all 2 rows that chose it"),
        ([[1, 0], [0, 0], [0, 0], [0, 0]], True, "expert 5: 1 of 2 rows that chose it"),
        ([[1, 1], [0, 0], [1, 0], [0, 0]], True, "experts 1, 5 of 8"),
        ([[1, 1], [1, 1], [1, 1], [1, 1]], True, ""),
        ([[1], [0], [1], [0]], False, "expert 5: all 2 rows that chose it"),
        ([[0], [0], [1], [0]], False, "expert 0: 1 of 2 rows that chose it"),
        ([[1], [1], [1], [1]], False, ""),
        ([[1], [0], [0], [1]], False, ""),
    ],
)
def test_whose_numbers_are_wrong_in_words(wrong: list[list[int]], by_place: bool, text: str) -> None:
    """Of each place, or of their sum."""
    assert choice.describe_whose(np.array(wrong, bool), WHOSE, 8, by_place) == text
