"""Keys of config.json that say nothing of the network, each with the reason; any other that nobody reads is reported.

Source: the config.json of published LFM2, LFM2.5 and LFM3 checkpoints; transformers 5.24, PretrainedConfig and the
configs of lfm2, lfm2_moe and lfm3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

IGNORED: dict[str, tuple[str, ...]] = {
    "how weights were drawn before training": (
        *("initializer_range", "block_mlp_init_scale", "block_out_init_scale"),
        *("block_use_xavier_init", "conv_use_xavier_init"),
    ),
    "for training only": (
        *("attention_dropout", "hidden_dropout", "dropout", "router_aux_loss_coef", "output_router_logits"),
        *("gradient_checkpointing", "unsloth_fixed", "unsloth_version"),
    ),
    "what transformers' classes do besides": (
        *("_name_or_path", "name_or_path", "transformers_version", "_attn_implementation_autoset", "torchscript"),
        *("_attn_implementation", "attn_implementation", "_experts_implementation", "use_cache", "return_dict"),
        *("output_attentions", "output_hidden_states", "chunk_size_feed_forward", "problem_type", "id2label"),
        *("label2id", "tokenizer_class", "prefix", "task_specific_params", "finetuning_task", "pruned_heads"),
        *("tf_legacy_loss", "use_bfloat16", "add_cross_attention", "cross_attention_hidden_size", "is_decoder"),
        *("tie_encoder_decoder", "decoder_start_token_id", "sep_token_id", "image_token_id"),
    ),
    "how transformers generates, which a request says": (
        *("do_sample", "temperature", "top_k", "top_p", "typical_p", "min_length", "max_length", "num_beams"),
        *("num_beam_groups", "diversity_penalty", "repetition_penalty", "length_penalty", "early_stopping"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
        *("output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id"),
        *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
    ),
    "read elsewhere": ("quantization", "quantization_config", "compression_config"),  # by packed/
}
_IGNORED = frozenset(key for keys in IGNORED.values() for key in keys)


def unread_keys(raw: Mapping[str, object], read: Iterable[str]) -> list[str]:
    """The keys with a value that are neither read nor known to say nothing."""
    return sorted(key for key, value in raw.items() if value is not None and key not in {*read, *_IGNORED})
