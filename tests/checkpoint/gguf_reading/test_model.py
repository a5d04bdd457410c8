"""A model from a GGUF file: that of a checkpoint with the same numbers, bit for bit, no weight rounded on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from blocks_drawn import quantised_tensors, random_rows
from builders import raw_config, raw_mixture, safetensors_bytes, stored
from gguf_file import Tensor, gguf_bytes, model_keys, model_tensors

import lfm2np
from lfm2np.arithmetic import NAMES, exact
from lfm2np.checkpoint.config_json import load_config, parse_config
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.gguf.ggml_types import QUANTISED, values_of
from lfm2np.checkpoint.stored import widen
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import joined, stored_rows
from lfm2np.errors import CheckpointError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import matrix_parts

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parents[3] / "fixtures"
TRAINED = FIXTURES / "trained"
# GGUF has no place for biases of convolutions, routers without one, factors of the experts' outputs; none for LFM3.
NOT_IN_GGUF = ("all_convolution", "biased_two_taps", "moe_one_expert", "moe_fused_no_bias", "moe_near_ties")
NOT_IN_GGUF += ("moe_all_experts", "moe_one_a_token")
TORTURE = sorted(path for path in (FIXTURES / "torture").iterdir() if not path.name.startswith("lfm3"))
CONVERTIBLE = [TRAINED, *(path for path in TORTURE if path.name not in NOT_IN_GGUF)]
PROMPT = [1, 2, 3, 5, 8, 13]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 40}  # whole blocks of 32 and of 256
RAW = {"lfm2": raw_config(**WIDE), "lfm2_moe": raw_mixture(**WIDE, moe_intermediate_size=256)}
CONFIG = parse_config(RAW["lfm2"], "config.json")


def write_model(path: Path, tensors: Mapping[str, Tensor], config: ModelConfig = CONFIG) -> Path:
    path.write_bytes(gguf_bytes(model_keys(config), tensors))
    return path


def same_numbers(directory: Path, path: Path, dtype: str) -> Path:
    """A checkpoint's as GGUF; BF16 only where that rounds nothing."""
    config = load_config(directory)
    tensors = open_checkpoint(directory, config)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        values = widen(tensors[name].values, tensors[name].dtype)
        is_short = not np.any(values.view(np.uint32) & 0xFFFF)
        kind, _, content = stored(values, "BF16" if dtype == "BF16" and is_short and len(shape) == 2 else "F32")
        return Tensor(kind, shape, content)

    return write_model(path, model_tensors(config, made), config)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("directory", CONVERTIBLE, ids=lambda path: path.name)
def test_the_same_numbers_give_the_same_bits(directory: Path, dtype: str, tmp_path: Path):
    expected, actual = lfm2np.load(directory), lfm2np.load(same_numbers(directory, tmp_path / "x.gguf", dtype))
    # Of several ids that end a sequence GGUF tells the first.
    assert actual.config == replace(expected.config, eos_token_ids=expected.config.eos_token_ids[:1])
    prompt = [token % actual.config.vocab_size for token in PROMPT]
    assert actual.logits(prompt).tobytes() == expected.logits(prompt).tobytes()


@pytest.mark.rounding
@pytest.mark.parametrize(("dtype", "kind"), [("Q6_K", "lfm2"), ("MXFP4", "lfm2_moe")])  # of which float32 loses nothing
def test_quantised_weights_are_float32_weights_of_the_same_values(dtype: str, kind: str, tmp_path: Path):
    config = parse_config(RAW[kind], "config.json")
    path = write_model(tmp_path / "x.gguf", quantised_tensors(config, dtype), config)
    tensors = {}
    for name, tensor in read_tensors(path, read_config(path)).items():
        tensors[name] = stored(widen(tensor.values, tensor.dtype).astype(np.float32), "F32")
    (tmp_path / "config.json").write_text(json.dumps(RAW[kind]))
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    for numerics in NAMES:
        actual, expected = lfm2np.load(path, numerics), lfm2np.load(tmp_path, numerics)
        assert actual.logits(PROMPT).tobytes() == expected.logits(PROMPT).tobytes(), numerics


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", ["Q4_0", "Q5_1", "Q4_K", "IQ4_XS"])
def test_a_quantised_model_is_the_float64_one_nearly_and_streamed_exactly(dtype: str, tmp_path: Path):
    path = write_model(tmp_path / "x.gguf", quantised_tensors(CONFIG, dtype, seed=3))
    model = lfm2np.load(path)
    logits, wide = model.logits(PROMPT), lfm2np.load(path, "float64").logits(PROMPT)
    assert np.isfinite(logits).all() and np.abs(logits - wide).max() < 1e-4 * np.abs(wide).max()
    assert lfm2np.load(path, weights="streamed").logits(PROMPT).tobytes() == logits.tobytes()
    completion = model.generate(PROMPT, max_tokens=3)
    assert len(completion.token_ids) == 3 and completion.text is None


