"""OpenVINO recorded: right in every operation that can be tapped, and named where it is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorders import openvino_recorder
from recorders.openvino_recorder import FILE, Engine, record
from recordings import PROMPTS, TRAINED, left_out, report_of, require_right

from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.recorders.recorder import Recorder

openvino = pytest.importorskip("openvino")
intel = pytest.importorskip("optimum.intel")

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    intel.OVModelForCausalLM.from_pretrained(TRAINED, export=True, compile=False).save_pretrained(folder)
    return folder


def recorded(exported: Path, request: int = 0, format: str = "float32", **options: Any) -> Recorder:
    return record(TRAINED, PROMPTS, request, 4, Recorder(format=format), exported, **options)


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_openvino_is_right_in_every_operation(exported: Path, format: str, chunk: int | None) -> None:
    for request in (2, 3):
        report = report_of(recorded(exported, request, format, chunk=chunk))
        require_right(report, 0.6)
        missing = left_out(report)
        assert len(missing) == 4 and all(name.endswith((".scores", ".weights")) for name in missing)


def test_what_is_fused_without_outputs_is_right_as_well(exported: Path) -> None:
    recorder = recorded(exported, only=("conv.state", "residual"))
    assert len(recorder.tensors()) == 2 + 4 + 6 + 1
    assert report_of(recorder).findings == ()
    alone = recorded(exported, only=("lm_head",))
    assert alone.token_ids == recorder.token_ids
    np.testing.assert_allclose(alone.tensors()["lm_head"], recorder.tensors()["lm_head"], atol=1e-3)


def test_a_state_that_is_not_reset_is_named(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolutions' alone: that of keys and values is reset."""

    def reset(self: Engine) -> None:
        for state in self._request.query_state():
            if len(state.state.shape) == 4:
                state.reset()
        self._done = 0

    monkeypatch.setattr(Engine, "reset", reset)
    first = report_of(recorded(exported, 1)).findings[0]
    assert (first.name, first.steps) == ("model.layers.0.conv.state", "step 0 of 4")


def test_a_graph_of_other_versions_is_refused(tmp_path: Path, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(openvino_recorder.EXPORTED, "transformers_version", ("0.1",))
    with pytest.raises(TargetError, match=rf"{FILE}: transformers_version [\d.]+, expected 0.1"):
        recorded(exported)
    with pytest.raises(TargetError, match=FILE):
        recorded(tmp_path)


def test_a_format_that_the_machine_does_not_compute_in_is_refused(exported: Path) -> None:
    """Asked for float16, a CPU without it computes in bfloat16 and says so in its properties alone."""
    if "FP16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        recorded(exported, format="float16")
    else:
        with pytest.raises(TargetError, match=r"computes in \w+ on this machine, expected f16 for float16"):
            recorded(exported, format="float16")
