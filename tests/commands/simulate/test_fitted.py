"""The generators that are like real traces have the statistics of these, as fixtures/fit_traffic.py measured them."""

import functools
import itertools

import pytest
from fit_traffic import PrefixCache, fit_continued, fit_stream, source, statistics
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.commands.simulate import fitted
from lfm2np.commands.simulate.generators import parse
from lfm2np.commands.simulate.traffic import NANOSECONDS, Arrival, merge_runs

# Of the traces themselves, and how far three seeds of the generators may lie from them, relatively.
MOONCAKE = {
    "requests a second": (3.401, 0.05),
    "prompt, mean": (12035.0, 0.08),
    "prompt, 5 %": (901.0, 0.02),
    "prompt, 50 %": (6909.0, 0.06),
    "prompt, 75 %": (15367.0, 0.06),
    "prompt, 95 %": (39550.0, 0.08),
    "prompt, 99 %": (85400.0, 0.15),
    "output, mean": (342.6, 0.03),
    "output, 50 %": (350.0, 0.02),
    "output, 95 %": (698.0, 0.05),
    "prompt to output, rank correlation": (0.0715, 0.5),
    "cv² of gaps within 60 s": (9.829, 0.1),
    "dispersion of counts in 15 s": (1.768, 0.25),
    "dispersion of counts in 60 s": (2.75, 0.6),
    "prompt tokens that a prefix cache has": (0.3736, 0.08),
}
AZURE = {
    "requests a second": (5.53, 0.05),
    "prompt, mean": (1154.7, 0.03),
    "prompt, 5 %": (181.0, 0.02),
    "prompt, 50 %": (1020.0, 0.01),
    "prompt, 95 %": (4083.0, 0.01),
    "output, mean": (211.1, 0.03),
    "output, 50 %": (129.0, 0.05),
    "output, 95 %": (451.0, 0.03),
    "prompt to output, rank correlation": (0.0728, 0.5),
    "cv² of gaps within 15 s": (1.022, 0.06),
    "cv² of gaps within 3600 s": (1.197, 0.1),
    "dispersion of counts in 60 s": (15.33, 0.2),
    "dispersion of counts in 300 s": (56.65, 0.2),
    "prompt tokens that a prefix cache has": (0.0, 0.0),
}


@functools.cache
def drawn(name: str, requests: int, seed: int) -> list[Arrival]:
    return list(parse(f"{name}:requests={requests}", seed))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "requests", "measured"),
    [("mooncake-like", 12_031, MOONCAKE), ("azure-conversation-like", 19_366, AZURE)],
)
def test_statistics_are_those_of_the_trace(
    name: str, requests: int, measured: dict[str, tuple[float, float]], seed: int
) -> None:
    values = statistics(drawn(name, requests, seed))
    for key, (expected, far) in measured.items():
        assert values[key] == pytest.approx(expected, rel=far), key


def test_every_mooncake_like_prompt_begins_with_the_system_prompt_and_turns_contain_their_outputs() -> None:
    trace = drawn("mooncake-like", 12_031, 0)
    by_output = {each.output_token_id: each for each in trace}
    turns = 0
    for each in trace:
        assert each.prompt[0] == (0, fitted.MOONCAKE_CONTINUED.system)
        assert each.at % (fitted.MOONCAKE.tick * NANOSECONDS) == 0
        assert each.num_prompt_tokens + each.num_output_tokens <= fitted.MOONCAKE_CONTINUED.longest
        if len(each.prompt) > 2 and each.prompt[-2][0] in by_output:
            earlier = by_output[each.prompt[-2][0]]
            if each.prompt[-2][1] == earlier.num_output_tokens and each.prompt[:-2] == earlier.prompt:
                turns += 1
                assert each.at - earlier.at > earlier.num_output_tokens * fitted.TOKEN_TIME - 3 * NANOSECONDS
    assert turns / len(trace) == pytest.approx(0.33, abs=0.03)


def test_azures_requests_share_nothing() -> None:
    assert all(len(each.prompt) == 1 for each in drawn("azure-conversation-like", 19_366, 0))


