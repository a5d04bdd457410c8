"""Two answers to the same tokens, against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.invariance.pairs import LEAST_UNIT, compared, flip, scored, unit
from lfm2np.oracle.targets.records import Answer

TWO = math.log(2.0)


def answer(ids: tuple[int, ...], logprobs: tuple[float, ...] | None = None, **fields: object) -> Answer:
    return Answer("0", ids, logprobs, **fields)  # type: ignore[arg-type]


@given(st.lists(st.floats(-6, 6), min_size=2, max_size=8), st.data())
def test_the_unit_is_the_length_of_the_gradient_of_a_log_probability(logits: list[float], data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    logprobs = np.array(logits) - np.logaddexp.reduce(logits)
    gradient = np.eye(len(logits))[token] - np.exp(logprobs)
    others = [float(value) for index, value in enumerate(logprobs) if index != token]
    assert unit(float(logprobs[token]), others) == pytest.approx(max(LEAST_UNIT, float(np.linalg.norm(gradient))))


def test_equal_answers() -> None:
    here = answer((1, 2, 3), (-0.5, -1.0, -2.0), finish_reason="length", text="abc")
    pair = compared(here, here, is_whole=True)
    assert pair.fault is None and all(each.is_equal and each.difference == 0.0 for each in pair.positions)
    assert [each.position for each in pair.positions] == [0, 1, 2]


def test_a_difference_is_of_the_second_minus_the_first_and_in_units_of_a_logit() -> None:
    pair = compared(answer((1,), (-TWO,)), answer((1,), (-TWO + 0.01,)))
    (position,) = pair.positions
    assert position.difference == pytest.approx(0.01) and not position.is_equal
    assert position.noise == pytest.approx((0.02,))  # p = 1/2: half of each logit's noise


def test_what_follows_another_token_is_not_compared() -> None:
    pair = compared(answer((1, 2, 3), (-0.1, -0.7, -0.1)), answer((1, 9, 9), (-0.1, -0.69, -5.0)))
    assert [each.is_flip for each in pair.positions] == [False, True] and pair.fault is None


def test_a_continuation_is_compared_from_its_token_on() -> None:
    whole = answer((1, 2, 3, 4), (-0.1, -0.2, -0.3, -0.4))
    pair = compared(whole, answer((3, 4), (-0.3, -0.4)), start=2, most=4)
    assert [each.position for each in pair.positions] == [2, 3] and all(each.is_equal for each in pair.positions)
    assert compared(whole, answer((3,), (-0.3,)), start=2, most=1).fault is None
    assert (
        compared(whole, answer((3,), (-0.3,)), start=2, most=2).fault == "1 tokens, expected 2 as in the other answer"
    )


def test_other_lengths_texts_and_reasons_are_faults() -> None:
    here = answer((1, 2), finish_reason="length", text="ab")
    assert compared(here, answer((1,)), is_whole=True).fault == "1 tokens, expected 2 as in the other answer"
    more = compared(here, answer((1, 2, 3), finish_reason="stop"), is_whole=True).fault
    assert more == "3 tokens, finish_reason 'stop', expected 2 as in the other answer"
    other = answer((1, 2), finish_reason="length", text="ac")
    assert (
        compared(here, other, is_whole=True).fault
        == "text 'ac' of the same tokens, expected 'ab' as in the other answer"
    )
    ended = answer((1, 2), finish_reason="stop", text="ab")
    assert (compared(here, ended, is_whole=True).fault or "").startswith("finish_reason 'stop' of the same tokens")
    assert compared(here, Answer("0", error="HTTP 500")).fault == "HTTP 500"
    assert compared(here, Answer("0")).fault == "no token ids were reported"


def test_another_token_needs_the_leads_of_both_runs() -> None:
    here, there = {1: -0.5, 2: -0.8, 3: -4.0}, {1: -0.75, 2: -0.65, 3: -4.0}
    assert flip(here, there, 1, 2) == pytest.approx(0.3 + 0.1)
    assert flip({1: -0.5, 3: -4.0}, there, 1, 2) == pytest.approx(3.5 + 0.1)  # at most as likely as the least
    assert flip({1: -0.5}, {2: -0.6}, 1, 2) == pytest.approx(0.1)
    assert flip({}, there, 1, 2) is None


def test_another_token_that_was_drawn_shows_no_lead() -> None:
    first = answer((1,), (-0.7,), top_logprobs=({1: -0.7, 2: -0.7},))
    second = answer((2,), (-0.7,), top_logprobs=({1: -0.7, 2: -0.7},))
    (drawn,) = compared(first, second, is_drawn=True).positions
    assert drawn.is_flip and drawn.noise == (0.0, 0.0) and drawn.difference == 0.0


def test_scores_of_a_prompt_begin_with_its_second_token() -> None:
    pair = scored(answer((5, 6), (-1.0, -2.0)), (-9.0, -9.0, -1.0, -2.5), prompt=3)
    assert [each.difference for each in pair.positions] == [0.0, -0.5]
    assert [each.is_equal for each in pair.positions] == [True, False]
