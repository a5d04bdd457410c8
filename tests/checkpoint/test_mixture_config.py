"""config.json of an lfm2_moe: published models, defaults, spellings, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import raw_config, raw_mixture
from hypothesis import given
from hypothesis import strategies as st
from torture_table import MIXTURES

from lfm2np.checkpoint.config_json import load_config, parse_config
from lfm2np.errors import ConfigError
from lfm2np.truth.config import MixtureConfig
from lfm2np.truth.layers import expected_tensors, parameter_count

FIXTURES = Path(__file__).parents[2] / "fixtures"
EVERY_FOURTH = list(range(2, 40, 4))
A1B = [2, 6, 10, 14, 18, 21]
PUBLISHED = [
    # layers, attention layers, dense width, experts, their width, vocabulary, theta; parameters, those of one token
    pytest.param(24, A1B, 7168, 32, 1792, 65536, 1e6, 8_339_929_856, 1_557_740_288, id="LFM2-8B-A1B"),
    pytest.param(24, A1B, 7168, 32, 1792, 128000, 5e6, 8_467_856_128, 1_685_666_560, id="LFM2.5-8B-A1B"),
    pytest.param(40, EVERY_FOURTH, 11776, 64, 1536, 65536, 1e6, 23_843_659_008, 2_326_879_488, id="LFM2-24B-A2B"),
]


@pytest.mark.parametrize(
    ("layers", "attention", "width", "experts", "inner", "vocabulary", "theta", "count", "active"), PUBLISHED
)
def test_published_models_have_their_parameter_count(
    layers: int,
    attention: list[int],
    width: int,
    experts: int,
    inner: int,
    vocabulary: int,
    theta: float,
    count: int,
    active: int,
) -> None:
    raw = {
        "model_type": "lfm2_moe",
        "num_hidden_layers": layers,
        "layer_types": ["full_attention" if i in attention else "conv" for i in range(layers)],
        "intermediate_size": width,
        "num_experts": experts,
        "moe_intermediate_size": inner,
        "vocab_size": vocabulary,
        "rope_theta": theta,
    }
    config = parse_config(raw, "config.json")
    assert (config.hidden_size, config.head_dim, config.feed_forward_size, config.rope_theta) == (
        2048,
        64,
        width,
        theta,
    )
    assert parameter_count(config) == count
    assert parameter_count(config, active=True) == active
    assert active // 10**8 in (15, 16, 23), "as the names say: A1B, about 1.5e9, and A2B"


def test_absent_keys_take_the_defaults_of_transformers() -> None:
    config = parse_config({"model_type": "lfm2_moe", "layer_types": ["conv"] * 32}, "config.json")
    assert config.mixture == MixtureConfig(
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=1792,
        num_dense_layers=2,
        use_expert_bias=True,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
    )
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (65536, 2048, 32)
    assert (config.num_attention_heads, config.num_key_value_heads, config.feed_forward_size) == (32, 8, 7168)
    assert (config.max_position_embeddings, config.conv_L_cache, config.norm_eps) == (128_000, 3, 1e-5)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 0)
    assert (config.conv_bias, config.tie_word_embeddings, config.rope_theta) == (False, True, 1e6)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_torture_config_is_read_as_what_was_built(name: str) -> None:
    config, built = load_config(FIXTURES / "torture" / name), MIXTURES[name].built
    mixture, built_mixture = config.mixture, built.mixture
    assert mixture is not None and built_mixture is not None
    assert (mixture.num_experts, mixture.num_experts_per_tok, mixture.moe_intermediate_size) == (
        built_mixture.N,
        built_mixture.K,
        built_mixture.X,
    )
    assert (mixture.num_dense_layers, mixture.use_expert_bias) == (built_mixture.dense, built_mixture.bias)
    assert (config.feed_forward_size, config.hidden_size) == (built.F, built.D)


def test_the_torture_checkpoints_have_every_switch_on_and_off() -> None:
    mixtures = [load_config(FIXTURES / "torture" / name).mixture for name in MIXTURES]
    assert {mixture.use_expert_bias for mixture in mixtures if mixture} == {True, False}
    assert {mixture.norm_topk_prob for mixture in mixtures if mixture} == {True, False}
    assert {mixture.routed_scaling_factor for mixture in mixtures if mixture} == {1.0, 2.5, 0.5}
    assert {mixture.num_dense_layers for mixture in mixtures if mixture} == {0, 1, 2}
    assert any(mixture.num_experts_per_tok == 1 < mixture.num_experts for mixture in mixtures if mixture)
    assert any(mixture.num_experts_per_tok == mixture.num_experts > 1 for mixture in mixtures if mixture)
    assert any(mixture.num_experts == 1 for mixture in mixtures if mixture)
    assert {mixture.built.mixture.fused for mixture in MIXTURES.values() if mixture.built.mixture} == {True, False}


SPELLINGS = [
    ({"tie_embedding": False}, "tie_word_embeddings", False),
    ({"rope_theta": 5e6}, "rope_theta", 5e6),
    ({"rope_theta": 5e6, "theta": 5e6}, "rope_theta", 5e6),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000}}, "rope_theta", 5e6),
    ({"layer_types": None, "full_attn_idxs": [1]}, "layer_types", ("conv", "full_attention", "conv")),
    ({"block_ff_dim": 24}, "feed_forward_size", 24),
    ({"block_multiple_of": 256, "block_auto_adjust_ff_dim": False}, "feed_forward_size", 24),
    ({"block_ffn_dim_multiplier": 1.0}, "feed_forward_size", 24),
    ({"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}, "feed_forward_size", 24),
    ({"dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02, "never_heard_of": 1}, "hidden_size", 16),
]


@pytest.mark.parametrize(("changes", "field", "value"), SPELLINGS)
def test_spellings_mean_what_transformers_makes_of_them(changes: dict[str, object], field: str, value: object) -> None:
    assert getattr(parse_config(raw_mixture(**changes), "config.json"), field) == value


@pytest.mark.parametrize(("dense", "sparse"), [(0, 3), (1, 2), (3, 0), (7, 0)])
def test_the_first_layers_are_dense(dense: int, sparse: int) -> None:
    config = parse_config(raw_mixture(num_dense_layers=dense), "config.json")
    assert sum(".gate.weight" in name for name in expected_tensors(config)) == sparse
    assert [config.is_sparse(layer) for layer in range(3)] == [layer >= dense for layer in range(3)]


NOT_OF_LFM2 = [
    *("topk_method", "n_group", "topk_group", "scoring_func", "num_shared_experts", "n_routed_experts", "norm_topk"),
    *("shared_expert_intermediate_size", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers"),
    *("first_k_dense_replace", "use_routing_bias", "router_logit_softcapping", "expert_bias", "gate_bias"),
]
REFUSALS = [
    ({"num_experts": 0}, "num_experts: 0, expected an integer from 1 to 1024"),
    ({"num_experts": 2.0}, "num_experts: 2.0"),
    ({"num_experts": None}, "num_experts: null"),
    ({"num_experts": True}, "num_experts: true"),
    ({"num_experts": 10**9}, "num_experts: 1000000000"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok: 5, expected at most num_experts=4"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok: 0, expected an integer from 1"),
    ({"num_experts_per_tok": "2"}, "num_experts_per_tok: '2'"),
    ({"moe_intermediate_size": 0}, "moe_intermediate_size: 0"),
    ({"moe_intermediate_size": 2**18}, "moe_intermediate_size: 262144"),
    ({"num_dense_layers": -1}, "num_dense_layers: -1, expected an integer from 0"),
    ({"num_dense_layers": None}, "num_dense_layers: null"),
    ({"use_expert_bias": 1}, "use_expert_bias: 1, expected true or false"),
    ({"use_expert_bias": None}, "use_expert_bias: null"),
    ({"norm_topk_prob": "true"}, "norm_topk_prob: 'true'"),
    ({"routed_scaling_factor": 1}, "routed_scaling_factor: 1, expected a float"),
    ({"routed_scaling_factor": 0.0}, "routed_scaling_factor: 0.0"),
    ({"routed_scaling_factor": -2.5}, "routed_scaling_factor: -2.5"),
    ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor: nan"),
    ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor: inf"),
    ({"routed_scaling_factor": None}, "routed_scaling_factor: null"),
    ({"num_local_experts": 5}, "num_local_experts: 5, expected num_experts=4"),
    ({"block_ff_dim": 30}, "block_ff_dim: 30, expected feed_forward_size=24"),
    (
        {"block_auto_adjust_ff_dim": True},
        "block_auto_adjust_ff_dim: true is not implemented, expected false or no such key in an lfm2_moe",
    ),
    (
        {"block_ffn_dim_multiplier": 2.0},
        "block_ffn_dim_multiplier: 2.0 is not implemented, expected null or no such key in an lfm2_moe",
    ),
    ({"layer_types": None}, "layer_types: null, expected a list of layer types (lfm2_moe has no default)"),
    ({"theta": 5e6}, "theta: 5000000.0, expected rope_theta=1000000.0"),
    (
        {"num_experts": 1024, "num_hidden_layers": 1024, "layer_types": ["conv"] * 1024},
        "num_experts: 1024 in each of 1023 layers, expected at most 32768 in all",
    ),
    *(({key: 2}, f"{key!r}: 2: not a key of LFM2's router, expected one of ['num_experts', ") for key in NOT_OF_LFM2),
]


@pytest.mark.parametrize(("changes", "fragment"), REFUSALS)
def test_a_config_that_cannot_be_honoured_is_refused_in_one_line(changes: dict[str, object], fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw_mixture(**changes), "here/config.json")
    text = str(caught.value)
    assert text.startswith("here/config.json: ") and fragment in text
    assert "\n" not in text and len(text) < 400


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_a_dense_model_type_with_experts_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: 4 is not implemented, expected 0 or no such key in an lfm2"):
        parse_config(raw_config(**{key: 4}), "config.json")
    for nothing in (None, 0):
        assert parse_config(raw_config(**{key: nothing}), "config.json").mixture is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(changes=st.dictionaries(st.sampled_from(sorted({*raw_mixture(), *NOT_OF_LFM2, "num_local_experts"})), JSON))
def test_any_json_under_known_keys_parses_or_raises_our_error(changes: dict[str, object]) -> None:
    try:
        config = parse_config(raw_mixture() | changes, "config.json")
    except ConfigError as error:
        assert str(error).startswith("config.json: ")
    else:
        assert json.dumps(changes) and len(config.layer_types) == config.num_hidden_layers
