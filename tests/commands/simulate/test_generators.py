"""What is drawn: of the rate, the bursts and the lengths that were asked for, and the same for the same seed."""

import hashlib
import io
import itertools
import json
import math
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.commands.simulate import generators, trace_files
from lfm2np.commands.simulate.draws import Draws
from lfm2np.commands.simulate.generators import GENERATORS, Lengths, conversations, parse, read_lengths
from lfm2np.commands.simulate.traffic import (
    MOST_TOKENS,
    NANOSECONDS,
    Arrival,
    merge_runs,
    output_token_id,
    prompt_token_id,
)
from lfm2np.errors import RequestError

SPECS = {name: f"{name}:rate=5" for name in GENERATORS} | {"gamma": "gamma:rate=5,cv=3"}


def seconds(trace: list[Arrival]) -> np.ndarray:
    return np.array([each.at for each in trace]) / NANOSECONDS


@pytest.mark.parametrize("spec", SPECS.values())
def test_any_trace_is_in_order_and_of_content_that_is_known_apart(spec: str) -> None:
    trace = list(parse(f"{spec},requests=3000", 7))
    assert len(trace) == 3000 and trace == sorted(trace, key=lambda each: each.at) and trace[0].at >= 0
    outputs = {each.output_token_id: each for each in trace}
    assert len(outputs) == 3000
    for number, each in enumerate(trace):
        assert each.output_token_id == output_token_id(number) and each.num_output_tokens >= 1
        assert each.prompt == merge_runs(each.prompt) and all(count >= 1 for _, count in each.prompt)
        assert each.prompt[-1][0] == prompt_token_id(number)
        assert all(type(number) is int for number in (each.at, each.num_output_tokens, *itertools.chain(*each.prompt)))
        heard = [outputs[token_id] for token_id, _ in each.prompt if token_id in outputs]
        assert all(earlier.at < each.at for earlier in heard)


@pytest.mark.parametrize("spec", SPECS.values())
def test_the_same_seed_gives_the_same_and_a_longer_trace_begins_with_it(spec: str) -> None:
    trace = list(parse(f"{spec},requests=500", 1))
    assert list(parse(f"{spec},requests=9000", 1))[:500] == trace
    assert list(parse(f"{spec},requests=500", 2)) != trace


@pytest.mark.kernels
@pytest.mark.parametrize("name", GENERATORS)
def test_a_trace_has_the_same_bits_on_every_machine(name: str) -> None:
    text = io.StringIO()
    trace_files.write(parse(f"{SPECS[name]},requests=2000", 0), text)
    assert hashlib.sha256(text.getvalue().encode()).hexdigest()[:16] == DIGESTS[name]


DIGESTS = {
    "poisson": "0f29430a1891f0cb",
    "gamma": "3eeef2e33a94d10d",
    "day": "63be35215d796f79",
    "conversations": "3b11f8f348c22619",
    "mooncake-like": "0e78df70e584a7df",
    "azure-conversation-like": "38a1401910131b9d",
}


