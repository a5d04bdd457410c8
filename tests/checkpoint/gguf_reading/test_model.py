"""A model from a GGUF file: that of a checkpoint with the same numbers, bit for bit, no weight rounded on the way."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from blocks_drawn import random_rows
from builders import raw_config, raw_mixture, safetensors_bytes, stored
from gguf_bytes import Tensor, gguf_bytes, model_keys, model_tensors, quantised_tensors

import lfm2np
from lfm2np.arithmetic import NAMES, exact
from lfm2np.checkpoint.config_json import load_config, parse_config
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.gguf.ggml_types import QUANTISED, values_of
from lfm2np.checkpoint.stored import StoredTensor, widen
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import joined, stored_rows
from lfm2np.errors import CheckpointError, RequestError, TokenizerError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import matrix_parts

TOP = Path(__file__).parents[3]
FIXTURES = [
    *sorted((TOP / "fixtures" / "torture").iterdir()),
    *(TOP / "fixtures" / name for name in ("trained", "moe")),
]
PROMPT = [1, 2, 3, 5, 8, 13]
# Widths of whole blocks of 32 and of 256.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}
SPARSE = {**WIDE, "moe_intermediate_size": 256}


def in_gguf(config: ModelConfig) -> bool:
    """Whether llama.cpp has a place for it: none for LFM3, biases of convolutions, routers without one, factors."""
    mixture = config.mixture
    plain = mixture is None or (
        mixture.use_expert_bias and mixture.norm_topk_prob and mixture.routed_scaling_factor == 1.0
    )
    return plain and not config.conv_bias and config.model_type != "lfm3"


def same_numbers(directory: Path, path: Path, dtype: str) -> Path:
    """A checkpoint's as GGUF; BF16 only where that rounds nothing."""
    config = load_config(directory)
    tensors = open_checkpoint(directory, config)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        values = widen(tensors[name].values, tensors[name].dtype)
        is_short = not np.any(values.view(np.uint32) & 0xFFFF)
        kind, _, content = stored(values, "BF16" if dtype == "BF16" and is_short and len(shape) == 2 else "F32")
        return Tensor(kind, shape, content)

    path.write_bytes(gguf_bytes(model_keys(config), model_tensors(config, made)))
    return path


CONVERTIBLE = [path for path in FIXTURES if in_gguf(load_config(path))]


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("directory", CONVERTIBLE, ids=lambda path: path.name)
def test_the_same_numbers_give_the_same_bits(directory: Path, dtype: str, tmp_path: Path):
    path = same_numbers(directory, tmp_path / "x.gguf", dtype)
    expected, actual = lfm2np.load(directory), lfm2np.load(path)
    assert actual.config == as_told(expected.config)
    prompt = [token % actual.config.vocab_size for token in PROMPT]
    assert actual.logits(prompt).tobytes() == expected.logits(prompt).tobytes()


def as_told(said: ModelConfig) -> ModelConfig:
    """The config of a directory as GGUF can tell it: of several ids that end a sequence the first."""
    return replace(said, eos_token_ids=said.eos_token_ids[:1])


def test_the_fixtures_that_gguf_can_hold():
    """The control: what has no place there is left out, and nothing else."""
    assert {path.name for path in FIXTURES} - {path.name for path in CONVERTIBLE} == {
        *("all_convolution", "biased_two_taps", "moe_one_expert"),  # biases of convolutions
        *("moe_fused_no_bias", "moe_near_ties"),  # routers without a bias
        *("moe", "moe_all_experts", "moe_one_a_token"),  # a factor of the experts' outputs
        *(path.name for path in FIXTURES if path.name.startswith("lfm3")),  # an architecture whose keys are not known
    }


# --- quantised


def configured(mixture: bool = False) -> ModelConfig:
    return parse_config(raw_mixture(**SPARSE) if mixture else raw_config(**WIDE), "config.json")


