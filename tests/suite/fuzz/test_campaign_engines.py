"""Runs against real engines: those with a fault get their finding, right ones none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from faults import Edit, Fault, inject
from served_here import folder, model

import lfm2np
from lfm2np.engine.loading import Model
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Answer, Request, greedy
from lfm2np.suite.adapters import Own
from lfm2np.suite.fuzz.campaign import Campaign, Failure
from lfm2np.suite.fuzz.draw_traces import TEXTS, Around, alphabet_of
from lfm2np.suite.fuzz.judge import STOP, TEXT, ByTruth

A = alphabet_of(None, 300)
TRAINED = lfm2np.trained_fixture()
pytestmark = pytest.mark.rounding


def run_on_own(number: int, examples: int) -> tuple[Campaign, list[Failure]]:
    player = PythonTarget(lambda *_: Own(model(), {"block_size": 4, "max_num_seqs": 3}), folder())
    around = Around(block=4, chunk=16, slots=1, longest=28, alphabet=A, sampling=True)
    campaign = Campaign(ByTruth(model(), "float32"), player, around, restart=player.close, is_quick=True)
    return campaign, list(campaign.run(number, examples, None))


def test_a_fault_of_two_requests_is_shrunk_to_two_and_each_run_of_a_seed_is_the_same() -> None:
    with inject("convolution-crosses-requests"):
        campaign, (failure,) = run_on_own(2, 100)
        again, (same,) = run_on_own(2, 100)
    assert failure.finding.kind == "wrong" and failure.is_fresh and failure.rate == (10, 10)
    assert [request == greedy("", request.prompt_token_ids, 1) for request in failure.trace.requests] == [True, True]
    assert (same.trace, same.finding) == (failure.trace, failure.finding)
    assert (same.drawn, same.traces) == (failure.drawn, failure.traces)
    assert (campaign.counts.replays, campaign.counts.tokens) == (again.counts.replays, again.counts.tokens)


def test_our_own_engine_without_a_fault_gets_no_finding() -> None:
    campaign, failures = run_on_own(2, 20)
    assert failures == [] and campaign.counts.traces == 20


WRITE = "np.concatenate(entries)"
HALF_FROM_256 = Fault(
    name="half-from-256",
    section="B",
    sentence="Keys and values are float16 from position 256 on.",
    seen_in=(),
    edits=(
        Edit(
            "lfm2np.engine.cache:commit",
            f"array[blocks, offsets] = {WRITE}",
            "far = np.concatenate([np.arange(s.count) + s.entry.start >= 256 for s in kept])[:, None, None]\n"
            f"            new = {WRITE}\n"
            "            array[blocks, offsets] = np.where(far, new.astype(np.float16), new)",
        ),
    ),
)
MOST_TRACES = 20  # 57 had not found it


@pytest.mark.slow
def test_a_cache_that_is_float16_from_position_256_on_is_found_within_20_traces() -> None:
    """Blocks of 16 and chunks of 64, around which all lengths were drawn, reach no further than 128."""
    exact, rounded = lfm2np.load(TRAINED), lfm2np.load(TRAINED, "float32")
    sizes = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    player = PythonTarget(lambda *_: Own(rounded, dict(sizes)), TRAINED)
    around = Around(16, 64, 4, 1024, alphabet_of(exact.tokenizer, 512), (1,), sampling=True, samples=True)
    campaign = Campaign(
        ByTruth(exact, "float32"), player, around, restart=player.close, is_quick=True, shrink_seconds=0.0
    )
    with inject(HALF_FROM_256):
        (failure,) = campaign.run(1, MOST_TRACES, None)
    assert failure.finding.kind == "wrong"
    assert max(len(request.prompt_token_ids) + request.max_tokens for request in failure.trace.requests) > 256
    assert list(campaign.run(1, 2, None)) == []


class Trained(Own):
    """The trained fixture's engine, whose completions are changed by `change`."""

    change: Any = staticmethod(lambda completion, stop: completion)

    def __init__(self, exact: Model) -> None:
        super().__init__(exact, {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64})
        self.stops: dict[str, str] = {}

    def add(self, request: Request) -> None:
        self.stops[request.request_id] = next(iter(request.params.stop), "")
        super().add(replace(request, params=self.params(request.params)))

    def params(self, params: SamplingParams) -> SamplingParams:
        return params

    def step(self) -> dict[str, list[Answer]]:
        return {
            name: [self.change(completion, self.stops[name]) for completion in value]
            for name, value in super().step().items()
        }


class Strips(Trained):
    """Strips blanks."""

    change = staticmethod(lambda completion, stop: replace(completion, text=completion.text.strip()))


class StopsBetweenTokens(Trained):
    """Looks for a stop text only where a token ends, so that it goes on behind one that ends within a token."""

    def params(self, params: SamplingParams) -> SamplingParams:
        return replace(params, stop=())

    def step(self) -> dict[str, list[Answer]]:
        return {name: [self.ended(name, completion) for completion in value] for name, value in super().step().items()}

    def ended(self, name: str, completion: Answer) -> Answer:
        if self.stops[name] and completion.text is not None and completion.text.endswith(self.stops[name]):
            if completion.finish_reason is None:
                self.abort(name)
            return replace(completion, text=completion.text.removesuffix(self.stops[name]), finish_reason="stop")
        return completion


def campaign_of(make: Callable[[Model], Any], number: int, examples: int, **fields: Any) -> list[Failure]:
    exact = lfm2np.load(TRAINED)
    tokenizer = exact.tokenizer
    player = PythonTarget(lambda *_: make(exact), TRAINED)
    chosen = alphabet_of(tokenizer, 512)
    around = Around(16, 64, 4, 90, chosen, (1,), stops=(" ", "e"), sampling=True, samples=True, **fields)
    judge = ByTruth(exact, "float32", texts=TEXTS not in around.without)
    campaign = Campaign(judge, player, around, restart=player.close, is_quick=True, shrink_seconds=0.0)
    return list(campaign.run(number, examples, None))


@pytest.mark.slow
def test_a_server_that_strips_blanks_is_found() -> None:
    (failure,) = campaign_of(Strips, 0, 40)
    assert failure.finding.kind == TEXT
    assert campaign_of(Strips, 0, 10, without=(TEXTS,)) == []


@pytest.mark.slow
def test_a_server_that_sees_stop_texts_only_where_a_token_ends_is_found() -> None:
    (failure,) = campaign_of(StopsBetweenTokens, 0, 40)
    assert failure.finding.kind == STOP


@pytest.mark.slow
def test_the_right_engine_of_both_is_not() -> None:
    assert campaign_of(Trained, 0, 40) == []