@pytest.mark.parametrize(
    ("spec", "cv"), [("poisson", 1.0), ("gamma:cv=0.3", 0.3), ("gamma:cv=1", 1.0), ("gamma:cv=4", 4.0)]
)
def test_gaps_have_the_rate_and_the_spread_that_were_asked_for(spec: str, cv: float) -> None:
    name, _, rest = spec.partition(":")
    gaps = np.diff(seconds(list(parse(f"{name}:rate=20,requests=40000,{rest}", 5))))
    assert gaps.mean() == pytest.approx(1 / 20, rel=6 * cv / 200)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_a_day_rises_and_falls_about_its_mean() -> None:
    times = seconds(list(parse("day:rate=10,night=0.25,period=1000,requests=40000", 3)))
    assert len(times) / times[-1] == pytest.approx(10, rel=0.03)
    by_phase = np.bincount((times % 1000 // 100).astype(int)) / (40_000 / 10)
    assert by_phase == pytest.approx(by_phase[::-1], rel=0.1)
    assert by_phase.argmin() in (0, 9) and by_phase.argmax() in (4, 5)
    assert by_phase[0] / by_phase[4] == pytest.approx(0.27, abs=0.04)
    assert [generators.height(at * NANOSECONDS, 0.25, 1000.0) for at in (0, 500, 1000)] == [0.25, 1.0, 0.25]


def test_lengths_do_not_change_the_times_and_a_rate_not_the_lengths() -> None:
    plain, longer, faster = (
        list(parse(f"poisson:{more}", 1)) for more in ("rate=4", "rate=4,prompt=100-900", "rate=8,prompt=100-900")
    )
    assert [each.at for each in plain] == [each.at for each in longer]
    assert [each.prompt for each in longer] == [each.prompt for each in faster]


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(0, 3))
def test_uniform_lengths_lie_within_their_bounds(low: int, more: int, seed: int) -> None:
    drawn = Lengths(low, low + more).draw(Draws(seed, "lengths"))
    assert low <= drawn.min() and drawn.max() <= low + more
    if more < 100:
        assert len(set(drawn.tolist())) == more + 1


def test_lognormal_lengths_have_their_median_and_sigma() -> None:
    drawn = np.concatenate([Lengths(1, MOST_TOKENS, 1000, 0.8).draw(Draws(seed, "lengths")) for seed in range(10)])
    assert np.median(drawn) == pytest.approx(1000, rel=0.03)
    assert np.log(drawn).std() == pytest.approx(0.8, rel=0.03)
    cut = Lengths(900, 1100, 1000, 0.8).draw(Draws(0, "lengths"))
    assert (cut.min(), cut.max()) == (900, 1100)


def test_a_system_prompt_is_shared() -> None:
    trace = list(parse("poisson:rate=1,system=100,prompt=7,requests=3"))
    assert [each.prompt for each in trace] == [((0, 100), (prompt_token_id(number), 7)) for number in range(3)]


def test_a_turn_is_the_turn_before_it_and_more() -> None:
    trace = list(conversations(rate=3.0, requests=4000, max_context=3000, think=5.0, token_time=0.05, seed=2))
    by_output = {each.output_token_id: each for each in trace}
    followed = set()
    for each in trace:
        assert each.prompt[0] == (0, 256) and each.num_prompt_tokens + each.num_output_tokens <= 3000
        if len(each.prompt) > 2:
            earlier = by_output[each.prompt[-2][0]]
            assert each.prompt[:-1] == (*earlier.prompt, (earlier.output_token_id, earlier.num_output_tokens))
            assert each.at >= earlier.at + earlier.num_output_tokens * 50_000_000
            assert earlier.output_token_id not in followed
            followed.add(earlier.output_token_id)
    assert len(followed) > 2000


def test_conversations_have_their_turns_pauses_and_rate() -> None:
    trace = list(parse("conversations:rate=10,turns=4,think=20,max_context=1000000,output=10,requests=20000", 6))
    firsts = [each for each in trace if len(each.prompt) == 2]
    assert len(trace) / len(firsts) == pytest.approx(4, rel=0.05)
    assert len(trace) / seconds(trace)[-1] == pytest.approx(10, rel=0.05)
    by_output = {each.output_token_id: each.at for each in trace}
    pauses = [each.at - by_output[each.prompt[-2][0]] for each in trace if len(each.prompt) > 2]
    assert np.mean(pauses) / NANOSECONDS == pytest.approx(20 + 10 * 0.02, rel=0.05)


def test_conversations_need_room_for_a_turn() -> None:
    assert [each.num_prompt_tokens for each in parse("conversations:rate=1,system=9,max_context=11,requests=2")] == [
        10,
        10,
    ]
    with pytest.raises(RequestError, match="max_context 10: expected at least 11: system=9, and a turn"):
        next(parse("conversations:rate=1,system=9,max_context=10"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", Lengths(512, 512)),
        ("100-1000", Lengths(100, 1000)),
        ("512~1.2", Lengths(1, generators.MOST_DRAWN, 512, 1.2)),
        ("512~1", Lengths(1, generators.MOST_DRAWN, 512, 1.0)),
        ("512~1.2:16-8192", Lengths(16, 8192, 512, 1.2)),
    ],
)
def test_lengths_are_written_so(text: str, expected: Lengths) -> None:
    assert read_lengths("prompt", text) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "generator '': expected one of poisson, gamma, day, conversations, mooncake-like, azure"),
        ("uniform:rate=4", "generator 'uniform': expected one of poisson"),
        ("poisson", "poisson: rate=... is missing"),
        ("gamma:rate=1", "gamma: cv=... is missing"),
        ("poisson:rate=4,speed=2", "poisson: 'speed=2': expected rate=..., requests=..., prompt=..., output="),
        ("poisson:rate=4,seed=2", "poisson: 'seed=2': expected rate=..."),
        ("poisson:rate", "poisson: 'rate': expected rate=..."),
        ("poisson:rate=4,rate=5", "poisson: 'rate=5': given twice"),
        ("mooncake-like:prompt=5", "mooncake-like: 'prompt=5': expected rate=..., requests=...$"),
        ("poisson:rate=0", "poisson: rate '0': expected a number from 0.001 to 1e[+]06"),
        ("poisson:rate=nan", "poisson: rate 'nan': expected a number"),
        ("poisson:rate=x", "poisson: rate 'x': expected a number"),
        ("gamma:rate=1,cv=100", "gamma: cv '100': expected a number from 0.01 to 30"),
        ("poisson:rate=1,requests=0", "poisson: requests 0: expected a whole number, at least 1"),
        ("poisson:rate=1,requests=1.5", "poisson: requests '1.5': expected a whole number"),
        ("poisson:rate=1,requests=-1", "poisson: requests '-1': expected a whole number"),
        ("poisson:rate=1,system=-1", "poisson: system '-1': expected a whole number"),
        ("poisson:rate=1,prompt=", "poisson: prompt '': expected 512, 100-1000, 512~1.2 or 512~1.2:16-8192"),
        ("poisson:rate=1,prompt=0", "poisson: prompt '0': length 0: expected a whole number, 1 to"),
        ("poisson:rate=1,prompt=5-4", "poisson: prompt '5-4': length 4: expected a whole number, 5 to"),
        ("poisson:rate=1,prompt=9999999999", "poisson: prompt '9999999999': length 9999999999: expected"),
        ("poisson:rate=1,prompt=5~11", "poisson: prompt '5~11': sigma 11.0: expected a number from 0 to 10"),
        ("poisson:rate=1,prompt=5~1:", "poisson: prompt '5~1:': expected 512"),
        ("poisson:rate=1,prompt=0~1", "poisson: prompt '0~1': median 0: expected"),
        ("poisson:rate=1,prompt=-5", "poisson: prompt '-5': expected 512"),
        ("day:rate=1,night=2", "day: night '2': expected a number from 0 to 1"),
        ("conversations:rate=1,turns=0.5", "conversations: turns '0.5': expected a number from 1 to"),
        ("conversations:rate=1,max_context=1", "conversations: max_context 1: expected a whole number, 2 to"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_named_at_once(spec: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse(spec)


def test_a_seed_is_not_negative() -> None:
    with pytest.raises(RequestError, match="seed -1: expected a whole number, at least 0"):
        parse("poisson:rate=1", -1)


def test_rates_and_spreads_at_their_bounds_do_not_overflow() -> None:
    for spec in (
        "gamma:rate=0.001,cv=30",
        "gamma:rate=1000000,cv=30",
        "gamma:rate=1,cv=0.01",
        "day:rate=0.001,night=0",
    ):
        times = [each.at for each in parse(f"{spec},requests=20000", 1)]
        assert times == sorted(times) and times[0] >= 0


def test_hundreds_of_thousands_of_requests_are_not_kept() -> None:
    """They stream: the last of many is there, and the first gone."""
    last = deque(parse("poisson:rate=1000,requests=100000", 1), maxlen=1)[0]
    assert math.isclose(last.at / NANOSECONDS, 100, rel_tol=0.02)


@pytest.mark.parametrize("spec", SPECS.values())
def test_what_is_drawn_is_written_and_read_again(spec: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    trace = list(parse(f"{spec},requests=300", 4))
    path = tmp_path_factory.mktemp("drawn") / "trace.jsonl"
    with path.open("w", encoding="utf-8") as file:
        trace_files.write(trace, file)
    assert list(trace_files.read(path)) == trace
    assert all(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
