"""Two answers to the same tokens, against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.oracle.engines.records import Answer
from lfm2np.suite.itself.pairs import compared, flip, lead, stopped

TWO = "expected 2 as in the other answer"


def test_a_continuation_is_compared_from_its_token_on() -> None:
    whole = Answer((1, 2, 3, 4), (-0.1, -0.2, -0.3, -0.4))
    pair = compared(whole, Answer((3, 4), (-0.3, -0.4)), start=2, most=4)
    assert [each.position for each in pair.positions] == [2, 3] and all(each.is_equal for each in pair.positions)
    assert compared(whole, Answer((3,), (-0.3,)), start=2, most=1).fault is None
    assert compared(whole, Answer((3,), (-0.3,)), start=2, most=2).fault == f"1 tokens, {TWO}"


def test_other_lengths_texts_and_reasons_are_faults() -> None:
    here = Answer((1, 2), finish_reason="length", text="ab")
    assert compared(here, Answer((1,)), is_whole=True).fault == f"1 tokens, {TWO}"
    more = compared(here, Answer((1, 2, 3), finish_reason="stop"), is_whole=True).fault
    assert more == f"3 tokens, finish_reason 'stop', {TWO}"
    other = compared(here, Answer((1, 2), finish_reason="length", text="ac"), is_whole=True).fault
    assert other == "text 'ac' of the same tokens, expected 'ab' as in the other answer"
    ended = Answer((1, 2), finish_reason="stop", text="ab")
    assert (compared(here, ended, is_whole=True).fault or "").startswith("finish_reason 'stop' of the same tokens")
    assert compared(here, Answer(error="HTTP 500")).fault == "HTTP 500"
    assert compared(here, Answer()).fault == "no token ids were reported"


def test_another_token_needs_the_leads_of_both_runs() -> None:
    here, there = {1: -0.5, 2: -0.8, 3: -4.0}, {1: -0.75, 2: -0.65, 3: -4.0}
    assert flip(here, there, 1, 2) == (pytest.approx(0.3 + 0.1), False)
    assert flip({1: -0.5, 3: -4.0}, there, 1, 2) == (pytest.approx(3.5 + 0.1), True)  # at most as likely as the least
    assert flip({}, {5: -1.0}, 1, 2) == (None, False)


def test_a_token_that_is_alone_reported_leads_by_what_it_leaves_to_others() -> None:
    alone = -0.001 - math.log(1.0 - math.exp(-0.001))
    assert flip({5: -0.001}, {9: -0.001}, 5, 9) == (pytest.approx(2 * alone), True)
    assert flip({5: -0.001}, {9: -0.001, 5: -8.0}, 5, 9) == (pytest.approx(alone + 7.999), True)
    assert flip({5: -0.001}, {}, 5, 9) == flip({}, {9: -0.001}, 5, 9) == (pytest.approx(alone), True)
    assert flip({5: -1.5}, {9: -1.5}, 5, 9) == (0.0, True)  # any lead may be behind that
    assert flip({5: -1.5}, {9: -1.9}, 5, 9) == (pytest.approx(0.4), True)  # of the likeliest tokens of both runs
    (position,) = compared(Answer((5,), (-0.001,)), Answer((9,), (-0.001,))).positions
    assert position.noise == (pytest.approx(2 * alone / math.sqrt(2.0)),) and position.is_open


@pytest.mark.parametrize("certain", [0.0, -0.0, 1e-7, -1e-300])
def test_a_certain_token_has_a_lead_that_json_can_hold(certain: float) -> None:
    assert 15 < lead({5: certain}, 5) == lead({5: certain}, 5, 9) < 20
    size, _ = flip({5: certain}, {9: certain}, 5, 9)
    assert size is not None and math.isfinite(size)


def test_a_token_that_its_own_run_finds_less_likely_than_the_other_has_no_lead_to_take_away() -> None:
    """An engine that takes the second best beside others: both runs report the same numbers."""
    same = {5: -0.1, 9: -2.5}
    assert flip(same, same, 5, 9) == (pytest.approx(2.4), False)


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=3, max_size=6), st.data())
def test_other_tokens_differ_by_at_least_the_size_and_by_that_if_both_are_reported(
    logits: list[tuple[float, float]], data: st.DataObject
) -> None:
    """By how much the gap of two tokens' logits differs between two runs that each choose their likeliest."""
    runs = [np.array(run) - np.logaddexp.reduce(run) for run in zip(*logits, strict=True)]
    token, other = (int(run.argmax()) for run in runs)
    counts = [data.draw(st.integers(1, len(logits)), label="reported") for _ in runs]
    order = [run.argsort()[::-1][:count] for run, count in zip(runs, counts, strict=True)]
    here, there = ({int(i): float(run[i]) for i in best} for run, best in zip(runs, order, strict=True))
    if token == other or token not in here or other not in there:
        return
    size, is_open = flip(here, there, token, other)
    gaps = [float(run[token] - run[other]) for run in runs]
    assert size is not None and size <= gaps[0] - gaps[1] + 1e-6  # of a rest that is the difference to 1
    assert is_open == (other not in here or token not in there)
    assert is_open or size == pytest.approx(gaps[0] - gaps[1])


def test_another_token_that_was_drawn_shows_no_lead() -> None:
    first = Answer((1,), (-0.7,), top_logprobs=({1: -0.7, 2: -0.7},))
    second = Answer((2,), (-0.7,), top_logprobs=({1: -0.7, 2: -0.7},))
    (drawn,) = compared(first, second, is_drawn=True).positions
    assert drawn.is_flip and drawn.is_open and drawn.noise == (0.0, 0.0) and drawn.difference == 0.0


WHOLE = Answer((1, 2, 3, 4), text="ab cd ef gh", finish_reason="length")


@pytest.mark.parametrize(
    ("ids", "text", "reason", "fault"),
    [
        ((1, 2, 3), "ab c", "stop", None),
        ((1, 2), "ab c", "stop", None),  # some servers leave out the tokens of the stop string
        ((1, 2, 3), None, "stop", None),
        ((1, 5), "ab zz", "stop", None),  # after another token the text is another
        ((1, 2, 3, 4), "ab cd ef gh", "stop", "expected 'ab c'"),
        ((1, 2, 3), "ab cd", "stop", "expected 'ab c'"),
        ((1, 2, 3), "ab c", "length", "'length' after 3 of 4"),
    ],
)
def test_an_answer_ends_where_its_text_first_has_the_stop_string(
    ids: tuple[int, ...], text: str | None, reason: str, fault: str | None
) -> None:
    found = stopped(WHOLE, Answer(ids, text=text, finish_reason=reason), "d e", 4).fault
    assert found is None if fault is None else fault in str(found)
