"""Keys and names of a GGUF file: what is missing, in excess or of another kind is told by the file's own names."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import raw_config, raw_mixture
from gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U32,
    Key,
    Tensor,
    gguf_bytes,
    model_keys,
    quantised_tensors,
)

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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.gguf"


def config_with(path: Path, config: ModelConfig, without: str = "", **changes: Key) -> ModelConfig:
    """Of a file whose keys are changed; `_` stands for a dot, `__` for itself."""
    dotted = {name.replace("__", "\0").replace("_", ".").replace("\0", "_"): value for name, value in changes.items()}
    keys = {name: value for name, value in (model_keys(config) | dotted).items() if name != without}
    path.write_bytes(gguf_bytes(keys, {}))
    return read_config(path)


def key_error(path: Path, config: ModelConfig, without: str = "", **changes: Key) -> str:
    with pytest.raises(ConfigError) as caught:
        config_with(path, config, without, **changes)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text
    return text.removeprefix(f"{path}: ")


# --- keys


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["lfm2", "lfm2moe"])
def test_the_keys_of_a_converted_model_give_its_config(path: Path, config: ModelConfig):
    path.write_bytes(gguf_bytes(model_keys(config), {}))
    assert read_config(path) == config
    untied = {"output.weight": Tensor("F32", (1,), bytes(4))}
    path.write_bytes(gguf_bytes(model_keys(config), untied))
    assert read_config(path) == replace(config, tie_word_embeddings=False)


def test_float32_keys_are_the_shortest_decimals_that_round_to_them(path: Path):
    for eps in (1e-5, 1e-6, 2.5e-5, 0.5):
        config = config_with(path, DENSE, lfm2_attention_layer__norm__rms__epsilon=(F32, eps))
        assert config.norm_eps == eps
    config = config_with(path, DENSE, lfm2_attention_layer__norm__rms__epsilon=(F32, np.nextafter(np.float32(1e-5), 1)))
    assert config.norm_eps != 1e-5 and np.float32(config.norm_eps) == np.nextafter(np.float32(1e-5), np.float32(1))
    assert config_with(path, DENSE, lfm2_rope_freq__base=(F32, 1e4)).rope_theta == 1e4


def test_one_number_of_key_heads_is_that_of_every_layer(path: Path):
    config = config_with(path, DENSE, lfm2_attention_head__count__kv=(U32, 2))
    assert config.layer_types == ("full_attention", "full_attention") and config.num_key_value_heads == 2
    assert config_with(path, DENSE, lfm2_attention_head__count__kv=(ARRAY, U32, [0, 0])).layer_types == ("conv", "conv")


def test_the_size_of_a_head_is_a_key_or_what_the_heads_leave(path: Path):
    assert config_with(path, DENSE, "lfm2.attention.key_length").head_dim == 16
    changed = {"lfm2_attention_key__length": (U32, 8), "lfm2_attention_value__length": (U32, 8)}
    assert config_with(path, DENSE, **changed).head_dim == 8
    text = key_error(path, DENSE, lfm2_attention_value__length=(U32, 8))
    assert text == "lfm2.attention.value_length: 8 (uint32), expected 16, the size of a head"
    text = key_error(path, DENSE, lfm2_rope_dimension__count=(U32, 8))
    assert text == "lfm2.rope.dimension_count: 8 (uint32), expected 16, the size of a head"
    text = key_error(path, DENSE, "lfm2.attention.key_length", lfm2_attention_head__count=(U32, 3))
    assert text.startswith("lfm2.embedding_length: 64, expected a multiple of lfm2.attention.head_count=3")


def test_ids_of_tokens_may_be_absent_and_are_checked(path: Path):
    config = config_with(path, DENSE, "tokenizer.ggml.eos_token_id")
    assert config.eos_token_ids == () and config.bos_token_id == 1
    text = key_error(path, DENSE, tokenizer_ggml_bos__token__id=(STRING, "1"))
    assert text == "tokenizer.ggml.bos_token_id: '1' (string), expected a uint32"
    assert "bos_token_id: 300, expected" in key_error(path, DENSE, tokenizer_ggml_bos__token__id=(U32, 300))


@pytest.mark.parametrize("command", ["info", "info --digest"])
def test_an_lfm3_is_refused_in_one_line_that_says_what_to_load(
    path: Path, command: str, capsys: pytest.CaptureFixture[str]
):
    """Whatever keys it has: no version of llama.cpp at hand knows them, so any reading would be a guess."""
    text = key_error(path, DENSE, general_architecture=(STRING, "lfm3"), lfm3_attention_sliding__window=(U32, 256))
    assert text == "architecture 'lfm3': GGUF's keys for it are not known to this version; load the safetensors"
    assert main([*command.split(), "--model", str(path)]) == 3  # no checkpoint that is implemented
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["lfm2", "lfm2moe"])
def test_every_key_that_a_model_needs_is_missed(path: Path, config: ModelConfig):
    optional = {"attention.key_length", "attention.value_length", "rope.dimension_count"}
    prefix = "lfm2" if config.mixture is None else "lfm2moe"
    needed = [
        name for name in model_keys(config) if name.startswith(f"{prefix}.") and name[len(prefix) + 1 :] not in optional
    ]
    assert len(needed) == (10 if config.mixture is None else 15)
    for name in needed:
        text = key_error(path, config, name)
        assert text.startswith(f"{name}: absent, expected a key of type ")


HEADS, EPSILON = "attention.head_count_kv", "attention.layer_norm_rms_epsilon"
WRONG_KEYS: list[tuple[ModelConfig, str, Key, str]] = [
    # whose keys, the key that is changed, to what, and what is said of it
    (DENSE, "block_count", (U32, 0), "0, expected an integer from 1 to 1024"),
    (DENSE, "block_count", (10, 2), "2 (uint64), expected a uint32"),
    (DENSE, "block_count", (STRING, "2"), "'2' (string), expected a uint32"),
    (DENSE, "vocab_size", (U32, 2**32 - 1), "4294967295, expected an integer from 1 to"),
    (DENSE, "shortconv.l_cache", (BOOL, True), "True (bool), expected a uint32"),
    (DENSE, "rope.freq_base", (12, 1e6), "1000000.0 (float64), expected a float32"),
    (DENSE, "rope.freq_base", (F32, float("nan")), "nan, expected a number from 1"),
    (DENSE, EPSILON, (F32, -1.0), "-1.0, expected"),
    (DENSE, HEADS, (ARRAY, I32, [0]), "[0] (array of int32), expected"),
    (DENSE, HEADS, (ARRAY, I32, [0, -2]), "[0, -2] (array of int32), expected"),
    (DENSE, HEADS, (ARRAY, F32, [0, 2]), "[0.0, 2.0] (array of float32), expected"),
    (DENSE, HEADS, (ARRAY, I32, [1, 2]), "[1, 2] (array of int32), expected"),
    (DENSE, "attention.causal", (BOOL, False), "False (bool), expected True or no such key"),
    (DENSE, "attention.causal", (U32, 1), "1 (uint32), expected True or no such key"),
    (DENSE, "attention.sliding_window", (U32, 256), "256 (uint32), expected 0 or no"),
    (DENSE, "rope.scaling.type", (STRING, "yarn"), "'yarn' (string), expected 'none' or no"),
    (DENSE, "expert_count", (U32, 4), "4 (uint32), expected a key that lfm2 is known to have"),
    (DENSE, "pooling_type", (U32, 1), "1 (uint32), expected a key that lfm2 is known to have"),
    (MIXTURE, "expert_gating_func", (U32, 1), "1 (uint32), expected 2 or no such key"),
    (MIXTURE, "expert_weights_scale", (F32, 2.5), "2.5 (float32), expected 1.0 or no"),
    (MIXTURE, "expert_weights_norm", (BOOL, False), "False (bool), expected True or"),
    (MIXTURE, "expert_used_count", (U32, 9), "9, expected at most lfm2moe.expert_count=4"),
    (MIXTURE, "expert_count", (U32, 0), "0, expected an integer from 1 to 1024"),
]


@pytest.mark.parametrize(("config", "key", "value", "told"), WRONG_KEYS)
def test_a_key_of_another_kind_or_value_is_told(path: Path, config: ModelConfig, key: str, value: Key, told: str):
    name = f"{'lfm2' if config is DENSE else 'lfm2moe'}.{key}"
    path.write_bytes(gguf_bytes(model_keys(config) | {name: value}, {}))
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}: {name}: {told}") and "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [(STRING, "llama"), (ARRAY, STRING, ["lfm2"])])
def test_another_architecture_is_told(path: Path, value: Key):
    text = key_error(path, DENSE, general_architecture=value)
    assert text == f"general.architecture: {value[-1]!r}, expected lfm2 or lfm2moe"


def test_keys_that_change_nothing_are_taken(path: Path):
    same = {"lfm2_attention_causal": (BOOL, True), "lfm2_rope_scaling_type": (STRING, "none")}
    assert config_with(path, DENSE, **same, general_name=(STRING, "x"), quantize_imatrix_file=(STRING, "y")) == DENSE
    scale = {"lfm2moe_expert__weights__scale": (F32, 1.0), "lfm2moe_rope_dimension__count": (U32, 16)}
    assert config_with(path, MIXTURE, **scale) == MIXTURE


# --- names


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["lfm2", "lfm2moe"])
def test_every_tensor_has_a_place_of_its_own(config: ModelConfig):
    places = [place_of(name) for name in layout_of(config)]
    assert len(set(places)) == len(places)


def test_names_are_llama_cpp_s():
    """Written out after src/llama-arch.cpp, as tests that write files take names from the code that reads them."""
    assert set(quantised_tensors(DENSE, "F32")) == {
        *("token_embd.weight", "token_embd_norm.weight"),
        *(f"blk.0.{name}.weight" for name in ("attn_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")),
        *(f"blk.0.shortconv.{name}.weight" for name in ("conv", "in_proj", "out_proj")),
        *(f"blk.1.{name}.weight" for name in ("attn_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")),
        *(f"blk.1.attn_{name}.weight" for name in ("q", "k", "v", "output", "q_norm", "k_norm")),
    }
    of_experts = {name for name in quantised_tensors(MIXTURE, "F32") if name.startswith("blk.2.")}
    assert of_experts == {
        *(f"blk.2.{name}.weight" for name in ("attn_norm", "ffn_norm", "ffn_gate_inp")),
        *(f"blk.2.ffn_{name}_exps.weight" for name in ("gate", "up", "down")),
        *(f"blk.2.shortconv.{name}.weight" for name in ("conv", "in_proj", "out_proj")),
        "blk.2.exp_probs_b.bias",
    }
    actual = {name: place_of(f"model.layers.1.{name}.weight").name for name in OURS}
    assert actual == {name: f"blk.1.{theirs}.weight" for name, theirs in OURS.items()}


OURS = {  # of those that have one shape, and could change places unseen
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "conv.out_proj": "shortconv.out_proj",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.experts.0.w1": "ffn_gate_exps",
    "feed_forward.experts.0.w3": "ffn_up_exps",
}


def test_every_dimension_of_the_layout_is_told_by_a_key():
    origins = {origin for config in (DENSE, MIXTURE) for dims in layout_of(config).values() for _, origin in dims}
    words = {word for origin in origins for word in origin.replace("3*", "").split("*")} - {"depthwise"}
    assert words <= KEYS.keys()


def tensors_error(path: Path, config: ModelConfig, tensors: dict[str, Tensor]) -> str:
    path.write_bytes(gguf_bytes(model_keys(config), tensors))
    with pytest.raises(CheckpointError) as caught:
        read_tensors(path, config)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text
    return text.removeprefix(f"{path}: ")


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["lfm2", "lfm2moe"])
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


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["lfm2", "lfm2moe"])
def test_each_tensor_that_is_missing_is_told(path: Path, config: ModelConfig):
    whole = quantised_tensors(config, "F32")
    for name in whole:
        text = tensors_error(path, config, {key: value for key, value in whole.items() if key != name})
        assert text.startswith(f"missing 1 of the {len(whole)} tensors: {name} (the first of shape (")


def test_what_is_unexpected_is_told_with_the_keys_that_say_so(path: Path):
    whole, more = quantised_tensors(DENSE, "F32"), Tensor("F32", (64, 64), bytes(4 * 64 * 64))
    text = tensors_error(path, DENSE, {**whole, "blk.0.attn_q.weight": more})
    assert text.startswith("1 unexpected beside the 21 tensors: blk.0.attn_q.weight (the first of shape (64, 64); lfm2")
    assert "lfm2.block_count=2, lfm2.attention.head_count_kv[0]=conv" in text
    text = tensors_error(path, DENSE, {**whole, "blk.2.attn_norm.weight": more, "dense_2.weight": more})
    assert text.startswith("2 unexpected beside the 21 tensors: blk.2.attn_norm.weight, dense_2.weight (")
    sparse = quantised_tensors(MIXTURE, "F32")
    text = tensors_error(path, MIXTURE, {**sparse, "blk.1.ffn_gate.weight": more})
    assert "lfm2moe.attention.head_count_kv[1]=full_attention, lfm2moe.leading_dense_block_count=1" in text


@pytest.mark.parametrize(
    ("config", "name", "shape", "told"),
    [
        (DENSE, "token_embd.weight", (301, 64), "(300, 64) from lfm2.vocab_size=300"),
        (DENSE, "blk.0.shortconv.in_proj.weight", (64, 64), "(192, 64) from 3*lfm2.embedding_length=192"),
        (DENSE, "blk.0.shortconv.conv.weight", (64, 4), "(64, 3) from lfm2.shortconv.l_cache=3"),
        (DENSE, "blk.0.shortconv.conv.weight", (64, 1, 3), "(64, 3) from lfm2.embedding_length=64, lfm2.shortconv.l_"),
        (
            DENSE,
            "blk.1.attn_k.weight",
            (64, 64),
            "(32, 64) from lfm2.attention.head_count_kv*lfm2.attention.key_length=32",
        ),
        (DENSE, "blk.1.attn_q_norm.weight", (64,), "(16,) from lfm2.attention.key_length=16"),
        (DENSE, "blk.1.ffn_down.weight", (64, 64), "(64, 96) from lfm2.feed_forward_length=96"),
        (
            MIXTURE,
            "blk.1.ffn_gate_exps.weight",
            (4, 96, 64),
            "(4, 32, 64) from lfm2moe.expert_feed_forward_length=32",
        ),
        (MIXTURE, "blk.2.ffn_down_exps.weight", (5, 64, 32), "(4, 64, 32) from lfm2moe.expert_count=4"),
        (MIXTURE, "blk.1.exp_probs_b.bias", (3,), "(4,) from lfm2moe.expert_count=4"),
    ],
)
def test_a_shape_is_told_with_the_key_that_states_it(
    path: Path, config: ModelConfig, name: str, shape: tuple[int, ...], told: str
):
    content = bytes(4 * int(np.prod(shape)))
    text = tensors_error(path, config, quantised_tensors(config, "F32") | {name: Tensor("F32", shape, content)})
    assert text.startswith(f"{name}: shape {shape}, expected {told}")


def test_only_matrices_may_be_quantised(path: Path):
    blocks = Tensor("Q8_0", (64,), bytes(68))
    text = tensors_error(path, DENSE, quantised_tensors(DENSE, "F32") | {"blk.0.attn_norm.weight": blocks})
    assert text == "blk.0.attn_norm.weight: Q8_0, expected BF16, F16, F32 of what is no matrix"


@pytest.mark.parametrize(
    ("config", "name", "told"),
    [
        (DENSE, "blk.1.ffn_up.weight", "blk.1.ffn_up.weight: model.layers.1.feed_forward.w3.weight"),
        (
            MIXTURE,
            "blk.2.ffn_up_exps.weight",
            "blk.2.ffn_up_exps.weight[3]: model.layers.2.feed_forward.experts.3.w3.weight",
        ),
        (MIXTURE, "token_embd.weight", "token_embd.weight: model.embed_tokens.weight"),
    ],
)
def test_a_weight_that_is_no_number_is_told_by_both_names(path: Path, config: ModelConfig, name: str, told: str):
    tensors = quantised_tensors(config, "Q8_0")
    content = bytearray(tensors[name].content)
    content[-34:-32] = struct.pack("<e", float("inf"))
    path.write_bytes(gguf_bytes(model_keys(config), tensors | {name: replace(tensors[name], content=bytes(content))}))
    with pytest.raises(CheckpointError) as caught:
        lfm2np.load(path)
    row = tensors[name].shape[-2] - 1
    assert str(caught.value) == (
        f"{path}: {told}: Q8_0 with the scale inf in block 1 of row {row}, expected finite numbers that float32 holds"
    )
