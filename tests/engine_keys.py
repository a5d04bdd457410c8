"""Which keys of config.json an engine needs, and what each spelling must then say.

Found by reading the engines' sources and, but for SGLang's, by leaving out one key after another of fixtures/trained:
vLLM's config and server, `mlx_lm.utils.load_model`, convert_hf_to_gguf.py with and without transformers' help. Of two
spellings that mean one thing an engine needs one; a fixture has both.
"""

from __future__ import annotations

from lfm2np.truth.config import ModelConfig

SIZES = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
SIZES |= {"max_position_embeddings", "intermediate_size", "layer_types", "model_type"}
WIDTH = {"block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "block_ff_dim"}
ROPE = {"rope_parameters", "rope_theta"}
TRANSFORMERS = SIZES | {"architectures", "full_attn_idxs", "block_ff_dim", "block_auto_adjust_ff_dim"}
TRANSFORMERS |= {"rope_parameters", "tie_word_embeddings"}
NEEDED: dict[str, set[str]] = {
    "transformers 5.23.0, SGLang 0.5.23": TRANSFORMERS,
    "transformers 4.57.6": TRANSFORMERS | {"rope_theta"},
    "vLLM 0.32.0": TRANSFORMERS | {"block_dim", "conv_dim"},  # read by models/lfm2.py; Lfm2Config has neither
    "mlx-lm 0.32.2": SIZES | WIDTH | ROPE | {"norm_eps", "conv_bias", "conv_L_cache", "block_dim", "torch_dtype"},
    "llama.cpp's converter, of llama-cpp-python 0.3.36": SIZES | WIDTH | ROPE | {"conv_L_cache", "norm_eps"},
}
# Of a mixture, by reading: Lfm2MoeConfig, which vLLM and SGLang take, too; mlx-lm's lfm2_moe.py, commit 0c5550a.
EXPERTS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_dense_layers", "norm_topk_prob"}
EXPERTS |= {"use_expert_bias", "routed_scaling_factor"}
NEEDED_OF_MIXTURES: dict[str, set[str]] = {
    "transformers 5.23.0": SIZES | EXPERTS | {"architectures"},
    "mlx-lm": SIZES | EXPERTS | {"rope_parameters", "norm_eps", "conv_bias", "conv_L_cache"},
}


def spelled(config: ModelConfig) -> dict[str, object]:
    """What each key must say, in all spellings; keys that hold no number of the network are left out."""
    attention = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "block_dim": config.hidden_size,
        "conv_dim": config.hidden_size,
        "conv_dim_out": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.feed_forward_size,
        "block_ff_dim": config.feed_forward_size,
        "layer_types": list(config.layer_types),
        "full_attn_idxs": attention,
        "conv_L_cache": config.conv_L_cache,
        "conv_bias": config.conv_bias,
        "norm_eps": config.norm_eps,
        "block_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "tie_embedding": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
    }
