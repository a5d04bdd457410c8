"""What the recorders of engines refuse without the engine; where they find numbers: test_recorder_layouts.py."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from recorders import llama_cpp_recorder, mlx_recorder, openvino_recorder, vllm_recorder
from recorders.llama_cpp_batches import Cells
from recorders.openvino_recorder import TOP, Node
from recordings import FIXTURES, TRAINED

from lfm2np.checkpoint.config_json import load_config
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.recorders.recorder import Recorder

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("module", [llama_cpp_recorder, mlx_recorder, openvino_recorder, vllm_recorder])
def test_another_format_or_family_is_refused_before_the_engine_is_imported(module: Any) -> None:
    with pytest.raises(RequestError, match="format None: expected one of float32, "):
        module.record(TRAINED, [[1]], 0, 4, Recorder())
    with pytest.raises(RequestError, match="a model of type lfm3 can't be recorded there, expected lfm2"):
        module.record(FIXTURES / "lfm3", [[1]], 0, 4, Recorder(format="float32"))


@pytest.mark.parametrize(
    ("version", "is_cpu", "message"),
    [
        (None, True, r"^vllm: .*: expected vLLM 0\.32\.0 for CPUs$"),
        ("0.31.0", True, r"vllm: version 0\.31\.0, expected 0\.32\.0"),
        (f"{vllm_recorder.VERSIONS[0]}+cu130", False, "vllm: platform some card, expected cpu"),
    ],
)
def test_another_vllm_or_platform_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str | None, is_cpu: bool, message: str
) -> None:
    engine, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    engine.__dict__["__version__"] = version
    platforms.__dict__["current_platform"] = SimpleNamespace(is_cpu=lambda: is_cpu, device_name="some card")
    monkeypatch.setitem(sys.modules, "vllm", engine if version else None)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    with pytest.raises(TargetError, match=message):
        vllm_recorder.record(TRAINED, [[1]], 0, 1, Recorder(format="float32"))


def test_keys_that_vllm_reads_from_a_config_are_added_if_missing(tmp_path: Path) -> None:
    assert vllm_recorder.missing_keys(TRAINED) == {}
    shutil.copy(FIXTURES / "torture" / "magnitudes" / "config.json", tmp_path)
    assert vllm_recorder.missing_keys(tmp_path) == {"block_dim": 48, "conv_dim": 48}


TWICE = {f"{TOP}m/a": Node("Concat", ()), f"{TOP}m/b": Node("Concat", ())}


@pytest.mark.parametrize(
    ("find", "message"),
    [
        (lambda: openvino_recorder.tensors_of({}, load_config(TRAINED)), r"no node of model\.embed_tokens"),
        (lambda: openvino_recorder.input_of(TWICE, "m"), "no input of m"),
        (lambda: openvino_recorder.only_node(TWICE, "m/", "Concat", lambda _: True), "2 fitting nodes Concat in m"),
        (lambda: openvino_recorder.first_after(TWICE, f"{TOP}m/a", "m/", "Add"), "no Add in m behind"),
        (lambda: Cells(first=64, between=64, streams=2, seen=32).within(0, [128]), "expected those of 32 from 64 on"),
    ],
)
def test_a_graph_in_which_a_tensor_is_not_found_once_is_refused(find: Callable[[], object], message: str) -> None:
    with pytest.raises(TargetError, match=message):
        find()