@pytest.mark.parametrize(
    ("name", "natural"), [("mooncake-like", fitted.MOONCAKE), ("azure-conversation-like", fitted.AZURE)]
)
def test_a_rate_runs_the_same_requests_faster(name: str, natural: fitted.Stream) -> None:
    plain, twice = drawn(name, 12_031, 0), list(parse(f"{name}:requests=12031,rate={2 * natural.rate}", 0))
    assert [each.prompt for each in plain] == [each.prompt for each in twice]
    assert all(each.at // 2 == other.at for each, other in zip(plain, twice, strict=True))


def test_the_hour_begins_again() -> None:
    stream = fitted.Stream(10.0, (0.5, 1.5), 1.0, 0, (1, 1), ((1, 1),))
    times = list(itertools.islice(fitted.arrival_times(stream, 0), 36_000))
    assert times == sorted(times) and times[-1] / NANOSECONDS == pytest.approx(3600, rel=0.03)
    high = sum(at // NANOSECONDS // fitted.SECTION % 2 for at in times)
    assert high / len(times) == pytest.approx(0.75, abs=0.01)


def shared(first: list[int], second: list[int]) -> int:
    same = (left == right for left, right in zip(first, second, strict=False))
    return sum(itertools.takewhile(bool, same))


def blocks_hit(prompts: list[list[int]]) -> list[int]:
    """The longest prefix of each that an earlier one has, in tokens, the slow way."""
    hits = []
    for number, prompt in enumerate(prompts):
        hits.append(max((shared(prompt, earlier) for earlier in prompts[:number]), default=0))
    return hits


RUNS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=4).map(merge_runs)


@given(st.lists(RUNS, max_size=8))
def test_the_prefix_cache_counts_what_comparing_tokens_does(prompts: list[tuple[tuple[int, int], ...]]) -> None:
    cache = PrefixCache()
    tokens = [[token_id for token_id, count in runs for _ in range(count)] for runs in prompts]
    assert [cache.hit(runs) for runs in prompts] == blocks_hit(tokens)


def test_spread_and_dispersion_of_even_and_of_bursty_times() -> None:
    even = [Arrival(number * NANOSECONDS // 10, ((1, 1),), 1, 2) for number in range(30_000)]
    bursty = [Arrival(number // 50 * 5 * NANOSECONDS, ((1, 1),), 1, 2) for number in range(30_000)]
    for trace, spread, far in ((even, 0.0, 0.0), (bursty, 49.0, 0.2)):
        values = statistics(trace)
        assert values["cv² of gaps within 3600 s"] == pytest.approx(spread, rel=far, abs=1e-9)
        assert values["requests a second"] == pytest.approx(10, rel=0.02)


def test_a_fit_of_what_was_drawn_is_nearly_what_it_was_drawn_from() -> None:
    azure, known = drawn("azure-conversation-like", 19_366, 0), fitted.AZURE
    fit = fit_stream(azure, azure, tick=0)
    assert fit.rate == pytest.approx(known.rate, rel=0.03) and fit.cv == pytest.approx(known.cv, abs=0.03)
    assert fit.curve[:50] == pytest.approx(known.curve[:50], abs=0.25)
    assert fit.prompts[50] == pytest.approx(known.prompts[50], rel=0.01)
    scope = {"Stream": fitted.Stream}
    exec(source("fit", fit), scope)
    assert scope["fit"] == fit


def test_a_fit_finds_who_continues_whom() -> None:
    """Three begin, one goes on with its next turn, one asks another question of the same beginning."""

    def request(second: int, blocks: list[int], outputs: int) -> Arrival:
        return Arrival(second * NANOSECONDS, tuple((3 * block, 512) for block in blocks), outputs, 3 * second + 2)

    trace = [
        request(0, [0, 1, 2], 100),
        request(10, [0, 3], 100),
        request(30, [0, 1, 2, 4], 9),
        request(40, [0, 1, 5], 8),
    ]
    begin, continued = fit_continued([*trace, request(50, [0, 6], 7)], 512)
    assert [each.at // NANOSECONDS for each in begin] == [0, 10, 50]
    assert continued.is_next_turn == 0.5 and continued.system == 512
    assert (continued.gaps[0], continued.gaps[-1]) == (10.0, 30.0)
    assert set(continued.growth) == {412} and set(continued.ends) == {512} and set(continued.kept) == {0.5}
