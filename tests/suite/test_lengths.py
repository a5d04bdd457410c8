"""Lengths: examples reach over an engine's own blocks and chunks, and what goes wrong only there is found."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from faults import inject
from hypothesis import given, settings

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.protocol import TOLD, told
from lfm2np.suite import adapters
from lfm2np.suite.catalogue import by_id
from lfm2np.suite.properties import driver
from lfm2np.suite.runner import run_property
from lfm2np.suite.strategies.lengths import Lengths, lengths_of
from lfm2np.suite.strategies.scenarios import Scenario, greedy_params, scenarios

pytestmark = pytest.mark.slow


def test_scenarios_at_length_fit_the_model_and_the_memory():
    longest = 0

    @settings(max_examples=40, derandomize=True, database=None, deadline=None)
    @given(scenarios(greedy_params(), lengths=Lengths(16, 48, 8, 240)))
    def fits(scenario: Scenario) -> None:
        nonlocal longest
        assert scenario.model.positions == 240
        for request in scenario.requests:
            total = len(request.prompt_token_ids) + (request.params.max_tokens or 0)
            assert total <= 240
            assert -(-total // scenario.sizes["block_size"]) <= scenario.sizes["num_blocks"]
            longest = max(longest, total)

    fits()
    assert longest > 150


class Recording(adapters.Own):
    """Keeps what it was made with and asked for."""

    seen: ClassVar[list[tuple[dict[str, Any], int]]] = []

    def __init__(self, model: Any, sizes: dict[str, Any]) -> None:
        super().__init__(model, sizes)
        self.wishes = sizes

    def generate(self, requests):
        Recording.seen.extend([(self.wishes, len(request.prompt_token_ids)) for request in requests])
        return super().generate(requests)


def run_recorded(given: dict[str, int], **attributes: Any) -> list[tuple[dict[str, Any], int]]:
    Recording.seen.clear()
    kind = type("Told", (Recording,), attributes)
    result = run_property(
        by_id("equals-reference"), lambda model, sizes: kind(adapters.load_once(Path(model)), sizes), "ci", sizes=given
    )
    assert result.status == "passed", result.message
    return list(Recording.seen)


@pytest.mark.night
def test_sizes_come_from_the_engine_and_what_is_given_goes_before():
    engine_sizes = {"block_size": 20, "max_num_batched_tokens": 30, "max_model_len": 130}
    for seen, chunk in (
        (run_recorded({}, sizes=engine_sizes), 30),
        (run_recorded({"max_num_batched_tokens": 26}, sizes=engine_sizes), 26),
    ):
        long = [(wishes, length) for wishes, length in seen if length > 20]
        assert {wishes["block_size"] for wishes, _ in long} == {20}
        assert {wishes["max_num_batched_tokens"] for wishes, _ in long} == {chunk, chunk // 2 + 1}
        assert 100 < max(length for _, length in long) <= 130
        assert len(seen) > 3 * len(long)


@pytest.mark.parametrize(
    ("sizes", "fragment"),
    [
        ({"block_size": 0}, "here: block_size 0: expected a whole number of at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs True"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens 'many'"),
        ({"max_model_len": 31}, "at least 32"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes: dict[str, Any], fragment: str):
    with pytest.raises(RequestError, match=fragment):
        lengths_of(sizes, "here")


def test_what_is_not_given_follows_from_what_is():
    assert lengths_of({}, "") == Lengths()
    assert lengths_of({"max_num_batched_tokens": 512}, "") == Lengths(16, 512, 8, 2560)
    assert lengths_of({"block_size": 256, "max_model_len": 1000}, "") == Lengths(256, 256, 8, 1000)
    with pytest.raises(RequestError, match=f"sizes 'blocks': expected names among {TOLD[0]}"):
        told(SimpleNamespace(sizes={"blocks": 3}))


@pytest.mark.night
@pytest.mark.parametrize("fault", ["positions-stop-at-40", "chunk-deep-in-a-prompt-ignores-the-past-state"])
def test_what_goes_wrong_only_at_length_is_found_under_quick(fault: str):
    with inject(fault):
        result = run_property(by_id("equals-reference"), adapters.own, "quick")
    assert result.status == "failed"
    assert result.size is not None
    is_shrunk = "there may be smaller examples" not in result.message  # a busy machine runs out of time
    assert result.size < 120 or not is_shrunk  # the longest are some 700


def test_parts_of_attention_are_compared():
    with inject("partitions-joined-without-rescaling"):
        assert run_property(by_id("scores"), adapters.own, "ci", shrink=False).status == "failed"


class Silent(adapters.Own):
    """Its answers alone report hits."""

    def metrics(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize(
    ("name", "base"), [("prefix-hits", adapters.Own), ("prefix-hits", Silent), ("wide-batches", Silent)]
)
def test_quick_meets_hits_and_wide_batches_at_the_engine_s_own_block_size(
    name: str, base: type[adapters.Own], monkeypatch: pytest.MonkeyPatch
):
    totals = driver.Totals()
    monkeypatch.setattr(driver, "TOTALS", totals)
    kind = type("Blocks", (base,), {"sizes": {"block_size": 16, "max_num_batched_tokens": 64}})
    result = run_property(by_id(name), lambda model, sizes: kind(adapters.load_once(Path(model)), sizes), "quick")
    assert result.status == "passed", result.message
    assert totals.hits if name == "prefix-hits" else totals.wide
