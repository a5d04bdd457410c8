"""What is drawn: valid, within its limits, and of every kind that breaks engines."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.oracle.engines.records import Trace, greedy
from lfm2np.oracle.engines.records_json import trace_from_json
from lfm2np.suite.fuzz.draw_traces import DRAWN, FAR, MOST_TOKENS_OF_A_TRACE, SPECIAL, Around, drawn_trace, unfit

ALPHABET = tuple(range(20, 60))
VOCABULARY = 64
SMALL = Around(16, 40, 4, 400, ALPHABET, (1,), False, (" ", "e"), True, True)


def drawn(around: Around, count: int) -> Iterator[Trace]:
    return (drawn_trace(around, str(seed)) for seed in range(count))


@st.composite
def arounds(draw: st.DrawFn) -> Around:
    return Around(
        block=draw(st.sampled_from([1, 4, 16, 256])),
        chunk=draw(st.sampled_from([1, 24, 512, 8192])),
        slots=draw(st.sampled_from([1, 4, 300])),
        longest=draw(st.sampled_from([4, 5, 64, 1000, 128_000])),
        alphabet=draw(st.sampled_from([ALPHABET, ALPHABET[:2]])),
        first=draw(st.sampled_from([(), (1,)])),
        needs_first=draw(st.booleans()),
        stops=draw(st.sampled_from([(), (" ",)])),
        samples=draw(st.booleans()),
        sampling=draw(st.booleans()),
    )


@pytest.mark.slow
@given(st.integers(0, 10**6), arounds())
def test_each_trace_is_valid_and_within_what_may_be_asked(seed: int, around: Around) -> None:
    trace = drawn_trace(around, str(seed))
    assert unfit(around, VOCABULARY, trace) is None
    assert trace.num_tokens <= MOST_TOKENS_OF_A_TRACE
    if len(trace.requests) > min(12, around.slots + 3):  # one of the seldom traces of many short sampled requests
        assert around.sampling and len(trace.requests) == DRAWN and all(sent.is_sampled for sent in trace.requests)
    for request in trace.requests:
        begins = request.prompt_token_ids[: len(around.first)] == around.first
        suffix = request.prompt_token_ids[len(around.first) :] if begins else request.prompt_token_ids
        assert set(suffix) <= set(around.alphabet)
        assert begins or not around.needs_first


def test_what_the_engine_does_not_take_or_is_left_out_is_not_drawn() -> None:
    for trace in drawn(Around(4, 24, 4, 90, ALPHABET), 30):
        assert all(sent.stop is None and not sent.is_sampled and sent.params.n == 1 for sent in trace.requests)
    for trace in drawn(replace(SMALL, without=tuple(text for text in SPECIAL if text)), 30):
        for request in trace.requests:
            sent = {name: getattr(request, name) for name in ("after", "after_tokens", "pause")}
            assert request == greedy("", request.prompt_token_ids, request.max_tokens, **sent)


@pytest.mark.parametrize(
    ("longest", "wanted"),
    [(258, set()), (259, {256}), (514, {256}), (128_000, {256, 512})],
)
def test_requests_cross_256_and_512_where_the_context_holds_them(longest: int, wanted: set[int]) -> None:
    """With small blocks and chunks none did, however long the context: what goes wrong from there on was missed."""
    seen: Counter[int] = Counter()
    for trace in drawn(Around(16, 64, 4, longest, ALPHABET), 40):
        end = max(len(sent.prompt_token_ids) + sent.max_tokens for sent in trace.requests)
        seen.update(border for border in FAR if end > border + 1)
    assert {border for border, count in seen.items() if count >= 3} == wanted


def test_where_sizes_are_assumed_prompts_reach_common_borders_and_some_traces_are_crowds() -> None:
    seen: Counter[str] = Counter()
    for trace in drawn(Around(16, 64, 8, 1024, ALPHABET, assumed=("block_size",)), 60):
        lengths = [len(sent.prompt_token_ids) for sent in trace.requests]
        seen.update(str(size) for size in (64, 256, 512) if any(abs(length - size) <= 1 for length in lengths))
        at_once = sum(sent.num_tokens for sent in trace.requests if sent.after is None)
        seen["full"] += at_once > 1024 and max(lengths) <= 300
    assert all(seen[size] >= 3 for size in ("64", "256", "512")) and seen["full"] >= 2, seen


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": 399}, "requests[0]: 401 tokens of prompt and answer, expected at most 400"),
        ({"prompt_token_ids": [1, 64]}, "requests[0].prompt_token_ids: token 64, expected ids below vocab_size=64"),
        ({"prompt_token_ids": [20, 21]}, "requests[0].prompt_token_ids: expected (1,) and more"),
        ({"prompt_token_ids": [1]}, "requests[0].prompt_token_ids: expected (1,) and more"),
        ({"stop": "x"}, "requests[0].stop 'x': this engine takes none"),
        ({"tags": {"stop_in": "a"}}, "requests[0].tags.stop_in 'a': expected a whole number, at least 0"),
        ({"tags": {"stop_in": -1}}, "requests[0].tags.stop_in -1: expected a whole number, at least 0"),
        ({"temperature": 1.0}, "requests[0].temperature 1: this engine is asked greedily only"),
        ({"temperature": 1.0, "n": 2}, "requests[0].n 2: this engine gives one"),
    ],
)
def test_what_a_right_engine_may_refuse_is_unfit(fields: dict[str, object], told: str) -> None:
    around = Around(16, 40, 4, 400, ALPHABET, (1,), True, sampling="n" in fields)
    good = {"prompt_token_ids": [1, 20], "max_tokens": 398}
    assert unfit(around, VOCABULARY, trace_from_json({"requests": [good]})) is None
    why = unfit(around, VOCABULARY, trace_from_json({"requests": [{**good, **fields}]}))
    assert why is not None and why.startswith(told)


def kinds(trace: Trace, around: Around) -> set[str]:
    """What is special about a trace, by names."""
    features = set()
    prompts = [request.prompt_token_ids for request in trace.requests]
    for index, request in enumerate(trace.requests):
        features |= {"left before the first token"} if request.abort_after == 0 else set()
        features |= {"left midway"} if request.abort_after else set()
        features |= {name for name in ("cold", "streamed", "stop", "pause") if getattr(request, name)}
        features |= {"several"} if request.params.n > 1 else {"sampled"} if request.is_sampled else set()
        prompt = request.prompt_token_ids
        features |= {"again"} if prompt in prompts[:index] else set()
        features |= {"longer"} if prompt[:-1] in prompts[:index] else set()
        same = [other for other in prompts[:index] if len(other) > 1 and other[:-1] == prompt[:-1]]
        features |= {"another last token"} if any(other != prompt for other in same) else set()
        if request.after is not None:
            features |= {"waits for tokens"} if request.after_tokens else {"waits for an end"}
            features |= {"long after short"} if len(prompt) > 3 * len(prompts[request.after]) else set()
        off = len(prompt) % around.block
        features |= {{0: "at a border", 1: "behind a border", around.block - 1: "before a border"}.get(off, "between")}
        features |= {"over a chunk"} if len(prompt) > around.chunk else set()
        features |= {"tiny"} if len(prompt) <= 3 else set()
        features |= {"with BOS"} if prompt[:1] == around.first else {"without BOS"}
    at_once = sum(request.after is None for request in trace.requests)
    return features | ({"more than slots"} if at_once > around.slots else set())


@pytest.mark.slow
def test_over_some_hundred_traces_each_kind_is_drawn() -> None:
    seen: Counter[str] = Counter()
    for trace in drawn(SMALL, 250):
        seen.update(kinds(trace, SMALL))
    wanted = """left before the first token;left midway;cold;streamed;stop;pause;several;sampled;again;longer;
        another last token;waits for tokens;waits for an end;long after short;at a border;behind a border;
        before a border;between;over a chunk;tiny;with BOS;without BOS;more than slots"""
    assert {name.strip() for name in wanted.split(";")} - {name for name, count in seen.items() if count >= 3} == set()
