"""A checkpoint as GGUF, as llama.cpp's convert_hf_to_gguf.py names its tensors, without a tokenizer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.gguf.names import place_of
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import widened

TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "float16": gguf.GGMLQuantizationType.F16,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
}
FILE_TYPES = {
    "float32": gguf.LlamaFileType.ALL_F32,
    "float16": gguf.LlamaFileType.MOSTLY_F16,
    "bfloat16": gguf.LlamaFileType.MOSTLY_BF16,
}


def write_gguf(model: Path, path: Path, format: str) -> Path:
    """Norms and convolutions are float32 in every format, as llama.cpp's converter has them."""
    config = load_config(model)
    tensors = open_checkpoint(model, config)
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_file_type(FILE_TYPES[format])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.feed_forward_size)
    writer.add_head_count(config.num_attention_heads)
    has_keys = [kind != "conv" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * key for key in has_keys])
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_tokenizer_model("none")
    for name in tensors:
        values = np.asarray(widened(tensors, name))
        values = values[:, 0, :] if values.ndim == 3 else values
        kind = TYPES[format] if values.ndim == 2 and "conv.conv" not in name else TYPES["float32"]
        writer.add_tensor(place_of(name).name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
