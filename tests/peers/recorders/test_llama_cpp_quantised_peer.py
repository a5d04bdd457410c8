"""llama.cpp with quantised weights: right in every operation, by the file's own numbers; its tokens are ours."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import numpy as np
import pytest

from lfm2np.checkpoint.files import read_config, read_tensors, read_tokenizer
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.locate.dump import parse_dump
from lfm2np.oracle.locate.locate import Report, locate
from lfm2np.oracle.recorders.registry import record_of

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
from gguf_files import write_gguf
from quantised_files import FILE_TYPES, quantise, wide_checkpoint, with_neighbours_scales

pytestmark = pytest.mark.peers

TRAINED = Path(__file__).parents[3] / "fixtures" / "trained"
PROMPTS = [[int(integer) for integer in np.random.default_rng(5).integers(8, 400, count)] for count in (90, 3, 17)]
SUPERBLOCKS = ("Q4_K_M", "Q6_K")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plain")
    wide = wide_checkpoint(folder / "wide")
    return {
        "trained": write_gguf(TRAINED, folder / "trained.gguf", "float32"),
        "wide": write_gguf(wide, folder / "wide.gguf", "float32"),
    }


def report_of(engines: Path, model: Path, request: int) -> Report:
    """What the engine's file computes, judged by the model's."""
    config = read_config(model)
    return locate(read_tensors(model, config), config, parse_dump(recorded(engines, request), "dump", config))


def recorded(gguf: Path, request: int) -> bytes:
    return record_of("recorders.llama_cpp_recorder:factory", gguf, "q8")(PROMPTS, request, 5)


@pytest.mark.parametrize("name", FILE_TYPES)
def test_llama_cpp_is_right_in_every_operation_with_weights_of_this_type(
    name: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    path = quantise(plain["wide"], tmp_path / "x.gguf", name)
    for request in range(len(PROMPTS)):
        report = report_of(path, path, request)
        assert report.format == "q8" and report.findings == ()
        assert max(check.error for check in report.checks) < 0.7
        assert report.rounds_inputs


@pytest.mark.parametrize("tensor", ["blk.3.shortconv.in_proj", "blk.2.attn_k", "blk.5.ffn_down"])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_scales_of_the_neighbouring_block_are_named(
    name: str, tensor: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    right = quantise(plain["trained"], tmp_path / "right.gguf", name)
    wrong = with_neighbours_scales(right, tmp_path / "wrong.gguf", f"{tensor}.weight")
    (finding,) = report_of(wrong, right, 2).findings
    layer = tensor.split(".")[1]
    ours = {"shortconv.in_proj": "conv.in_proj", "attn_k": "self_attn.k_proj", "ffn_down": "feed_forward.w2"}
    assert finding.name == f"model.layers.{layer}.{ours[tensor.partition('.')[2].partition('.')[2]]}"
    assert finding.error > 1e4


@pytest.mark.parametrize("name", SUPERBLOCKS)
def test_weights_of_another_file_are_not_taken_for_rounding(name: str, plain: dict[str, Path], tmp_path: Path) -> None:
    """Judged by the weights before they were quantised."""
    path = quantise(plain["wide"], tmp_path / "x.gguf", name)
    config = read_config(plain["wide"])
    report = locate(read_tensors(plain["wide"], config), config, parse_dump(recorded(path, 2), "dump", config))
    assert (
        len(
            [finding for finding in report.findings if finding.name.endswith(("_proj", ".w1", ".w2", ".w3", "lm_head"))]
        )
        == 25
    )


def test_a_quantised_file_is_recorded_as_q8_alone(plain: dict[str, Path], tmp_path: Path) -> None:
    path = quantise(plain["trained"], tmp_path / "x.gguf", "Q8_0")
    target = "recorders.llama_cpp_recorder:factory"
    with pytest.raises(TargetError, match=r"general\.file_type 7, expected 0 for float32; .* --format q8"):
        record_of(target, path, "float32")([[1, 2]], 0, 1)
    with pytest.raises(TargetError, match=r"general\.file_type 0, expected that of quantised weights for q8"):
        record_of(target, plain["trained"], "q8")([[1, 2]], 0, 1)


# --- the tokenizer of the file's tables


def with_tables(path: Path, pre: str) -> Path:
    """The trained fixture's tokenizer, its pattern exchanged; written by the package `gguf`."""
    import gguf

    raw = json.loads((TRAINED / "tokenizer.json").read_text(encoding="utf-8"))
    reader = gguf.GGUFReader(write_gguf(TRAINED, path.with_name("source.gguf"), "float32"))
    writer = gguf.GGUFWriter(path, "lfm2")
    for key, field in reader.fields.items():
        if key.startswith("lfm2."):
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub)
    texts = {token_id: text for text, token_id in raw["model"]["vocab"].items()}
    special = {token["id"] for token in raw["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([texts[one] for one in range(512)])
    kinds = [gguf.TokenType.CONTROL if one in special else gguf.TokenType.NORMAL for one in range(512)]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in raw["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(7)
    writer.add_add_bos_token(True)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TEXTS = (
    "",
    "copy: tivu zo sa -> tivu zo sa",
    "It's I've we'LL o'clock 'S 't",
    "1 12 123 1234567 3.14 a1b2",
    "a  b\n\n\n c \r\n\t d   ",
    "na\u00efve \u4e2d\u6587 \U0001f642 \u0939\u093f",
    "f(x)!!\n--> <|im_start|>user\nhi<|im_end|>\n<|pad|>",
    "the red kite is in the park   \n",
)


@pytest.mark.parametrize("pre", ["lfm2", "gpt-2"])
def test_llama_cpp_makes_the_same_tokens(pre: str, tmp_path: Path) -> None:
    from llama_cpp import llama_cpp as api

    path = with_tables(tmp_path / "x.gguf", pre)
    ours = read_tokenizer(path, read_config(path))
    settings = api.llama_model_default_params()
    settings.vocab_only = True
    model = api.llama_model_load_from_file(str(path).encode(), settings)
    vocabulary = api.llama_model_get_vocab(model)
    random = np.random.default_rng(8)
    letters = list("abcdehilorst' \n\t.,:0123456789\u00e9\u4e2d-><|")
    drawn = ["".join(random.choice(letters, 60)) for _ in range(2000)]
    for text in (*TEXTS, *drawn):
        content, buffer = text.encode(), (ctypes.c_int32 * 4096)()
        count = api.llama_tokenize(vocabulary, content, len(content), buffer, 4096, True, True)
        assert list(buffer[:count]) == ours.encode(text), repr(text)
    api.llama_model_free(model)
