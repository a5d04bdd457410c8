"""config.json of LFM2s, dense and sparse: published models, old and new spellings, refusals, keys that nobody reads."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from builders import OLD_350M, raw_config, raw_mixture, tiny_config
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.checkpoint.config_json import IGNORED, READ, load_config, parse_config
from lfm2np.errors import ConfigError, Lfm2npError
from lfm2np.truth.config import MixtureConfig
from lfm2np.truth.layers import expected_tensors, parameter_count
from lfm2np.values import show_json

Raw = Callable[..., dict[str, object]]
FIXTURES = Path(__file__).parents[2] / "fixtures"
SIXTEEN = [2, 5, 8, 10, 12, 14]
THIRTY = [2, 5, 9, 13, 17, 21, 24, 27]
FOURTEEN = [2, 4, 6, 8, 10, 12]
A1B = [2, 6, 10, 14, 18, 21]
DENSE_KEYS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "full_attn_idxs")
DENSE_KEYS += ("block_ff_dim", "block_auto_adjust_ff_dim")
PUBLISHED = [
    # values of these keys, effective width, parameters
    pytest.param((1024, 16, 8, 16, SIXTEEN, 6656, True, 4608, 354_483_968), id="LFM2-350M"),
    pytest.param((1536, 24, 8, 16, SIXTEEN, 10240, True, 6912, 742_489_344), id="LFM2-700M"),
    pytest.param((2048, 32, 8, 16, SIXTEEN, 12288, True, 8192, 1_170_340_608), id="LFM2-1.2B"),
    pytest.param((2048, 32, 8, 30, THIRTY, 10752, False, 10752, 2_569_272_320), id="LFM2-2.6B"),
    pytest.param((1024, 16, 8, 14, FOURTEEN, 2560, False, 2560, 229_693_184), id="LFM2.5-230M"),
]
SPARSE_KEYS = ("num_hidden_layers", "full_attn_idxs", "intermediate_size", "num_experts", "moe_intermediate_size")
SPARSE_KEYS += ("vocab_size", "rope_theta")
PUBLISHED_MIXTURES = [
    # values of these keys, parameters, those of one token
    pytest.param((24, A1B, 7168, 32, 1792, 65536, 1e6, 8_339_929_856, 1_557_740_288), id="LFM2-8B-A1B"),
    pytest.param((24, A1B, 7168, 32, 1792, 128000, 5e6, 8_467_856_128, 1_685_666_560), id="LFM2.5-8B-A1B"),
    pytest.param(
        (40, [*range(2, 40, 4)], 11776, 64, 1536, 65536, 1e6, 23_843_659_008, 2_326_879_488), id="LFM2-24B-A2B"
    ),
]


@pytest.mark.parametrize("published", PUBLISHED)
def test_published_models_have_their_effective_width_and_parameter_count(published: tuple[Any, ...]) -> None:
    *values, width, count = published
    raw = dict(zip(DENSE_KEYS, values, strict=True))
    config = parse_config({"model_type": "lfm2", **raw}, "config.json")
    assert (config.feed_forward_size, config.head_dim, config.vocab_size) == (width, 64, 65536)
    attention = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert attention == raw["full_attn_idxs"]
    assert parameter_count(config) == count


@pytest.mark.parametrize("published", PUBLISHED_MIXTURES)
def test_published_mixtures_have_their_parameter_counts(published: tuple[Any, ...]) -> None:
    *values, count, active = published
    raw = dict(zip(SPARSE_KEYS, values, strict=True))
    config = parse_config({"model_type": "lfm2_moe", **raw}, "config.json")
    assert (config.feed_forward_size, config.rope_theta) == (raw["intermediate_size"], raw["rope_theta"])
    assert (parameter_count(config), parameter_count(config, active=True)) == (count, active)


def test_the_oldest_published_config_loads_with_every_old_spelling() -> None:
    config = parse_config(OLD_350M, "config.json")
    assert (config.feed_forward_size, config.eos_token_ids, config.tie_word_embeddings) == (4608, (7,), True)
    assert (config.rope_theta, config.norm_eps, config.conv_L_cache) == (1e6, 1e-5, 3)
    assert parameter_count(config) == 354_483_968
    untied = parse_config(OLD_350M | {"tie_word_embeddings": False}, "config.json")
    assert parameter_count(untied) == 354_483_968 + config.vocab_size * config.hidden_size


@pytest.mark.parametrize(
    ("raw", "hidden", "head_dim", "width"),
    [
        ({"model_type": "lfm2"}, 2560, 80, 8192),
        ({"model_type": "lfm2_moe", "layer_types": ["full_attention"] * 32}, 2048, 64, 7168),
    ],
)
def test_absent_keys_take_the_defaults_of_transformers(raw: dict, hidden: int, head_dim: int, width: int) -> None:
    config = parse_config(raw, "config.json")
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (65536, hidden, 32)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, head_dim)
    assert config.layer_types == ("full_attention",) * 32
    assert (config.feed_forward_size, config.max_position_embeddings, config.conv_L_cache) == (width, 128_000, 3)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 0)
    assert (config.conv_bias, config.tie_word_embeddings) == (False, True)
    assert (config.rope_theta, config.norm_eps) == (1e6, 1e-5)
    assert config.mixture == (MixtureConfig(32, 4, 1792, 2, True, True, 1.0) if "moe" in raw["model_type"] else None)


ROPE = {"rope_type": "default", "rope_theta": 5e5}
SPELLINGS = [
    ({"block_ff_dim": 40}, "feed_forward_size", 40),
    ({"block_ffn_dim_multiplier": 2.0, "block_multiple_of": 7}, "feed_forward_size", 24),
    ({"block_auto_adjust_ff_dim": True, "block_multiple_of": 7}, "feed_forward_size", 21),
    ({"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.6, "block_multiple_of": 1}, None, 25),
    ({"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": None}, "feed_forward_size", 16),
    ({"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 2, "block_multiple_of": 5}, None, 35),
    ({"layer_types": None, "full_attn_idxs": [0]}, "layer_types", ("full_attention", "conv")),
    ({"layer_types": None, "full_attn_idxs": []}, "layer_types", ("conv", "conv")),
    ({"layer_types": None, "full_attn_idxs": None}, "layer_types", ("full_attention", "full_attention")),
    ({"layer_types": ["conv", "attention"]}, "layer_types", ("conv", "full_attention")),
    ({"full_attn_idxs": [1]}, "layer_types", ("conv", "full_attention")),
    ({"tie_embedding": False, "tie_word_embeddings": True}, "tie_word_embeddings", False),
    ({"tie_word_embeddings": False}, "tie_word_embeddings", False),
    ({"rope_theta": 500000, "theta": 5e5}, "rope_theta", 5e5),
    ({"rope_parameters": ROPE, "rope_theta": 1e4}, "rope_theta", 5e5),
    ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e4}, "rope_theta", 1e4),
    ({"rope_parameters": {"full_attention": ROPE}}, "rope_theta", 5e5),
    ({"rope_parameters": {"full_attention": ROPE, "conv": None}}, "rope_theta", 5e5),
    ({"rope_parameters": {}, "rope_scaling": None}, "rope_theta", 1e6),
    ({"rope_scaling": {"type": "default"}, "rope_theta": 1e4}, "rope_theta", 1e4),
    ({"rope_scaling": {"rope_theta": 1e4}}, "rope_theta", 1e4),
    ({"head_dim": None}, "head_dim", 4),
    ({"head_dim": 6, "hidden_size": 17}, "head_dim", 6),
    ({"eos_token_id": [4, 2, 4]}, "eos_token_ids", (4, 2)),
    ({"eos_token_id": None}, "eos_token_ids", ()),
    ({"bos_token_id": None}, "bos_token_id", None),
    ({"is_causal": True, "is_encoder_decoder": False, "architectures": ["Lfm2ForCausalLM"]}, "hidden_size", 16),
    ({"architectures": ["Lfm2ForCausalLM"], "auto_map": {"AutoModelForCausalLM": "m.LFM2"}}, "hidden_size", 16),
    ({"architectures": ["Lfm2VlForConditionalGeneration"], "auto_map": None}, "hidden_size", 16),
    ({"num_key_value_heads": 4, "num_heads": 4, "conv_dim": 16, "sliding_window": None}, "num_key_value_heads", 4),
    ({"num_experts": 0, "num_local_experts": None}, "mixture", None),
    ({"torch_dtype": "float32", "dtype": "bfloat16", "never_heard_of": [1]}, "hidden_size", 16),
]
OF_MIXTURES = [
    ({"tie_embedding": False}, "tie_word_embeddings", False),
    ({"rope_theta": 5e6, "theta": 5e6}, "rope_theta", 5e6),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000}}, "rope_theta", 5e6),
    ({"layer_types": None, "full_attn_idxs": [1]}, "layer_types", ("conv", "full_attention", "conv")),
    ({"block_ff_dim": 24}, "feed_forward_size", 24),
    ({"block_multiple_of": 256, "block_auto_adjust_ff_dim": False}, "feed_forward_size", 24),
    ({"block_ffn_dim_multiplier": 1.0}, "feed_forward_size", 24),
    ({"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}, "feed_forward_size", 24),
    ({"dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02, "never_heard_of": 1}, "hidden_size", 16),
]
DENSE_OR_NOT = [(raw_config, *row) for row in SPELLINGS] + [(raw_mixture, *row) for row in OF_MIXTURES]


@pytest.mark.parametrize(("raw", "changes", "field", "value"), DENSE_OR_NOT)
def test_old_and_new_spellings_mean_what_transformers_makes_of_them(
    raw: Raw, changes: dict[str, object], field: str | None, value: object
) -> None:
    assert getattr(parse_config(raw(**changes), "config.json"), field or "feed_forward_size") == value
    assert changes.keys() - {"never_heard_of"} <= READ | IGNORED, "no warning of a key that is known"


@pytest.mark.parametrize(("dense", "sparse"), [(0, 3), (1, 2), (3, 0), (7, 0)])
def test_the_first_layers_are_dense(dense: int, sparse: int) -> None:
    config = parse_config(raw_mixture(num_dense_layers=dense), "config.json")
    assert sum(".gate.weight" in name for name in expected_tensors(config)) == sparse
    assert [config.is_sparse(layer) for layer in range(3)] == [layer >= dense for layer in range(3)]


WRONG_VALUES: dict[str, list[object]] = {  # each of these, by its key
    "model_type": ["llama", ["lfm2"]],
    "rope_parameters": [[1]],
    "rope_theta": ["1e6", 0.0, True, math.nan, 10**400],
    "norm_eps": [0.0, math.inf, 1],
    "num_hidden_layers": [10**9, True, 0],
    "hidden_size": ["16", 16.0, None, 10**5000, 2**18],
    "vocab_size": [2**21],
    "intermediate_size": [0],
    "block_ff_dim": [None],
    "block_multiple_of": [0],
    "block_ffn_dim_multiplier": [1e308],
    "block_auto_adjust_ff_dim": [1],
    "num_key_value_heads": [0],
    "head_dim": [7, 2**13],
    "conv_L_cache": [65],
    "max_position_embeddings": [2**21],
    "conv_bias": ["false"],
    "tie_embedding": [None],
    "tie_word_embeddings": [1],
    "pad_token_id": [-1, False],
    "eos_token_id": ["4"],
    "block_use_swiglu": [False],
    "use_pos_enc": [1],
    "sliding_window": [256],
    "num_experts": [32],
    "num_local_experts": [4],
    "final_logit_softcapping": [30.0],
    "attn_logit_softcapping": [50.0],
    "attention_multiplier": [0.5],
    "logits_scaling": [8.0],
    "logit_scale": [0.0625],
    "embedding_multiplier": [12.0],
    "residual_multiplier": [0.22],
    "is_causal": [False, None],
    "use_bidirectional_attention": [True],
    "is_encoder_decoder": [True],
    "architectures": ["Lfm2ForCausalLM"],
    "hidden_act": ["gelu"],
    "attention_bias": [True],
    "partial_rotary_factor": [0.5],
    "quantization_config": [{"bits": 4}],
    "torch_dtype": [16],
}
REFUSALS = [
    ({"model_type": "lfm2_moe", "layer_types": None}, "layer_types: null"),
    ({"layer_types": ["conv", "sliding_attention"]}, "layer_types[1]: 'sliding_attention'"),
    ({"layer_types": ["conv", 3]}, "layer_types[1]: 3"),
    ({"layer_types": ["conv"]}, "1 entries, expected num_hidden_layers=2"),
    ({"layer_types": "conv"}, "expected a list of layer types"),
    ({"full_attn_idxs": [2], "layer_types": None}, "full_attn_idxs: 2, expected 0 to num_hidden_layers-1=1"),
    ({"full_attn_idxs": [-1], "layer_types": None}, "full_attn_idxs: -1"),
    ({"full_attn_idxs": [1, 1], "layer_types": None}, "no index twice"),
    ({"full_attn_idxs": [True], "layer_types": None}, "list of integers"),
    ({"full_attn_idxs": 1, "layer_types": None}, "list of integers"),
    ({"full_attn_idxs": [0]}, "contradicts layer_types, which has attention in [1]"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_parameters.rope_type: 'yarn'"),
    ({"rope_parameters": {"rope_type": "default", "type": "linear"}}, "rope_parameters.type: 'linear'"),
    ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "rope_parameters.factor: 2.0"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5"),
    ({"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "rope_parameters.full_attention.rope_type"),
    ({"rope_parameters": {"conv": {"rope_type": "default"}}}, "rope_parameters.'conv'"),
    ({"rope_parameters": {"full_attention": {}, "conv": {"rope_theta": 2.0}}}, "under full_attention"),
    ({"rope_parameters": {"full_attention": {}, "rope_theta": 2.0}}, "under full_attention"),
    ({"rope_parameters": {"rope_theta": None}}, "rope_theta: null"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling.rope_type: 'linear'"),
    ({"rope_scaling": {"rope_theta": 2.0}, "rope_parameters": {"rope_theta": 3.0}}, "contradicts rope_parameters"),
    ({"theta": 5e5}, "theta: 500000.0, expected rope_theta=1000000.0"),
    ({"hidden_size": 18}, "hidden_size: 18, expected a multiple of num_attention_heads=4"),
    ({"intermediate_size": 1, "block_auto_adjust_ff_dim": True}, "feed_forward_size: 0"),
    ({"block_ff_dim": 2**18}, "feed_forward_size: 262144"),
    ({"num_key_value_heads": 3}, "expected a multiple of num_key_value_heads=3"),
    ({"num_attention_heads": 16, "num_key_value_heads": 2}, "head_dim: 1"),
    ({"bos_token_id": 300}, "bos_token_id: 300, expected an integer from 0 to vocab_size-1=299"),
    ({"eos_token_id": [4, 300]}, "eos_token_id: 300"),
    *(
        ({"architectures": [name]}, f"architectures: {name!r}, expected one of Lfm2ForCausalLM")
        for name in ("Lfm2BidirectionalForMaskedLM", "ColBERTLfm2Model", "Lfm2Model")
    ),
    ({"architectures": ["Lfm2ForCausalLM", "Lfm2BidirectionalForMaskedLM"]}, "'Lfm2BidirectionalForMaskedLM'"),
    ({"architectures": None, "auto_map": {"AutoModel": "colbert.ColBERTLfm2Model"}}, "auto_map: {'AutoModel': 'colb"),
    ({"architectures": [], "auto_map": {"AutoModel": "encoder.Lfm2BidirectionalModel"}}, "beside it"),
    *(({key: 8}, f"{key}: 8, expected hidden_size=16") for key in ("conv_dim", "conv_dim_out", "block_dim")),
    ({"num_heads": 8}, "num_heads: 8, expected num_attention_heads=4"),
    ({"num_layers": 3}, "num_layers: 3, expected num_hidden_layers=2"),
    *(({key: 1e-6}, f"{key}: 1e-06, expected norm_eps=1e-05") for key in ("block_norm_eps", "rms_norm_eps")),
]
NOT_OF_LFM2 = [
    *("topk_method", "n_group", "topk_group", "scoring_func", "num_shared_experts", "n_routed_experts", "norm_topk"),
    *("shared_expert_intermediate_size", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers"),
    *("first_k_dense_replace", "use_routing_bias", "router_logit_softcapping", "expert_bias", "gate_bias"),
]
WRONG_IN_MIXTURES: dict[str, list[object]] = {  # each of these, by its key
    "num_experts": [0, None],
    "num_experts_per_tok": [0],
    "moe_intermediate_size": [2**18],
    "num_dense_layers": [-1, None],
    "use_expert_bias": [1],
    "norm_topk_prob": ["true"],
    "routed_scaling_factor": [1, 0.0, None],
    "block_auto_adjust_ff_dim": [True],
    "block_ffn_dim_multiplier": [2.0],
    "layer_types": [None],
}
REFUSED_MIXTURES = [
    ({"num_experts": 0}, "num_experts: 0, expected an integer from 1 to 1024"),
    ({"use_expert_bias": 1}, "use_expert_bias: 1, expected true or false"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok: 5, expected at most num_experts=4"),
    ({"num_local_experts": 5}, "num_local_experts: 5, expected num_experts=4"),
    ({"block_ff_dim": 30}, "block_ff_dim: 30, expected feed_forward_size=24"),
    ({"theta": 5e6}, "theta: 5000000.0, expected rope_theta=1000000.0"),
    (
        {"num_experts": 1024, "num_hidden_layers": 1024, "layer_types": ["conv"] * 1024},
        "num_experts: 1024 in each of 1023 layers, expected at most 32768 in all",
    ),
    *(({key: 2}, f"{key!r}: 2: not a key of LFM2's router, expected one of ['num_experts', ") for key in NOT_OF_LFM2),
]
REFUSED = [(raw_config, *row) for row in REFUSALS] + [(raw_mixture, *row) for row in REFUSED_MIXTURES]
REFUSED += [
    (raw, {key: value}, f" {key}: {show_json(value)}, expected ")
    for raw, wrong in ((raw_config, WRONG_VALUES), (raw_mixture, WRONG_IN_MIXTURES))
    for key, values in wrong.items()
    for value in values
]


@pytest.mark.parametrize(("raw", "changes", "fragment"), REFUSED)
def test_a_config_that_cannot_be_honoured_is_refused_in_one_line(
    raw: Raw, changes: dict[str, object], fragment: str
) -> None:
    """In less than 400 characters."""
    with pytest.raises(ConfigError, match=rf"^here/config\.json:(?=.{{,380}}\Z).*{re.escape(fragment)}"):
        parse_config(raw(**changes), "here/config.json")


# --- files


def write(directory: Path, raw: dict[str, object], generation: dict[str, object] | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


BAD_FILES = [
    (b"{", "not JSON"),
    (b"[]", "a JSON array, expected an object"),
    (b"\xff{}", "not UTF-8"),
    (b"\xef\xbb\xbf{}", "begins with a byte order mark (BOM), expected UTF-8 without one"),
    (b'{"a": {"b": 1, "b": 1}}', "'b' stands twice"),
    (b'{"norm_eps": NaN}', "NaN is not JSON"),
    (b'{"norm_eps": -Infinity}', "-Infinity is not JSON"),
    (b'{"norm_eps": 1e999}', "1e999 overflows"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not JSON"),
    (b" " * (16 * 2**20 + 1), "expected at most 16777216"),
]


@pytest.mark.parametrize(("content", "fragment"), BAD_FILES)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_not_strict_json_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, fragment: str
) -> None:
    write(tmp_path, raw_config())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"/{name}: .*{re.escape(fragment)}"):
        load_config(tmp_path)


def test_a_missing_config_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: does not exist"):
        load_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json: is not a regular file"):
        load_config(tmp_path)


@pytest.mark.parametrize(("more", "expected"), [(2, (4, 2)), ([4, 7], (4, 7)), (None, (4,))])
def test_generation_config_adds_its_eos_ids_after_those_of_the_config(
    tmp_path: Path, more: object, expected: tuple[int, ...]
) -> None:
    write(tmp_path, raw_config(), {"eos_token_id": more, "temperature": 0.3})
    assert load_config(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("more", [300, True, [1.5]])
def test_an_impossible_eos_id_in_generation_config_is_refused_by_name(tmp_path: Path, more: object) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id"):
        load_config(write(tmp_path, raw_config(), {"eos_token_id": more}))


def test_a_config_is_frozen_and_replacing_a_field_checks_it_again() -> None:
    with pytest.raises(FrozenInstanceError):
        tiny_config().vocab_size = 3  # type: ignore[misc]
    with pytest.raises(ConfigError, match="vocab_size-1=3"):
        replace(tiny_config(), vocab_size=4)


@pytest.mark.parametrize("path", sorted(FIXTURES.rglob("config.json")), ids=lambda path: path.parent.name)
def test_no_fixture_has_a_key_that_nobody_knows(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config(path.parent)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"conv_dilation": 2, "attn_temperature": 1, "later": None}, "attn_temperature, conv_dilation: not read"),
        ({"rope_parameters": ROPE, "rope_theta": 1e4}, "rope_theta 10000.0: not used, since rope_parameters or"),
    ],
)
def test_keys_that_are_not_read_are_reported_once_with_their_file(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    assert not IGNORED & READ
    with pytest.warns(UserWarning, match=rf"config\.json: {re.escape(message)}") as caught:
        load_config(write(tmp_path, raw_config(**keys)))
    assert len(caught) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*not read")
@given(
    edits=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4),
    keep=st.none() | st.integers(0, 900),
)
def test_a_damaged_config_loads_or_raises_our_error(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]], keep: int | None
) -> None:
    content = bytearray(json.dumps(OLD_350M).encode())
    for position, byte in edits:
        content[position % len(content)] = byte
    directory = tmp_path_factory.mktemp("config")
    (directory / "config.json").write_bytes(content[:keep])
    try:
        assert load_config(directory).hidden_size > 0
    except Lfm2npError as error:
        assert str(directory / "config.json") in str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.night
@pytest.mark.parametrize("raw", [raw_config, raw_mixture])
@given(
    changes=st.dictionaries(st.sampled_from(sorted({*OLD_350M, *raw_mixture(), "rope_parameters", *NOT_OF_LFM2})), JSON)
)
def test_any_json_under_known_keys_parses_or_raises_our_error(raw: Raw, changes: dict[str, object]) -> None:
    try:
        config = parse_config(raw() | changes, "config.json")
    except ConfigError as error:
        assert str(error).startswith("config.json: ")
    else:
        assert len(config.layer_types) == config.num_hidden_layers
