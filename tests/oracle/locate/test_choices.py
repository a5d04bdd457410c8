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


@pytest.mark.parametrize(
    ("row", "is_open"),
    [([0.5, 0.5, 0.3, 0.1], True), ([0.9, 0.5, 0.5, 0.1], True), ([0.9, 0.8, 0.5, 0.5], False)],
)
def test_a_token_whose_experts_or_their_order_are_open_is_not_judged(row: list[float], is_open: bool) -> None:
    """The best two, or the second and the third; not those behind."""
    assert choice.best(scores(row, [0.9, 0.8, 0.5, 0.1]), 2).spread.any(axis=1).tolist() == [is_open, False]


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