def write_model(path: Path, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Path:
    path.write_bytes(gguf_bytes(model_keys(config), tensors))
    return path


def as_float32(path: Path, directory: Path, raw: Mapping[str, object]) -> Path:
    """A checkpoint directory of the same numbers, of which float32 loses none."""
    directory.mkdir()
    config = read_config(path)
    tensors = {}
    for name, tensor in read_tensors(path, config).items():
        values = widen(tensor.values, tensor.dtype)
        narrow = values.astype(np.float32)
        assert np.array_equal(narrow, values), name
        tensors[name] = stored(narrow, "F32")
    (directory / "config.json").write_text(json.dumps(raw))
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return directory


def powers_of_two(rows: np.ndarray, dtype: str) -> np.ndarray:
    """The same codes with all scales and minima 2**-7: then float32 holds every weight."""
    blocks = rows.reshape(-1, QUANTISED[dtype].size)
    for at in QUANTISED[dtype].halves:
        blocks[:, at : at + 2] = np.array([0x00, 0x20], np.uint8)
    return rows


@pytest.mark.rounding
@pytest.mark.parametrize(("dtype", "mixture"), [*zip(QUANTISED, itertools.cycle([False, True]), strict=False)])
def test_quantised_weights_are_float32_weights_of_the_same_values(dtype: str, mixture: bool, tmp_path: Path):
    config = configured(mixture)
    tensors = quantised_tensors(config, dtype)
    for name, tensor in tensors.items():
        if tensor.dtype == dtype:
            content = powers_of_two(np.frombuffer(tensor.content, np.uint8).copy(), dtype).tobytes()
            tensors[name] = Tensor(dtype, tensor.shape, content)
    path = write_model(tmp_path / "x.gguf", config, tensors)
    raw = raw_mixture(**SPARSE) if mixture else raw_config(**WIDE)
    directory = as_float32(path, tmp_path / "same", raw)
    for numerics in ("exact", NAMES[1 + list(QUANTISED).index(dtype) % (len(NAMES) - 1)]):  # the others in turns
        actual, expected = lfm2np.load(path, numerics), lfm2np.load(directory, numerics)
        assert actual.logits(PROMPT).tobytes() == expected.logits(PROMPT).tobytes(), numerics


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", QUANTISED)
def test_any_quantised_model_is_the_float64_one_nearly_and_streamed_exactly(dtype: str, tmp_path: Path):
    path = write_model(tmp_path / "x.gguf", configured(), quantised_tensors(configured(), dtype, seed=3))
    model = lfm2np.load(path)
    logits, wide = model.logits(PROMPT), lfm2np.load(path, "float64").logits(PROMPT)
    assert np.isfinite(logits).all() and np.abs(logits - wide).max() < 1e-4 * np.abs(wide).max()
    assert lfm2np.load(path, weights="streamed").logits(PROMPT).tobytes() == logits.tobytes()
    completion = model.generate(PROMPT, max_tokens=3)
    assert len(completion.token_ids) == 3 and completion.text is None


@pytest.mark.parametrize("dtype", QUANTISED)
def test_the_grids_of_a_product_hold_every_bit_of_its_weights(dtype: str, tmp_path: Path):
    """The slices of a prepared weight add up to it, by fractions, whatever its scales are."""
    config = configured()
    path = write_model(tmp_path / "x.gguf", config, quantised_tensors(config, dtype, seed=4, exponents=(1, 12)))
    tensors = read_tensors(path, config)
    for names in list(matrix_parts(config))[:3]:
        weight = joined(tensors, names)
        matrix = exact.prepare_matrix(weight, "w")
        assert matrix.grid is not None
        slices = matrix.values.reshape(matrix.grid.slices, *weight.shape)
        for row in (0, len(weight) - 1):
            scaled = np.ldexp(weight[row], -matrix.grid.columns)
            parts = [[Fraction(v) for v in rows[row].tolist()] for rows in slices]
            assert [sum(terms) for terms in zip(*parts, strict=True)] == [Fraction(v) for v in scaled.tolist()]


def test_a_product_of_types_side_by_side_holds_them_all(tmp_path: Path):
    """Queries, keys and values are one product, and llama.cpp's mixes give them different formats."""
    config = configured()
    tensors = quantised_tensors(config, "Q4_K", seed=5)
    values = random_rows("Q6_K", (128, 256), 6, (8, 11))
    tensors["blk.1.attn_v.weight"] = Tensor("Q6_K", (128, 256), values.tobytes())
    tensors["blk.1.attn_k.weight"] = Tensor("F32", (128, 256), np.ones((128, 256), "<f4").tobytes())
    path = write_model(tmp_path / "x.gguf", config, tensors)
    stored_tensors = read_tensors(path, config)
    names = tuple(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")
    weight = joined(stored_tensors, names)
    assert weight.dtype == np.float64
    assert np.array_equal(weight[384:], values_of(values, "Q6_K")) and np.all(weight[256:384] == 1.0)
    rows = stored_rows(stored_tensors, names)
    assert rows.shape == weight.shape and rows.dtype == np.float64
    for piece in (slice(0, 10), slice(250, 400), slice(260, 270), slice(500, 512)):
        assert np.array_equal(rows[piece], weight[piece]) and rows[piece].dtype == np.float64
    assert lfm2np.load(path).logits(PROMPT).tobytes() == lfm2np.load(path, weights="streamed").logits(PROMPT).tobytes()


def test_text_takes_a_tokenizer_json_beside_the_file(tmp_path: Path):
    path = same_numbers(TOP / "fixtures" / "trained", tmp_path / "x.gguf", "BF16")
    model = lfm2np.load(path)
    assert not model.has_tokenizer and model.generate(PROMPT, max_tokens=2).text is None
    message = r"no tables of a tokenizer in it and no tokenizer\.json beside it; name a directory that has one"
    with pytest.raises(TokenizerError, match=message):
        model.logits("a red ball")
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        from lfm2np import LLM, SamplingParams

        LLM(model).generate([PROMPT], SamplingParams(stop="a"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((TOP / "fixtures" / "trained" / name).read_bytes())
    text = "copy: tivu zo sa ->"
    completion = lfm2np.load(path).generate(text, max_tokens=8)
    assert completion == lfm2np.load().generate(text, max_tokens=8) and completion.text


def test_the_embedding_is_rounded_to_float32_once_and_to_no_less():
    """As activations of exact arithmetic are; the head, of the same tensor, keeps every bit."""
    rows = random_rows("Q4_K", (4, 256), 7)
    wide = values_of(rows, "Q4_K")
    embedded = exact.embed(wide)
    assert embedded.dtype == np.float32 and np.array_equal(embedded, wide.astype(np.float32))
    assert not np.array_equal(embedded, wide)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_tensor_is_read_from_the_file_when_it_is_needed(dtype: str, tmp_path: Path):
    path = write_model(tmp_path / "x.gguf", configured(), quantised_tensors(configured(), dtype))
    for tensor in read_tensors(path, configured()).values():
        assert isinstance(tensor, StoredTensor)
        assert not any(array.flags.owndata or array.flags.writeable for array in tensor.arrays)
        assert math.prod(tensor.shape) > 0


@pytest.mark.parametrize("dtype", ["F32", "Q4_K"])
def test_queries_keys_and_values_may_be_one_tensor(dtype: str, tmp_path: Path):
    """As the converter's --fuse-qkv writes them."""
    config = configured()
    tensors = quantised_tensors(config, dtype)
    expected = lfm2np.load(write_model(tmp_path / "x.gguf", config, tensors)).logits(PROMPT)
    parts = [tensors.pop(f"blk.1.attn_{part}.weight") for part in "qkv"]
    rows = sum(tensor.shape[0] for tensor in parts)
    fused = Tensor(dtype, (rows, 256), b"".join(tensor.content for tensor in parts))
    path = write_model(tmp_path / "y.gguf", config, tensors | {"blk.1.attn_qkv.weight": fused})
    assert lfm2np.load(path).logits(PROMPT).tobytes() == expected.tobytes()
    short = Tensor(dtype, (rows - 1, 256), fused.content[: -len(fused.content) // rows])
    path = write_model(tmp_path / "z.gguf", config, tensors | {"blk.1.attn_qkv.weight": short})
    with pytest.raises(
        CheckpointError, match=rf"blk\.1\.attn_qkv\.weight: shape \({rows - 1}, 256\), expected \({rows}, 256\)"
    ):
        lfm2np.load(path)
    path = write_model(
        tmp_path / "w.gguf", config, tensors | {"blk.1.attn_qkv.weight": fused, "blk.1.attn_q.weight": parts[0]}
    )
    with pytest.raises(CheckpointError, match=r"missing 2 of the .* blk\.1\.attn_k\.weight"):
        lfm2np.load(path)
