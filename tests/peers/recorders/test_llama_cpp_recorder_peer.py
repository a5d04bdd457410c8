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
from recordings import FIXTURES, PROMPTS, TRAINED, first_wrong, left_out, report_of, require_right

from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.recorders.recorder import Recorder

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
from gguf_files import write_gguf

pytestmark = pytest.mark.peers

TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(TRAINED, tmp_path_factory.mktemp("gguf") / "trained.gguf", "F32")


def recorded(trained: Path, request: int = 0, *options: Any, prompts: list[list[int]] = PROMPTS[:3]) -> Recorder:
    return record(TRAINED, prompts, request, 4, Recorder(format="float32"), trained, *options)


@pytest.mark.parametrize("format", TYPES)
@pytest.mark.parametrize("model", [TRAINED, FIXTURES / "torture" / "sharded_mixed_types"], ids=lambda path: path.name)
def test_llama_cpp_is_right_in_every_operation(tmp_path: Path, model: Path, format: str) -> None:
    gguf = write_gguf(model, tmp_path / "model.gguf", TYPES[format])
    for request in range(3):
        report = report_of(record(model, PROMPTS[:3], request, 4, Recorder(format=format), gguf), model)
        require_right(report, 0.6)
        assert not left_out(report, model)


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("ubatch", [2, 5, 512])
def test_every_split_of_a_batch_is_right_and_gives_the_same_tokens(trained: Path, ubatch: int, unified: bool) -> None:
    recorder = recorded(trained, 2, ubatch, unified)
    assert recorder.token_ids == recorded(trained, prompts=PROMPTS[2:3]).token_ids
    require_right(report_of(recorder))


def test_keys_that_are_cached_in_float16_are_named(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(llama_cpp_recorder.CACHE_TYPES, "float32", llama_cpp_recorder.F16)
    assert first_wrong(recorded(trained)) == "model.layers.2.self_attn.keys_read"


def test_the_state_of_another_request_is_named(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    first = report_of(recorded(trained, prompts=[[5, 6, 7], [8, 9, 10]])).findings[0]
    assert (first.name, first.steps) == ("model.layers.0.conv.state", "steps 1 to 2 of 4")


def test_a_slot_restores_the_state_of_its_former_tenant(trained: Path) -> None:
    """llama-server -np 1 answers 295, 39 and 7 as well, with these log-probabilities."""
    prompts = [[60, 61, 62, 63, 64], [1, 35], [1, 239]]
    recorder = Recorder(format="float32")
    answers = llama_cpp_slot.record(TRAINED, prompts, 2, 1, recorder, trained)
    assert answers == [[295], [39], [7]]
    assert (recorder.token_ids, recorder.sizes) == ([1, 239], [1])
    convolutions = [f"model.layers.{layer}.conv" for layer in (0, 1, 3, 5)]
    assert [finding.name for finding in report_of(recorder).findings] == [f"{name}.state" for name in convolutions]
    tensors, tenant = recorder.tensors(), recorded(trained, prompts=prompts[:1]).tensors()
    for name in convolutions:
        before, last = tensors[f"{name}.state"][0]
        assert not before.any()
        np.testing.assert_array_equal(last, tenant[f"{name}.u"][0])  # of token 60


def test_a_slot_whose_prompts_all_begin_alike_is_right(trained: Path) -> None:
    recorder = Recorder(format="float32")
    answers = llama_cpp_slot.record(TRAINED, [[1, 61, 62, 63, 64], [1, 35], [1, 239]], 2, 3, recorder, trained)
    assert recorder.sizes == [1, 1, 1]
    assert report_of(recorder).findings == ()
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
