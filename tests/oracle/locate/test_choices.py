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
    assert choice.in_words(np.array([[2, 3]]), judgement, 0, 1, 4) == (
        f"routed to expert 3 instead of 0, although their scores are {times:.3g} times the noise apart"
    )
    assert choice.describe_choices(np.array([[2, 3]]), judgement, 4) == (
        "chosen wrongly: experts 2 to 3 of 4; left out: expert 0 of 4"
    )


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.booleans())
def test_whatever_noise_chooses_is_right_and_was_in_doubt(seed: int, count: int, by_place: bool) -> None:
    """Scores that are moved by up to their noise: no choice by them is wrong, nor one that it was thought sure of."""
    random = np.random.default_rng(seed)
    measured = Measured(random.integers(0, 12, (6, 8)) / 100.0, 0.02 * random.random((6, 8)))
    moved = measured.values + measured.spread * random.uniform(-1.0, 1.0, (6, 8))
    ids = np.argsort(-moved, axis=-1, kind="stable")[:, :count]
    assert choice.judged(random.permuted(ids, axis=1).astype(float), measured).errors.max() <= 1.0
    expected, actual = choice.places(measured, count, by_place), choice.as_places(ids, 8)
    differs = expected.values != actual if by_place else (expected.values > 0) != (actual > 0)
    assert not (differs & (expected.spread == 0.0)).any()


def test_places_and_ids_are_two_ways_to_say_the_same() -> None:
    ids = np.array([[3, 0], [1, 2]])
    places = choice.as_places(ids, 4)
    assert places.tolist() == [[2, 0, 0, 1], [0, 1, 2, 0]]
    assert choice.chosen_ids(Measured(places, np.zeros((2, 4))), 2).tolist() == ids.tolist()


def test_the_last_rows_alone_may_be_dumped_and_those_that_cannot_be_are_what_they_should() -> None:
    expected = choice.places(scores([0.9, 0.5, 0.1], [0.1, 0.5, 0.9], [0.9, 0.1, 0.5]), 2, False)
    read = choice.as_read(np.array([[0.0, 1.0], [7.0, 1.0]]), expected)
    assert choice.chosen_ids(read, 2).tolist() == [[0, 1], [0, 1], [0, 2]]
    judgement = choice.judged(np.array([[2, 1], [0, 2]]), scores([0.0] * 3, [0.1, 0.5, 0.9], [0.9, 0.1, 0.5]))
    assert judgement.errors.tolist() == [[0, 0], [0, 0]]


def test_a_choice_that_most_scores_leave_open_says_nothing() -> None:
    open_ones = choice.places(scores([0.5, 0.5, 0.5, 0.1]), 2, False)
    clear = choice.places(scores([0.9, 0.8, 0.5, 0.1]), 2, False)
    assert (choice.says_nothing(open_ones, 0.5), choice.says_nothing(clear, 0.5)) == (True, False)
    assert not choice.says_nothing(choice.places(scores([0.5] * 4), 4, False), 0.5)  # all are chosen


CHOSEN = np.array([[5, 1], [1, 2], [5, 0], [2, 0]])


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ([[1, 0], [0, 0], [1, 0], [0, 0]], "expert 5: all 2 rows that chose it"),
        ([[1, 0], [0, 0], [0, 0], [0, 0]], "expert 5: 1 of 2 rows that chose it"),
        ([[1, 1], [0, 0], [1, 0], [0, 0]], "experts 1, 5 of 8"),
        ([[1, 1], [1, 1], [1, 1], [1, 1]], ""),
    ],
)
def test_whose_outputs_are_wrong_in_words(wrong: list[list[int]], text: str) -> None:
    assert choice.describe_experts(np.array(wrong, bool), CHOSEN, 8) == text


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ([1, 0, 1, 0], "expert 5: all 2 rows that chose it"),
        ([0, 0, 1, 0], "expert 0: 1 of 2 rows that chose it"),
        ([1, 1, 1, 1], ""),
        ([1, 0, 0, 1], ""),
    ],
)
def test_who_is_common_to_wrong_sums_in_words(wrong: list[int], text: str) -> None:
    assert choice.describe_common(np.array(wrong, bool), CHOSEN) == text
    assert choice.share_of(1, 1) == "the only row that chose it"
