"""Stop strings: what is held back; what ends a text: internal_properties/drafts.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.engine.sampling.stop_strings import StopChecker

LETTERS = "ab\ufffd"
texts = st.text(LETTERS, max_size=8)
stop_lists = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)


def checker(*stops: str, include: bool = False) -> StopChecker:
    return StopChecker(stops, include)


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of the text that is a proper prefix of a stop string."""
    lengths = range(1, len(text) + 1)
    return max((n for n in lengths for stop in stops if n < len(stop) and stop.startswith(text[-n:])), default=0)


@pytest.mark.slow
@given(st.lists(texts, max_size=10), stop_lists, st.booleans(), st.integers(0, 4))
def test_held_back_is_what_may_still_become_a_stop_string_and_nothing_more(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
):
    watch = checker(*stops, include=include)
    text = shown = ""
    for count, piece in enumerate(pieces, start=1):
        text += piece
        more, stopped = watch.push(piece, count > min_tokens)
        shown += more
        if stopped is not None:
            return
        assert shown == text[: len(text) - longest_beginning(text, stops)]


def test_what_was_held_back_is_shown_as_soon_as_it_cannot_match():
    """A bare string is one stop string; without any, all text is shown at once."""
    watch = checker("aab", "ac")
    assert [watch.push(piece)[0] for piece in ("a", "a", "a", "x", "a")] == ["", "", "a", "aax", ""]
    assert watch.finish() == ("a", None)
    assert StopChecker("ab", False).push("a") == ("", None)
    assert checker().push("abc") == ("abc", None)


def test_the_state_and_so_the_cost_of_a_push_stays_bounded_by_the_stop_strings():
    watch = checker("aab", "abab")
    for piece in "aab" * 5 + "abaa" * 200:
        watch.push(piece, False)
        assert len(watch._held) <= 3
