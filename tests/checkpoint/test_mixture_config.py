"""config.json of an lfm2_moe: published models, defaults, spellings, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import raw_config, raw_mixture
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
    pytest.param((24, A1B, 7168, 32, 1792, 65536, 1e6, 8_339_929_856, 1_557_740_288), id="LFM2-8B-A1B"),
    pytest.param((24, A1B, 7168, 32, 1792, 128000, 5e6, 8_467_856_128, 1_685_666_560), id="LFM2.5-8B-A1B"),
    pytest.param((40, EVERY_FOURTH, 11776, 64, 1536, 65536, 1e6, 23_843_659_008, 2_326_879_488), id="LFM2-24B-A2B"),
]


@pytest.mark.parametrize("published", PUBLISHED)
def test_published_models_have_their_parameter_count(published: tuple[Any, ...]) -> None:
    layers, attention, width, experts, inner, vocabulary, theta, count, active = published
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
    sizes = (config.hidden_size, config.head_dim, config.feed_forward_size, config.rope_theta)
    assert sizes == (2048, 64, width, theta)
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


def test_the_torture_checkpoints_have_every_switch_on_and_off() -> None:
    mixtures = [load_config(FIXTURES / "torture" / name).mixture for name in MIXTURES]
    assert {mixture.use_expert_bias for mixture in mixtures if mixture} == {True, False}
    assert {mixture.norm_topk_prob for mixture in mixtures if mixture} == {True, False}
    assert {mixture.routed_scaling_factor for mixture in mixtures if mixture} == {1.0, 2.5, 0.5}
    assert {mixture.num_dense_layers for mixture in mixtures if mixture} == {0, 1, 2}
    assert any(mixture.num_experts_per_tok == 1 < mixture.num_experts for mixture in mixtures if mixture)
    assert any(mixture.num_experts_per_tok == mixture.num_experts > 1 for mixture in mixtures if mixture)
    assert any(mixture.num_experts == 1 for mixture in mixtures if mixture)
    assert {mixture.fused for mixture in MIXTURES.values()} == {True, False}


@pytest.mark.parametrize(("dense", "sparse"), [(0, 3), (1, 2), (3, 0), (7, 0)])
def test_the_first_layers_are_dense(dense: int, sparse: int) -> None:
    config = parse_config(raw_mixture(num_dense_layers=dense), "config.json")
    assert sum(".gate.weight" in name for name in expected_tensors(config)) == sparse
    assert [config.is_sparse(layer) for layer in range(3)] == [layer >= dense for layer in range(3)]


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_a_dense_model_type_with_experts_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: 4, expected 0 or no such key in an lfm2"):
        parse_config(raw_config(**{key: 4}), "config.json")
    for nothing in (None, 0):
        assert parse_config(raw_config(**{key: nothing}), "config.json").mixture is None
