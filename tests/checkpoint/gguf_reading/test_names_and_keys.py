"""Keys and names of a GGUF file: what is missing, in excess or of another kind is told by the file's own names."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blocks_drawn import quantised_tensors
from builders import raw_config, raw_mixture
from gguf_file import ARRAY, BOOL, F32, I32, STRING, U32, Key, Tensor, gguf_bytes, model_keys

import lfm2np
from lfm2np.checkpoint.config_json import parse_config
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.gguf.gguf_config import KEYS
from lfm2np.checkpoint.gguf.names import place_of
from lfm2np.commands.cli import main
from lfm2np.errors import CheckpointError, ConfigError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import expected_tensors, layout_of

DENSE = parse_config(raw_config(hidden_size=64, intermediate_size=96), "config.json")
MIXTURE = parse_config(raw_mixture(hidden_size=64, intermediate_size=96, moe_intermediate_size=32), "config.json")
either = pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["lfm2", "lfm2moe"])
HEADS, EPSILON, KEY_LENGTH = "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length"
VALUE_LENGTH, BOS, ARCHITECTURE = "attention.value_length", "tokenizer.ggml.bos_token_id", "general.architecture"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.gguf"


def config_with(path: Path, config: ModelConfig, changes: dict[str, Key | None]) -> ModelConfig:
    """Of a file whose keys are changed, those of the architecture without its prefix; None takes a key out."""
    prefix = "lfm2" if config.mixture is None else "lfm2moe"
    full = {
        name if name.split(".")[0] in ("general", "tokenizer", "quantize", "lfm3") else f"{prefix}.{name}": key
        for name, key in changes.items()
    }
    keys = {name: key for name, key in (model_keys(config) | full).items() if key is not None}
    path.write_bytes(gguf_bytes(keys, {}))
    return read_config(path)


# --- keys


@either
def test_the_keys_of_a_converted_model_give_its_config(path: Path, config: ModelConfig):
    path.write_bytes(gguf_bytes(model_keys(config), {}))
    assert read_config(path) == config
    untied = {"output.weight": Tensor("F32", (1,), bytes(4))}
    path.write_bytes(gguf_bytes(model_keys(config), untied))
    assert read_config(path) == replace(config, tie_word_embeddings=False)


NEXT = np.nextafter(np.float32(1e-5), np.float32(1))
TAKEN: list[tuple[ModelConfig, dict[str, Key | None], dict[str, object]]] = [
    # whose keys, what is changed, and what is then other than it was; float32 are their shortest decimals
    *((DENSE, {EPSILON: (F32, eps)}, {"norm_eps": eps}) for eps in (1e-5, 1e-6, 2.5e-5, 0.5)),
    (DENSE, {EPSILON: (F32, NEXT)}, {"norm_eps": float(str(NEXT))}),
    (DENSE, {"rope.freq_base": (F32, 1e4)}, {"rope_theta": 1e4}),
    (DENSE, {HEADS: (U32, 2)}, {"layer_types": ("full_attention", "full_attention")}),
    (DENSE, {HEADS: (ARRAY, U32, [0, 0])}, {"layer_types": ("conv", "conv"), "num_key_value_heads": 4}),
    (DENSE, {KEY_LENGTH: None}, {}),
    (DENSE, {KEY_LENGTH: (U32, 8), VALUE_LENGTH: (U32, 8)}, {"head_dim": 8}),
    (DENSE, {"tokenizer.ggml.eos_token_id": None}, {"eos_token_ids": ()}),
    (DENSE, {"attention.causal": (BOOL, True), "rope.scaling.type": (STRING, "none"), "general.x": (U32, 1)}, {}),
    (DENSE, {"quantize.imatrix.file": (STRING, "x")}, {}),  # of llama-quantize
    (MIXTURE, {"expert_weights_scale": (F32, 1.0), "rope.dimension_count": (U32, 16)}, {}),
]


@pytest.mark.parametrize(("config", "changes", "meant"), TAKEN)
def test_what_a_key_says_is_taken(path: Path, config: ModelConfig, changes: dict, meant: dict):
    assert config_with(path, config, changes) == replace(config, **meant)


@either
def test_every_key_that_a_model_needs_is_missed(path: Path, config: ModelConfig):
    optional = {KEY_LENGTH, VALUE_LENGTH, "rope.dimension_count"}
    prefix = "lfm2" if config.mixture is None else "lfm2moe"
    ours = [name.removeprefix(f"{prefix}.") for name in model_keys(config) if name.startswith(f"{prefix}.")]
    needed = [name for name in ours if name not in optional]
    assert len(needed) == (10 if config.mixture is None else 15)
    for name in needed:
        with pytest.raises(ConfigError, match=f"^{path}: {prefix}.{name}: absent, expected a key of type "):
            config_with(path, config, {name: None})


WRONG_KEYS: list[tuple[ModelConfig, str, Key, str]] = [
    # whose keys, the key that is changed, to what, and what is said of it
    (DENSE, "block_count", (U32, 0), "0, expected an integer from 1 to 1024"),
    (DENSE, "block_count", (10, 2), "2 (uint64), expected a uint32"),
    (DENSE, "vocab_size", (U32, 2**32 - 1), "4294967295, expected an integer from 1 to"),
    (DENSE, "shortconv.l_cache", (BOOL, True), "True (bool), expected a uint32"),
    (DENSE, "rope.freq_base", (12, 1e6), "1000000.0 (float64), expected a float32"),
    (DENSE, "rope.freq_base", (F32, float("nan")), "nan, expected a number from 1"),
    (DENSE, HEADS, (ARRAY, I32, [0]), "[0] (array of int32), expected"),
    (DENSE, HEADS, (ARRAY, I32, [0, -2]), "[0, -2] (array of int32), expected"),
    (DENSE, HEADS, (ARRAY, F32, [0, 2]), "[0.0, 2.0] (array of float32), expected"),
    (DENSE, HEADS, (ARRAY, I32, [1, 2]), "[1, 2] (array of int32), expected"),
    (DENSE, VALUE_LENGTH, (U32, 8), "8 (uint32), expected 16, the size of a head"),
    (DENSE, "rope.dimension_count", (U32, 8), "8 (uint32), expected 16, the size of a head"),
    (DENSE, "attention.causal", (BOOL, False), "False (bool), expected True or no such key"),
    (DENSE, "attention.causal", (U32, 1), "1 (uint32), expected True or no such key"),
    (DENSE, "attention.sliding_window", (U32, 256), "256 (uint32), expected 0 or no"),
    (DENSE, "rope.scaling.type", (STRING, "yarn"), "'yarn' (string), expected 'none' or no"),
    (DENSE, "expert_count", (U32, 4), "4 (uint32), expected a key that lfm2 is known to have"),
    (DENSE, "pooling_type", (U32, 1), "1 (uint32), expected a key that lfm2 is known to have"),
    (DENSE, BOS, (STRING, "1"), "'1' (string), expected a uint32"),
    (DENSE, ARCHITECTURE, (STRING, "llama"), "'llama', expected lfm2 or lfm2moe"),
    (DENSE, ARCHITECTURE, (ARRAY, STRING, ["lfm2"]), "['lfm2'], expected lfm2 or lfm2moe"),
    (MIXTURE, "expert_gating_func", (U32, 1), "1 (uint32), expected 2 or no such key"),
    (MIXTURE, "expert_weights_scale", (F32, 2.5), "2.5 (float32), expected 1.0 or no"),
    (MIXTURE, "expert_weights_norm", (BOOL, False), "False (bool), expected True or"),
    (MIXTURE, "expert_used_count", (U32, 9), "9, expected at most lfm2moe.expert_count=4"),
]


@pytest.mark.parametrize(("config", "key", "value", "told"), WRONG_KEYS)
def test_a_key_of_another_kind_or_value_is_told(path: Path, config: ModelConfig, key: str, value: Key, told: str):
    name = key if key in (BOS, ARCHITECTURE) else f"{'lfm2' if config is DENSE else 'lfm2moe'}.{key}"
    with pytest.raises(ConfigError, match=rf"^{path}: {name}: {re.escape(told)}.*\Z"):
        config_with(path, config, {key: value})


def test_sizes_and_ids_that_do_not_fit_each_other_are_told_by_the_files_keys(path: Path):
    with pytest.raises(ConfigError, match=r"lfm2\.embedding_length: 64, expected a multiple of lfm2\.attention\.head"):
        config_with(path, DENSE, {KEY_LENGTH: None, "attention.head_count": (U32, 3)})
    with pytest.raises(ConfigError, match="bos_token_id: 300, expected"):
        config_with(path, DENSE, {BOS: (U32, 300)})


def test_an_lfm3_is_refused_in_one_line_that_says_what_to_load(path: Path, capsys: pytest.CaptureFixture[str]):
    """Whatever keys it has: no version of llama.cpp at hand knows them, so any reading would be a guess."""
    text = "architecture 'lfm3': GGUF's keys for it are not known to this version; load the safetensors"
    with pytest.raises(ConfigError, match=f"^{path}: {text}$"):
        config_with(path, DENSE, {ARCHITECTURE: (STRING, "lfm3"), "lfm3.attention.sliding_window": (U32, 256)})
    assert main(["info", "--model", str(path)]) == 3  # no checkpoint that is implemented
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


# --- names


# Written out after src/llama-arch.cpp, as tests that write files take names from the code that reads them.
BY_LLAMA_CPP = {
    "operator_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "conv.conv.weight": "shortconv.conv.weight",
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
    **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    "self_attn.out_proj.weight": "attn_output.weight",
    **{f"self_attn.{part}_layernorm.weight": f"attn_{part}_norm.weight" for part in "qk"},
    "feed_forward.w1.weight": "ffn_gate.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
    "feed_forward.w3.weight": "ffn_up.weight",
    "feed_forward.gate.weight": "ffn_gate_inp.weight",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    **{f"feed_forward.experts.{e}.w1.weight": "ffn_gate_exps.weight" for e in range(4)},
    **{f"feed_forward.experts.{e}.w2.weight": "ffn_down_exps.weight" for e in range(4)},
    **{f"feed_forward.experts.{e}.w3.weight": "ffn_up_exps.weight" for e in range(4)},
}


def test_names_are_llama_cpp_s():
    names = {name.split(".", 3)[3] for config in (DENSE, MIXTURE) for name in layout_of(config) if ".layers." in name}
    assert {name: place_of(f"model.layers.1.{name}").name for name in names} == {
        ours: f"blk.1.{theirs}" for ours, theirs in BY_LLAMA_CPP.items()
    }
    top = {"model.embed_tokens": "token_embd", "model.embedding_norm": "token_embd_norm", "lm_head": "output"}
    assert [place_of(f"{name}.weight").name for name in top] == [f"{theirs}.weight" for theirs in top.values()]


def test_every_dimension_of_the_layout_is_told_by_a_key():
    origins = {origin for config in (DENSE, MIXTURE) for dims in layout_of(config).values() for _, origin in dims}
    words = {word for origin in origins for word in origin.replace("3*", "").split("*")} - {"depthwise"}
    assert words <= KEYS.keys()


@either
def test_experts_and_taps_come_as_the_network_wants_them(path: Path, config: ModelConfig):
    tensors = quantised_tensors(config, "Q8_0", seed=1)
    path.write_bytes(gguf_bytes(model_keys(config), tensors))
    stored_tensors = read_tensors(path, config)
    assert {name: value.shape for name, value in stored_tensors.items()} == expected_tensors(config)
    for name, value in stored_tensors.items():
        place, stored = place_of(name), tensors[place_of(name).name]
        size = len(stored.content) // (1 if place.expert is None else stored.shape[0])
        begin = 0 if place.expert is None else place.expert * size
        assert b"".join(array.tobytes() for array in value.arrays) == stored.content[begin : begin + size], name
        assert value.name == name and value.source.startswith(f"{path}: {place.name}")


def tensors_error(path: Path, config: ModelConfig, tensors: dict[str, Tensor]) -> str:
    path.write_bytes(gguf_bytes(model_keys(config), tensors))
    with pytest.raises(CheckpointError) as caught:
        read_tensors(path, config)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text
    return text.removeprefix(f"{path}: ")


@either
def test_each_tensor_that_is_missing_is_told(path: Path, config: ModelConfig):
    whole = quantised_tensors(config, "F32")
    for name in whole:
        text = tensors_error(path, config, {key: value for key, value in whole.items() if key != name})
        assert text.startswith(f"missing 1 of the {len(whole)} tensors: {name} (the first of shape (")


WRONG_TENSORS = [  # name, type, shape, and what is said of it
    (DENSE, "token_embd.weight", (301, 64), "(300, 64) from lfm2.vocab_size=300"),
    (DENSE, "blk.0.shortconv.in_proj.weight", (64, 64), "(192, 64) from 3*lfm2.embedding_length=192"),
    (DENSE, "blk.0.shortconv.conv.weight", (64, 1, 3), "(64, 3) from lfm2.embedding_length=64, lfm2.shortconv.l_"),
    (DENSE, "blk.1.attn_k.weight", (64, 64), "(32, 64) from lfm2.attention.head_count_kv*lfm2.attention.key_len"),
    (DENSE, "blk.1.attn_q_norm.weight", (64,), "(16,) from lfm2.attention.key_length=16"),
    (DENSE, "blk.1.ffn_down.weight", (64, 64), "(64, 96) from lfm2.feed_forward_length=96"),
    (MIXTURE, "blk.1.ffn_gate_exps.weight", (4, 96, 64), "(4, 32, 64) from lfm2moe.expert_feed_forward_length=32"),
    (MIXTURE, "blk.2.ffn_down_exps.weight", (5, 64, 32), "(4, 64, 32) from lfm2moe.expert_count=4"),
    (DENSE, "blk.0.attn_q.weight", (64, 64), "lfm2.block_count=2, lfm2.attention.head_count_kv[0]=conv"),
    (DENSE, "blk.2.attn_norm.weight", (64,), "lfm2.block_count=2"),
    (MIXTURE, "blk.1.ffn_gate.weight", (64, 64), "[1]=full_attention, lfm2moe.leading_dense_block_count=1"),
]


@pytest.mark.parametrize(("config", "name", "shape", "told"), WRONG_TENSORS)
def test_a_tensor_that_should_not_be_or_not_so_is_told_with_the_keys_that_say_so(
    path: Path, config: ModelConfig, name: str, shape: tuple[int, ...], told: str
):
    whole, wrong = quantised_tensors(config, "F32"), Tensor("F32", shape, bytes(4 * int(np.prod(shape))))
    text = tensors_error(path, config, whole | {name: wrong})
    expected = f"{name}: shape {shape}, expected {told}"
    if name not in whole:
        expected = f"1 unexpected beside the {len(whole)} tensors: {name} (the first of shape {shape}; lfm2"
    assert text.startswith(expected) and told in text


def test_only_matrices_may_be_quantised(path: Path):
    blocks = Tensor("Q8_0", (64,), bytes(68))
    text = tensors_error(path, DENSE, quantised_tensors(DENSE, "F32") | {"blk.0.attn_norm.weight": blocks})
    assert text == "blk.0.attn_norm.weight: Q8_0, expected BF16, F16, F32 of what is no matrix"


@pytest.mark.parametrize(
    ("config", "name", "ours"),
    [
        (DENSE, "blk.1.ffn_up.weight", "model.layers.1.feed_forward.w3.weight"),
        (MIXTURE, "blk.2.ffn_up_exps.weight", "model.layers.2.feed_forward.experts.3.w3.weight"),
        (MIXTURE, "token_embd.weight", "model.embed_tokens.weight"),
    ],
)
def test_a_weight_that_is_no_number_is_told_by_both_names(path: Path, config: ModelConfig, name: str, ours: str):
    tensors = quantised_tensors(config, "Q8_0")
    content = bytearray(tensors[name].content)
    content[-34:-32] = struct.pack("<e", float("inf"))
    path.write_bytes(gguf_bytes(model_keys(config), tensors | {name: replace(tensors[name], content=bytes(content))}))
    with pytest.raises(CheckpointError) as caught:
        lfm2np.load(path)
    expert, row = "[3]" if "exps" in name else "", tensors[name].shape[-2] - 1
    assert str(caught.value) == (
        f"{path}: {name}{expert}: {ours}: Q8_0 with the scale inf in block 1 of row {row}, expected finite numbers "
        "that float32 holds"
    )
