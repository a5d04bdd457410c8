"""Stop strings: what is held back, and borders by example; what ends a text: internal_properties/drafts.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from builders import tiny_config, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.checkpoint.text.tokenizer import Tokenizer, load_tokenizer
from lfm2np.engine.sampling.stop_strings import StopChecker

LETTERS = "ab\ufffd"
texts = st.text(LETTERS, max_size=8)
stop_lists = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)
Shown = tuple[str, str | None, int]  # all text that was shown, the stop string, the tokens taken


def checker(*stops: str, include: bool = False) -> StopChecker:
    return StopChecker(stops, include)


def run(pieces: Sequence[str], rest: str, stops: Sequence[str], include: bool = False, min_tokens: int = 0) -> Shown:
    watch, text = checker(*stops, include=include), ""
    for count, piece in enumerate(pieces, start=1):
        shown, stopped = watch.push(piece, count > min_tokens)
        text += shown
        if stopped is not None:
            return text, stopped, count
    shown, stopped = watch.finish(rest)
    return text + shown, stopped, len(pieces)


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of the text that is a proper prefix of a stop string."""
    lengths = range(1, len(text) + 1)
    return max((n for n in lengths for stop in stops if n < len(stop) and stop.startswith(text[-n:])), default=0)


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


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["x", "abc", "dy"], ["abcd", "bc"], ("xa", "bc", 2)),  # what ends first
        (["xa", "b"], ["b", "ab"], ("x", "ab", 2)),  # of those that end together, what starts first
        (["one STOP two"], ["STOP"], ("one ", "STOP", 1)),
    ],
)
def test_the_first_match_ends_the_text(pieces: list[str], stops: list[str], expected: Shown):
    assert run(pieces, "", stops) == expected


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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder, tiny_config())


def stream(tokenizer: Tokenizer, text: bytes, *stops: str) -> Shown:
    """The bytes as tokens, one for each byte (the two merges are not used)."""
    ids = {tokenizer.token_bytes(i): i for i in range(5, 5 + 256)}
    source = tokenizer.stream()
    pieces = [source.push(ids[bytes([byte])]) for byte in text]
    return run(pieces, source.finish(), stops)


def test_a_stop_string_of_many_bytes_matches_when_its_last_byte_comes(tokenizer: Tokenizer):
    assert stream(tokenizer, "schön → da".encode(), "→") == ("schön ", "→", len("schön →".encode()))
    assert stream(tokenizer, "schön → da".encode(), "ö", "→") == ("sch", "ö", 5)


def test_an_unfinished_character_at_the_end_may_complete_a_stop_string(tokenizer: Tokenizer):
    cut = "ab→".encode()[:-1]
    assert stream(tokenizer, cut) == ("ab\ufffd", None, 4)
    assert stream(tokenizer, cut, "\ufffd") == ("ab", "\ufffd", 4)
    assert stream(tokenizer, cut, "b\ufffd") == ("a", "b\ufffd", 4)
    assert stream(tokenizer, cut, "b\ufffdc") == ("ab\ufffd", None, 4)
