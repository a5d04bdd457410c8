"""`locate` on what vLLM computes on a CPU: its rotation is named, and with that mended nothing; what is broken is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from recorders import vllm_recorder
from recordings import TRAINED, left_out, report_of, require_right

from lfm2np.oracle.locate.locate import Report
from lfm2np.oracle.recorders.recorder import Recorder

pytestmark = pytest.mark.peers

PROMPT = [1, 17, 42, 99, 300, 8, 21, 5, 6, 7]
NEW = 4
CHUNK = 64
RAGGED = [np.random.default_rng(n).integers(8, 512, n).tolist() for n in (30, 100, 1)]
BEFORE = np.random.default_rng(0).integers(8, 512, 300).tolist()
SHARED = 256  # tokens: two of vLLM's blocks
AFTER = BEFORE[:SHARED] + np.random.default_rng(1).integers(8, 512, 40).tolist()


@contextmanager
def flattened_rotary(model: Any) -> Iterator[None]:
    """The rotation right: its kernel reads the positions wrongly if heads are apart, and well if side by side."""
    rotary = next(layer.self_attn.rotary_emb for layer in model.model.layers if hasattr(layer, "self_attn"))
    usual = rotary.forward

    def rotate(positions: Any, queries: Any, keys: Any) -> Any:
        rotated = usual(positions, queries.flatten(1), keys.flatten(1))
        return rotated[0].view_as(queries), rotated[1].view_as(keys)

    rotary.forward = rotate
    try:
        yield
    finally:
        rotary.forward = usual


def model_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    options = {"max_model_len": 1024, "max_num_batched_tokens": CHUNK, "enable_prefix_caching": True}
    llm = vllm_recorder.load(TRAINED, request.param, **options)
    yield llm, request.param
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def mended(engine: tuple[Any, str]) -> Iterator[tuple[Any, str]]:
    llm, _ = engine
    with flattened_rotary(model_of(llm)):
        yield engine
    llm.reset_prefix_cache()


def recorded(engine: tuple[Any, str], prompts: list[list[int]], which: int = 0, new: int = NEW) -> Recorder:
    llm, format = engine
    return vllm_recorder.record_with(llm, prompts, which, new, Recorder(format=format))


def report_with(engine: tuple[Any, str], prompt: list[int] = PROMPT) -> Report:
    return report_of(recorded(engine, [prompt]))


def test_the_rotation_of_queries_with_heads_apart_is_named(engine: tuple[Any, str]) -> None:
    report = report_with(engine)
    assert [finding.name for finding in report.findings] == [
        f"model.layers.{layer}.self_attn.{part}_rotated" for layer in (2, 4) for part in "qk"
    ]
    assert report.findings[0].operation == "rotation of the queries"
    assert report.findings[0].recomputed == ()


def test_every_operation_is_right_with_the_rotation_mended(mended: tuple[Any, str]) -> None:
    report = report_with(mended)
    require_right(report)
    assert report.format == mended[1]
    assert left_out(report) == {
        f"model.layers.{layer}.self_attn.{part}" for layer in (2, 4) for part in ("scores", "weights")
    }


@pytest.mark.parametrize("which", range(3))
def test_each_request_of_a_ragged_batch_is_right(mended: tuple[Any, str], which: int) -> None:
    recorder = recorded(mended, RAGGED, which)
    assert sum(recorder.sizes) == len(recorder.token_ids) == len(RAGGED[which]) + NEW - 1
    assert (len(recorder.sizes) > NEW) == (which == 1)  # that prompt came in chunks
    require_right(report_of(recorder))


def test_what_a_prefix_hit_finds_in_the_caches_is_right(mended: tuple[Any, str]) -> None:
    report_with(mended, BEFORE)
    recorder = recorded(mended, [AFTER])
    assert len(recorder.token_ids) - sum(recorder.sizes) == SHARED
    report = report_of(recorder)
    assert report.findings == ()
    checked = {check.name for check in report.checks if not check.is_blunt}
    assert {"model.layers.0.conv.state", "model.layers.2.self_attn.keys_read"} <= checked


def test_a_state_that_a_hit_finds_changed_is_named(mended: tuple[Any, str]) -> None:
    report_with(mended, BEFORE)
    model_of(mended[0]).model.layers[0].short_conv.kv_cache[0].mul_(1.5)  # other layers have blocks in there, too
    first = report_with(mended, AFTER).findings[0]
    assert (first.name, first.rows, first.steps) == ("model.layers.0.conv.state", "step 0 of 4", "step 0 of 4")


def test_a_value_that_a_hit_finds_changed_is_named(mended: tuple[Any, str]) -> None:
    report_with(mended, BEFORE)
    cache = model_of(mended[0]).model.layers[4].self_attn.attn.kv_cache  # [blocks, G, P, 2E], values behind keys
    cache.view(*cache.shape[:2], -1)[:, 1].chunk(2, dim=-1)[1].mul_(1.5)
    first = report_with(mended, AFTER).findings[0]
    assert first.name == "model.layers.4.self_attn.values_read" and "head 1" in first.channels


def test_a_request_that_was_preempted_is_right_once_computed_again(
    mended: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = mended[0].llm_engine.engine_core.engine_core.scheduler
    usual, count = scheduler.schedule, 0

    def preempting(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return usual(*arguments)

    monkeypatch.setattr(scheduler, "schedule", preempting)
    recorder = recorded(mended, [PROMPT], 0, NEW + 2)
    assert recorder.sizes == [len(PROMPT) + 3, 1, 1]  # three of its new tokens were computed already
    assert report_of(recorder).findings == ()


def test_record_loads_runs_and_ends_an_engine() -> None:
    """Last: two engines at once are one too many for vLLM."""
    options = {"enable_prefix_caching": True, "max_num_seqs": 1}
    recorder = vllm_recorder.record(TRAINED, [BEFORE, AFTER], 1, NEW, Recorder(format="float32"), **options)
    assert len(recorder.token_ids) - sum(recorder.sizes) == SHARED
    assert report_of(recorder).findings[0].name == "model.layers.2.self_attn.q_rotated"
