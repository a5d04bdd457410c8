"""Which key of config.json which engine needs, and what each spelling must then say.

Found by reading the engines' sources and, but for SGLang's, by leaving out one key after another of fixtures/trained:
vLLM's config and server, `mlx_lm.utils.load_model`, convert_hf_to_gguf.py with and without transformers' help.
"""

from __future__ import annotations

from lfm2np.truth.config import ModelConfig

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
WIDTH = ("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of")
# Engine: key: what happens without it. "or": one of two spellings is enough.
TRANSFORMERS_5 = {
    "model_type": "no class is found",
    "architectures": "vLLM and SGLang find no class",
    **dict.fromkeys((*SIZES, "max_position_embeddings"), "Lfm2Config's default, that of a model of billions"),
    "layer_types": "or full_attn_idxs; attention everywhere",
    "full_attn_idxs": "or layer_types",
    "intermediate_size": "or block_ff_dim, which takes its place; 12288",
    "block_ff_dim": "or intermediate_size",
    "block_auto_adjust_ff_dim": "the width is two thirds",
    "rope_parameters": "or rope_theta; 1e6",
    "tie_word_embeddings": "or tie_embedding, which takes its place; tied",
}
NEEDED: dict[str, dict[str, str]] = {
    "transformers 5.23.0": TRANSFORMERS_5,
    "transformers 4.57.6": TRANSFORMERS_5 | {"rope_theta": "or theta, which takes its place; 1e6: no rope_parameters"},
    # The server reads the config through transformers (5.19), the model then takes from it, in models/lfm2.py:
    "vLLM 0.32.0": TRANSFORMERS_5
    | {
        "block_dim": "AttributeError: 'Lfm2Config' object has no attribute 'block_dim'; input and output of Lfm2MLP",
        "conv_dim": "AttributeError likewise; width of ShortConv and of its state",
    },
    "SGLang 0.5.23": TRANSFORMERS_5,  # srt/models/lfm2.py reads nothing that Lfm2Config would not fill in
    # models/lfm2.py reads the file itself, into the dataclass ModelArgs.
    "mlx-lm 0.32.2": {
        "model_type": "KeyError",
        **dict.fromkeys(
            (*SIZES, *WIDTH, "max_position_embeddings", "norm_eps", "conv_bias", "conv_L_cache", "block_dim"),
            "TypeError: ModelArgs.__init__() missing 1 required positional argument",
        ),
        "block_ff_dim": "or intermediate_size; ValueError",
        "intermediate_size": "or block_ff_dim",
        "full_attn_idxs": "or layer_types; TypeError",
        "layer_types": "or full_attn_idxs",
        "rope_parameters": "or rope_theta; 1e6",
        "rope_theta": "or rope_parameters",
        "torch_dtype": "`mlx_lm convert` stores the type of the weights",
    },
    # conversion/lfm2.py: through transformers if that can read the config; if not, from the file as it is, and then:
    "llama.cpp's converter, of llama-cpp-python 0.3.36": {
        "architectures": "ValueError: Failed to detect model architecture, in either case",
        **dict.fromkeys(
            (
                "vocab_size",
                "num_hidden_layers",
                "num_key_value_heads",
                *WIDTH,
                "layer_types",
                "conv_L_cache",
                "norm_eps",
            ),
            "KeyError",
        ),
        **dict.fromkeys(("hidden_size", "num_attention_heads", "max_position_embeddings"), "not in the GGUF"),
        "block_ff_dim": "or intermediate_size; KeyError",
        "intermediate_size": "or block_ff_dim",
        "rope_parameters": "or rope_theta; not in the GGUF",
        "rope_theta": "or rope_parameters",
    },
}
# The same for a mixture of experts, by reading: transformers' Lfm2MoeConfig, which vLLM's and SGLang's models take as
# it is, and mlx-lm's models/lfm2_moe.py, commit 0c5550a.
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_dense_layers")
NEEDED_OF_MIXTURES: dict[str, dict[str, str]] = {
    "transformers 5.23.0": {
        "model_type": "no class is found",
        "architectures": "vLLM and SGLang find no class",
        **dict.fromkeys(
            (*SIZES, *EXPERTS, "intermediate_size", "max_position_embeddings"),
            "Lfm2MoeConfig's default, that of a model of billions",
        ),
        "layer_types": "TypeError: there is no default",
        "routed_scaling_factor": "1.0",
        "norm_topk_prob": "true",
        "use_expert_bias": "true",
    },
    "mlx-lm": {
        "model_type": "KeyError",
        **dict.fromkeys(
            (*SIZES, *EXPERTS, "intermediate_size", "max_position_embeddings"),
            "TypeError: ModelArgs.__init__() missing 1 required positional argument",
        ),
        **dict.fromkeys(
            ("norm_topk_prob", "use_expert_bias", "norm_eps", "conv_bias", "conv_L_cache"),
            "TypeError: ModelArgs.__init__() missing 1 required positional argument",
        ),
        "layer_types": "or full_attn_idxs; TypeError",
        "rope_parameters": "or rope_theta; 1e6",
        "routed_scaling_factor": "1.0",
    },
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
