"""A checkpoint as GGUF by the package of llama.cpp's authors, tensors named as convert_hf_to_gguf.py names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.gguf.names import place_of
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import widened


def without_tokenizer(writer: Any) -> None:
    writer.add_tokenizer_model("none")


def write_gguf(model: Path, path: Path, name: str, add_tokenizer: Callable[[Any], None] = without_tokenizer) -> Path:
    """Matrices in the type of this name; norms and convolutions are F32 in every file, as the converter has them."""
    config = load_config(model)
    tensors = open_checkpoint(model, config)
    writer = gguf.GGUFWriter(path, "lfm2")
    general = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}.get(name, f"MOSTLY_{name}")
    writer.add_file_type(gguf.LlamaFileType[general])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.feed_forward_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads * (kind != "conv") for kind in config.layer_types])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    add_tokenizer(writer)
    for key in tensors:
        values = np.asarray(widened(tensors, key))
        kind = gguf.GGMLQuantizationType[name if values.ndim == 2 else "F32"]
        values = values[:, 0, :] if values.ndim == 3 else values
        writer.add_tensor(place_of(key).name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
