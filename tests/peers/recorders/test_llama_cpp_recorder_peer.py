"""llama.cpp recorded: right in every operation; and named the state that a slot restores of another prompt."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorders import llama_cpp_recorder, llama_cpp_slot
from recorders.llama_cpp_batches import Row
from recorders.llama_cpp_recorder import Session, record

from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.locate.dump import read_dump
from lfm2np.oracle.locate.locate import Report, locate
from lfm2np.oracle.locate.operations import operations
from lfm2np.oracle.recorders.recorder import Recorder

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
from gguf_files import write_gguf

pytestmark = pytest.mark.peers

FIXTURES = Path(__file__).parents[3] / "fixtures"
TRAINED = FIXTURES / "trained"
PROMPTS = [[1, 17, 42, 66, 30, 8, 21], [5, 6], [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(TRAINED, tmp_path_factory.mktemp("gguf") / "trained.gguf", "float32")


def report_of(recorder: Recorder, model: Path, folder: Path) -> Report:
    recorder.path = folder / "dump.safetensors"
    recorder.save()
    config = load_config(model)
    return locate(open_checkpoint(model, config), config, read_dump(recorder.path, config))


@pytest.mark.parametrize("format", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("model", [TRAINED, FIXTURES / "torture" / "sharded_mixed_types"], ids=lambda path: path.name)
def test_llama_cpp_is_right_in_every_operation(tmp_path: Path, model: Path, format: str) -> None:
    gguf = write_gguf(model, tmp_path / "model.gguf", format)
    for request in range(len(PROMPTS)):
        report = report_of(record(model, PROMPTS, request, 4, Recorder(format=format), gguf), model, tmp_path)
        assert report.findings == ()
        assert max(check.error for check in report.checks) < 0.6
        assert {check.name for check in report.checks} == {
            operation.name for operation in operations(load_config(model))
        }


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("ubatch", [2, 5, 512])
def test_every_split_of_a_batch_is_right_and_gives_the_same_tokens(
    tmp_path: Path, trained: Path, ubatch: int, unified: bool
) -> None:
    recorder = record(TRAINED, PROMPTS, 2, 4, Recorder(format="float32"), trained, ubatch, unified)
    assert recorder.token_ids == record(TRAINED, PROMPTS[2:], 0, 4, Recorder(format="float32"), trained).token_ids
    assert report_of(recorder, TRAINED, tmp_path).findings == ()


def test_another_base_of_the_rotation_is_named(tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Session._settings

    def settings(self: Session, *arguments: Any) -> Any:
        parameters = original(self, *arguments)
        parameters.rope_freq_base = 5e5
        return parameters

    monkeypatch.setattr(Session, "_settings", settings)
    report = report_of(record(TRAINED, PROMPTS, 0, 4, Recorder(format="float32"), trained), TRAINED, tmp_path)
    assert report.findings[0].name == "model.layers.2.self_attn.q_rotated"


def test_keys_that_are_cached_in_float16_are_named(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(llama_cpp_recorder.CACHE_TYPES, "float32", llama_cpp_recorder.F16)
    report = report_of(record(TRAINED, PROMPTS, 0, 4, Recorder(format="float32"), trained), TRAINED, tmp_path)
    assert report.findings[0].name == "model.layers.2.self_attn.keys_read"


def test_the_state_of_another_request_is_named(tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the prompts, of equal length, and the first new tokens request 0 gets what request 1 has."""
    original, calls = Session.decode, []

    def decode(self: Session, rows: list[Row]) -> Any:
        calls.append(rows)
        if len(calls) == 2:
            flags = self.api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
            size = self.api.llama_state_seq_get_size_ext(self.context, 1, flags)
            content = (ctypes.c_uint8 * size)()
            self.api.llama_state_seq_get_data_ext(self.context, content, size, 1, flags)
            self.api.llama_state_seq_set_data_ext(self.context, content, size, 0, flags)
        return original(self, rows)

    monkeypatch.setattr(Session, "decode", decode)
    report = report_of(
        record(TRAINED, [[5, 6, 7], [8, 9, 10]], 0, 4, Recorder(format="float32"), trained), TRAINED, tmp_path
    )
    assert report.findings[0].name == "model.layers.0.conv.state"
    assert report.findings[0].steps == "steps 1 to 2 of 4"


def test_a_slot_restores_the_state_of_its_former_tenant(tmp_path: Path, trained: Path) -> None:
    """llama-server -np 1 answers 295, 39 and 7 as well, with these log-probabilities."""
    prompts = [[60, 61, 62, 63, 64], [1, 35], [1, 239]]
    recorder = Recorder(format="float32")
    answers = llama_cpp_slot.record(TRAINED, prompts, 2, 1, recorder, trained)
    assert answers == [[295], [39], [7]]
    assert (recorder.token_ids, recorder.sizes) == ([1, 239], [1])
    report = report_of(recorder, TRAINED, tmp_path)
    assert [finding.name for finding in report.findings] == [
        f"model.layers.{layer}.conv.state" for layer in (0, 1, 3, 5)
    ]
    tensors, tenant = (
        recorder.tensors(),
        record(TRAINED, prompts[:1], 0, 1, Recorder(format="float32"), trained).tensors(),
    )
    for layer in (0, 1, 3, 5):
        before, last = tensors[f"model.layers.{layer}.conv.state"][0]
        assert not before.any()
        np.testing.assert_array_equal(last, tenant[f"model.layers.{layer}.conv.u"][0])  # of token 60


def test_a_slot_whose_prompts_all_begin_alike_is_right(tmp_path: Path, trained: Path) -> None:
    recorder = Recorder(format="float32")
    answers = llama_cpp_slot.record(TRAINED, [[1, 61, 62, 63, 64], [1, 35], [1, 239]], 2, 3, recorder, trained)
    assert recorder.sizes == [1, 1, 1]
    assert report_of(recorder, TRAINED, tmp_path).findings == ()
    assert answers[-1][0] == 39


@pytest.mark.parametrize(
    ("model", "format", "message"),
    [
        (TRAINED, "bfloat16", "general.file_type 0, expected 32 for bfloat16"),
        (FIXTURES / "draft", "float32", "layers 6, expected 3"),
        (FIXTURES / "torture" / "all_attention", "float32", "full_attention layers alone"),
    ],
)
def test_a_file_of_another_model_or_type_is_refused(trained: Path, model: Path, format: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        record(model, [[1, 2]], 0, 1, Recorder(format=format), trained)
