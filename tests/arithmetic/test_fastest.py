"""The fastest way is found while all are used, and one that is hopeless is left soon."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lfm2np.arithmetic.products import fastest
from lfm2np.arithmetic.products.fastest import ENOUGH, HOPELESS, TRIES, about, is_wanted


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Takes seconds of each way, how many calls, and which is likely: the names of the ways in the order of calls."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(fastest, "found", {})
    monkeypatch.setattr(fastest, "MEASURED", True)

    def call(seconds: dict[str, float], calls: int, likely: str, key: int = 0) -> list[str]:
        taken: list[str] = []

        def way(name: str) -> Callable[[], None]:
            def compute() -> None:
                taken.append(name)
                clock[0] += seconds[name]

            return compute

        for _ in range(calls):
            fastest.fastest((key,), {name: way(name) for name in seconds}, likely)
        return taken

    return call


def test_each_is_tried_in_turn_and_then_the_fastest_is_taken(ways: Callable[..., list[str]]) -> None:
    taken = ways({"a": 1.5, "b": 1.0}, 2 * TRIES + 4, "a")
    assert taken[: 2 * TRIES] == ["a", "b"] * TRIES
    assert taken[2 * TRIES :] == ["b"] * 4
    assert fastest.found == {(0,): {"a": [1.5] * TRIES, "b": [1.0] * TRIES}}


def test_what_is_likely_comes_first_and_wins_a_tie(ways: Callable[..., list[str]]) -> None:
    taken = ways({"a": 1.0, "b": 1.0}, 2 * TRIES + 1, "b")
    assert taken[0] == taken[-1] == "b"


def test_the_best_time_of_a_way_counts(ways: Callable[..., list[str]]) -> None:
    """The first call of a way may wait for memory, or for another program."""
    assert ways({"a": 1.9, "b": 1.0}, 2, "a") == ["a", "b"]
    taken = ways({"a": 0.5, "b": 1.0}, 2 * TRIES, "a")
    assert taken[-1] == "a"


def test_one_that_takes_many_times_as_long_is_left_soon(ways: Callable[..., list[str]]) -> None:
    taken = ways({"a": 2 * HOPELESS, "b": 1.0, "c": 1.0}, 3 * TRIES, "a")
    assert taken.count("a") == ENOUGH < TRIES
    assert taken.count("b") >= TRIES


def test_one_that_was_disturbed_once_is_not(ways: Callable[..., list[str]]) -> None:
    ways({"a": 9 * HOPELESS, "b": 1.0}, 1, "a")
    assert ways({"a": 0.5, "b": 1.0}, 2 * TRIES, "a")[-1] == "a"


def test_a_variable_turns_it_off() -> None:
    assert is_wanted({}) and is_wanted({"LFM2NP_FASTEST": "1"})
    assert not is_wanted({"LFM2NP_FASTEST": "0"})


def test_keys_are_found_apart(ways: Callable[..., list[str]]) -> None:
    assert ways({"a": 1.0, "b": 1.5}, 2 * TRIES + 1, "a", 1)[-1] == "a"
    assert ways({"a": 1.5, "b": 1.0}, 2 * TRIES + 1, "a", 2)[-1] == "b"
    assert ways({"a": 9.0, "b": 9.0}, 1, "b", 1) == ["a"], "known, whatever it takes now"


def test_where_nothing_is_measured_the_likely_one_is_taken(
    ways: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastest, "MEASURED", False)
    assert ways({"a": 1.0, "b": 9.0}, 5, "b") == ["b"] * 5
    assert not fastest.found


def test_a_call_that_fails_counts_for_nothing(ways: Callable[..., list[str]]) -> None:
    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        fastest.fastest((0,), {"a": fail, "b": fail}, "a")
    assert fastest.found == {(0,): {"a": [], "b": []}}


def test_counts_of_about_the_same_time_are_one_key() -> None:
    assert [about(count) for count in (2, 7, 8, 9, 16, 17, 500, 512, 513)] == [2, 7, 8, 16, 16, 32, 512, 512, 1024]
