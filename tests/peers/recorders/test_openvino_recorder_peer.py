"""OpenVINO recorded: right in every operation that can be tapped, and named where it is broken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from recorders import openvino_recorder
from recorders.openvino_recorder import FILE, Engine, record

from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.locate.dump import read_dump
from lfm2np.oracle.locate.locate import Report, locate
from lfm2np.oracle.locate.operations import operations
from lfm2np.oracle.recorders.recorder import Recorder

openvino = pytest.importorskip("openvino")
intel = pytest.importorskip("optimum.intel")

pytestmark = pytest.mark.peers

TRAINED = Path(__file__).parents[3] / "fixtures" / "trained"
PROMPTS = [[1, 17, 42, 66, 30, 8, 21], [5, 6], [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [3]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    intel.OVModelForCausalLM.from_pretrained(TRAINED, export=True, compile=False).save_pretrained(folder)
    return folder


def report_of(recorder: Recorder, folder: Path) -> Report:
    recorder.path = folder / "dump.safetensors"
    recorder.save()
    config = load_config(TRAINED)
    return locate(open_checkpoint(TRAINED, config), config, read_dump(recorder.path, config))


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_openvino_is_right_in_every_operation(tmp_path: Path, exported: Path, format: str, chunk: int | None) -> None:
    for request in (2, 3):
        report = report_of(record(TRAINED, PROMPTS, request, 4, Recorder(format=format), exported, chunk), tmp_path)
        assert report.findings == ()
        assert max(check.error for check in report.checks) < 0.6
        left_out = {operation.name for operation in operations(load_config(TRAINED))} - {
            check.name for check in report.checks
        }
        assert len(left_out) == 4 and all(name.endswith((".scores", ".weights")) for name in left_out)


def test_what_is_fused_without_outputs_is_right_as_well(tmp_path: Path, exported: Path) -> None:
    recorder = record(TRAINED, PROMPTS, 0, 4, Recorder(format="float32"), exported, only=("conv.state", "residual"))
    assert len(recorder.tensors()) == 2 + 4 + 6 + 1
    assert report_of(recorder, tmp_path).findings == ()
    alone = record(TRAINED, PROMPTS, 0, 4, Recorder(format="float32"), exported, only=("lm_head",))
    assert alone.token_ids == recorder.token_ids
    np.testing.assert_allclose(alone.tensors()["lm_head"], recorder.tensors()["lm_head"], atol=1e-3)


def test_a_state_that_is_not_reset_is_named(tmp_path: Path, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolutions' alone: that of keys and values is reset."""

    def reset(self: Engine) -> None:
        for state in self._request.query_state():
            if len(state.state.shape) == 4:
                state.reset()
        self._done = 0

    monkeypatch.setattr(Engine, "reset", reset)
    first = report_of(record(TRAINED, PROMPTS, 1, 4, Recorder(format="float32"), exported), tmp_path).findings[0]
    assert (first.name, first.steps) == ("model.layers.0.conv.state", "step 0 of 4")


def test_a_state_that_is_read_a_column_too_early_is_told(
    tmp_path: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder broken, not the engine."""
    original = openvino_recorder.as_rows
    monkeypatch.setattr(
        openvino_recorder,
        "as_rows",
        lambda tensor, values, tokens, columns: original(
            tensor, values[:, :-1] if tensor.endswith("state") else values, tokens, columns
        ),
    )
    report = report_of(record(TRAINED, PROMPTS, 0, 4, Recorder(format="float32"), exported), tmp_path)
    assert report.findings[0].name == "model.layers.0.conv.state"


def test_a_graph_of_other_versions_is_refused(tmp_path: Path, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(openvino_recorder.EXPORTED, "transformers_version", ("0.1",))
    with pytest.raises(TargetError, match=rf"{FILE}: transformers_version [\d.]+, expected 0.1"):
        record(TRAINED, PROMPTS, 0, 1, Recorder(format="float32"), exported)
    with pytest.raises(TargetError, match=FILE):
        record(TRAINED, PROMPTS, 0, 1, Recorder(format="float32"), tmp_path)


def test_a_format_that_the_machine_does_not_compute_in_is_refused(exported: Path) -> None:
    """Asked for float16, a CPU without it computes in bfloat16 and says so in its properties alone."""
    if "FP16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        record(TRAINED, PROMPTS, 0, 1, Recorder(format="float16"), exported)
    else:
        with pytest.raises(TargetError, match=r"computes in \w+ on this machine, expected f16 for float16"):
            record(TRAINED, PROMPTS, 0, 1, Recorder(format="float16"), exported)
