"""`locate` on what vLLM computes on a CPU: its rotation is named, and with that mended nothing; what is broken is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from recorders import vllm_recorder

from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.errors import DumpError
from lfm2np.oracle.locate.dump import read_dump
from lfm2np.oracle.locate.locate import Report, locate
from lfm2np.oracle.locate.operations import operations
from lfm2np.oracle.recorders.recorder import Recorder

pytestmark = pytest.mark.peers

TRAINED = Path(__file__).parents[3] / "fixtures" / "trained"
CONFIG = load_config(TRAINED)
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


def report_of(recorder: Recorder, folder: Path) -> Report:
    recorder.path = folder / "dump.safetensors"
    recorder.save()
    dump = read_dump(recorder.path, CONFIG)
    return locate(open_checkpoint(TRAINED, CONFIG), CONFIG, dump)


def report_with(
    engine: tuple[Any, str], folder: Path, prompts: list[list[int]] | None = None, which: int = 0
) -> Report:
    llm, format = engine
    return report_of(vllm_recorder.record_with(llm, prompts or [PROMPT], which, NEW, Recorder(format=format)), folder)


def test_the_rotation_of_queries_with_heads_apart_is_named(engine: tuple[Any, str], tmp_path: Path) -> None:
    report = report_with(engine, tmp_path)
    assert [finding.name for finding in report.findings] == [
        f"model.layers.{layer}.self_attn.{part}_rotated" for layer in (2, 4) for part in "qk"
    ]
    assert report.findings[0].operation == "rotation of the queries"
    assert report.findings[0].recomputed == ()


def test_every_operation_is_right_with_the_rotation_mended(mended: tuple[Any, str], tmp_path: Path) -> None:
    report = report_with(mended, tmp_path)
    assert (report.findings, report.format) == ((), mended[1])
    assert max(check.error for check in report.checks) < 0.7
    missing = {operation.name for operation in operations(CONFIG)} - {check.name for check in report.checks}
    assert missing == {f"model.layers.{layer}.self_attn.{part}" for layer in (2, 4) for part in ("scores", "weights")}


@pytest.mark.parametrize("which", range(3))
def test_each_request_of_a_ragged_batch_is_right(mended: tuple[Any, str], tmp_path: Path, which: int) -> None:
    recorder = vllm_recorder.record_with(mended[0], RAGGED, which, NEW, Recorder(format=mended[1]))
    assert sum(recorder.sizes) == len(recorder.token_ids) == len(RAGGED[which]) + NEW - 1
    assert (len(recorder.sizes) > NEW) == (which == 1)  # that prompt came in chunks
    report = report_of(recorder, tmp_path)
    assert report.findings == ()
    assert max(check.error for check in report.checks) < 0.7


def test_what_a_prefix_hit_finds_in_the_caches_is_right(mended: tuple[Any, str], tmp_path: Path) -> None:
    report_with(mended, tmp_path, [BEFORE])
    recorder = vllm_recorder.record_with(mended[0], [AFTER], 0, NEW, Recorder(format=mended[1]))
    assert len(recorder.token_ids) - sum(recorder.sizes) == SHARED
    report = report_of(recorder, tmp_path)
    assert report.findings == ()
    checked = {check.name for check in report.checks if not check.is_blunt}
    assert {"model.layers.0.conv.state", "model.layers.2.self_attn.keys_read"} <= checked


def test_a_state_that_a_hit_finds_changed_is_named(mended: tuple[Any, str], tmp_path: Path) -> None:
    report_with(mended, tmp_path, [BEFORE])
    model_of(mended[0]).model.layers[0].short_conv.kv_cache[0].mul_(1.5)  # other layers have blocks in there, too
    first = report_with(mended, tmp_path, [AFTER]).findings[0]
    assert first.name == "model.layers.0.conv.state"
    assert first.rows == first.steps == "step 0 of 4"


def test_a_value_that_a_hit_finds_changed_is_named(mended: tuple[Any, str], tmp_path: Path) -> None:
    report_with(mended, tmp_path, [BEFORE])
    cache = model_of(mended[0]).model.layers[4].self_attn.attn.kv_cache  # [blocks, G, P, 2E], values behind keys
    cache.view(*cache.shape[:2], -1)[:, 1].chunk(2, dim=-1)[1].mul_(1.5)
    first = report_with(mended, tmp_path, [AFTER]).findings[0]
    assert first.name == "model.layers.4.self_attn.values_read"
    assert "head 1" in first.channels


def test_a_convolution_that_forgets_between_chunks_is_named(
    mended: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d as kernels

    usual = kernels.causal_conv1d_fn_cpu

    def forgetting(*arguments: Any, **options: Any) -> Any:
        *others, begun = arguments
        return usual(*others, begun & False, **options)

    monkeypatch.setattr(kernels, "causal_conv1d_fn_cpu", forgetting)
    first = report_with(mended, tmp_path, [RAGGED[1]]).findings[0]
    assert (first.name, first.operation) == ("model.layers.0.conv.conv", "the convolution")
    assert first.rows == f"rows {CHUNK} to {CHUNK + 1} of {len(RAGGED[1]) + NEW - 1}"


def test_an_adapter_that_takes_the_parts_of_a_projection_for_each_other_is_named(
    mended: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recorders import vllm_taps

    usual = vllm_taps.parted
    monkeypatch.setattr(vllm_taps, "parted", lambda names, *others: usual(names[::-1], *others))
    with pytest.raises(DumpError, match="q_proj"):  # of other width
        report_with(mended, tmp_path)
    swapped = lambda names, *others: usual(names[::-1] if "w1" in names[0] else names, *others)  # noqa: E731
    monkeypatch.setattr(vllm_taps, "parted", swapped)
    assert report_with(mended, tmp_path).findings[0].name == "model.layers.0.feed_forward.w1"


def test_a_request_that_was_preempted_is_right_once_computed_again(
    mended: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, format = mended
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    usual, count = scheduler.schedule, 0

    def preempting(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return usual(*arguments)

    monkeypatch.setattr(scheduler, "schedule", preempting)
    recorder = vllm_recorder.record_with(llm, [PROMPT], 0, NEW + 2, Recorder(format=format))
    assert recorder.sizes == [len(PROMPT) + 3, 1, 1]  # three of its new tokens were computed already
    report = report_of(recorder, tmp_path)
    assert report.findings == ()


def test_record_loads_runs_and_ends_an_engine(tmp_path: Path) -> None:
    """Last: two engines at once are one too many for vLLM."""
    options = {"enable_prefix_caching": True, "max_num_seqs": 1}
    recorder = vllm_recorder.record(TRAINED, [BEFORE, AFTER], 1, NEW, Recorder(format="float32"), **options)
    assert len(recorder.token_ids) - sum(recorder.sizes) == SHARED
    assert report_of(recorder, tmp_path).findings[0].name == "model.layers.2.self_attn.q_rotated"