@pytest.mark.parametrize("dtype", QUANTISED)
def test_the_grids_of_a_product_hold_every_bit_of_its_weights(dtype: str, tmp_path: Path):
    """The slices of a prepared weight add up to it, by fractions, whatever its scales are."""
    path = write_model(tmp_path / "x.gguf", quantised_tensors(CONFIG, dtype, seed=4, exponents=(1, 12)))
    tensors = read_tensors(path, CONFIG)
    for tensor in tensors.values():
        assert not any(array.flags.owndata or array.flags.writeable for array in tensor.arrays), "read when needed"
    for names in list(matrix_parts(CONFIG))[:3]:
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
    tensors = quantised_tensors(CONFIG, "Q4_K", seed=5)
    values = random_rows("Q6_K", (128, 256), 6, (8, 11))
    tensors["blk.1.attn_v.weight"] = Tensor("Q6_K", (128, 256), values.tobytes())
    tensors["blk.1.attn_k.weight"] = Tensor("F32", (128, 256), np.ones((128, 256), "<f4").tobytes())
    path = write_model(tmp_path / "x.gguf", tensors)
    stored_tensors = read_tensors(path, CONFIG)
    names = tuple(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")
    weight = joined(stored_tensors, names)
    assert weight.dtype == np.float64
    assert np.array_equal(weight[384:], values_of(values, "Q6_K")) and np.all(weight[256:384] == 1.0)
    rows = stored_rows(stored_tensors, names)
    assert rows.shape == weight.shape and rows.dtype == np.float64
    for piece in (slice(0, 10), slice(250, 400), slice(260, 270), slice(500, 512)):
        assert np.array_equal(rows[piece], weight[piece]) and rows[piece].dtype == np.float64
    assert lfm2np.load(path).logits(PROMPT).tobytes() == lfm2np.load(path, weights="streamed").logits(PROMPT).tobytes()


def test_the_embedding_is_rounded_to_float32_once_and_to_no_less():
    """As activations of exact arithmetic are; the head, of the same tensor, keeps every bit."""
    wide = values_of(random_rows("Q4_K", (4, 256), 7), "Q4_K")
    embedded = exact.embed(wide)
    assert embedded.dtype == np.float32 and np.array_equal(embedded, wide.astype(np.float32))
    assert not np.array_equal(embedded, wide)


@pytest.mark.parametrize("dtype", ["F32", "Q4_K"])
def test_queries_keys_and_values_may_be_one_tensor(dtype: str, tmp_path: Path):
    """As the converter's --fuse-qkv writes them."""
    tensors = quantised_tensors(CONFIG, dtype)
    expected = lfm2np.load(write_model(tmp_path / "x.gguf", tensors)).logits(PROMPT)
    parts = [tensors.pop(f"blk.1.attn_{part}.weight") for part in "qkv"]
    rows = sum(tensor.shape[0] for tensor in parts)
    fused = Tensor(dtype, (rows, 256), b"".join(tensor.content for tensor in parts))
    path = write_model(tmp_path / "x.gguf", tensors | {"blk.1.attn_qkv.weight": fused})
    assert lfm2np.load(path).logits(PROMPT).tobytes() == expected.tobytes()
    short = Tensor(dtype, (rows - 1, 256), fused.content[: -len(fused.content) // rows])
    for changes, named in (
        (
            {"blk.1.attn_qkv.weight": short},
            rf"blk\.1\.attn_qkv\.weight: shape \({rows - 1}, 256\), expected ",
        ),
        (
            {"blk.1.attn_qkv.weight": fused, "blk.1.attn_q.weight": parts[0]},
            r"missing 2 of the .* blk\.1\.attn_k\.",
        ),
    ):
        with pytest.raises(CheckpointError, match=named):
            lfm2np.load(write_model(tmp_path / "x.gguf", tensors | changes))
