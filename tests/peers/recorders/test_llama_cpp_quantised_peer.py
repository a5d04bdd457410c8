"""llama.cpp with quantised weights: right in every operation, by the file's own numbers; its tokens are ours."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import numpy as np
import pytest
from random_checkpoint import random_checkpoint
from recordings import TRAINED, require_right

from lfm2np.checkpoint.files import read_config, read_tensors, read_tokenizer
from lfm2np.checkpoint.gguf.container import open_container
from lfm2np.checkpoint.gguf.ggml_types import QUANTISED
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.locate.dump import parse_dump
from lfm2np.oracle.locate.locate import Report, locate
from lfm2np.oracle.recorders.registry import record_of

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
from gguf_files import write_gguf

pytestmark = pytest.mark.peers

PROMPTS = [[int(integer) for integer in np.random.default_rng(5).integers(8, 400, count)] for count in (90, 3, 17)]
FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12}
FILE_TYPES |= {"Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30}  # enum llama_ftype
WIDE: dict[str, object] = {  # superblocks need rows of 256
    "model_type": "lfm2",
    "vocab_size": 400,
    "hidden_size": 256,
    "intermediate_size": 512,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plain")
    models = {"trained": TRAINED, "wide": random_checkpoint(folder / "wide", WIDE)}
    return {name: write_gguf(model, folder / f"{name}.gguf", "F32") for name, model in models.items()}


def quantise(source: Path, target: Path, name: str) -> Path:
    """Of a file in F32, by llama.cpp's own library."""
    from llama_cpp import llama_cpp as api

    settings = api.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = FILE_TYPES[name], 1
    assert api.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings)) == 0
    return target


def with_neighbours_scales(source: Path, target: Path, tensor: str) -> Path:
    """A copy in which each block of that tensor has the scales of the block before it in its row."""
    stored, content = open_container(source).tensors[tensor], bytearray(source.read_bytes())
    kind, rows = QUANTISED[stored.dtype], np.ascontiguousarray(*stored.arrays)
    at = content.index(rows.tobytes())
    blocks = rows.reshape(len(rows), -1, kind.size)
    damaged = blocks.copy()
    for half in kind.halves:
        damaged[:, :, half : half + 2] = np.roll(blocks[:, :, half : half + 2], 1, axis=1)
    content[at : at + rows.size] = damaged.tobytes()
    target.write_bytes(content)
    return target


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
        require_right(report)
        assert report.format == "q8" and report.rounds_inputs


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


def test_a_quantised_file_is_recorded_as_q8_alone(plain: dict[str, Path], tmp_path: Path) -> None:
    path = quantise(plain["trained"], tmp_path / "x.gguf", "Q8_0")
    target = "recorders.llama_cpp_recorder:factory"
    with pytest.raises(TargetError, match=r"general\.file_type 7, expected 0 for float32; .* --format q8"):
        record_of(target, path, "float32")([[1, 2]], 0, 1)
    with pytest.raises(TargetError, match=r"general\.file_type 0, expected that of quantised weights for q8"):
        record_of(target, plain["trained"], "q8")([[1, 2]], 0, 1)


# --- the tokenizer of the file's tables


def with_tables(path: Path, pre: str) -> Path:
    """The trained fixture's tokenizer, its pattern exchanged."""
    import gguf

    raw = json.loads((TRAINED / "tokenizer.json").read_text(encoding="utf-8"))
    texts = {token_id: text for text, token_id in raw["model"]["vocab"].items()}
    special = {token["id"] for token in raw["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if one in special else gguf.TokenType.NORMAL for one in range(512)]

    def add_tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([texts[one] for one in range(512)])
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(merge) for merge in raw["model"]["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(7)
        writer.add_add_bos_token(True)

    return write_gguf(TRAINED, path, "F32", add_tokenizer)


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
