"""Real, tiny objects for the loaders' tests: configs, hand-made safetensors files, a byte-level BPE tokenizer."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from lfm2np.checkpoint.config_json import parse_config
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import expected_tensors

Stored = tuple[str, tuple[int, ...], bytes]
SPECIALS = ("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 300  # rows; the tokenizer below has fewer ids, the rest are dead
PLAIN_TEMPLATE = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
# The keys of the first published config.json of LFM2-350M, with every old and redundant spelling.
OLD_350M: dict[str, object] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 1024,
    "block_ff_dim": 6656,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 1024,
    "conv_dim_out": 1024,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 16,
    "num_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0.dev0",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}


PLAIN, BARE, SCALED = "plain", "bare", "scaled"
MIXTURES: dict[str, dict[str, object]] = {
    PLAIN: {},
    BARE: {"use_expert_bias": False, "norm_topk_prob": False, "num_experts_per_tok": 1},
    SCALED: {"routed_scaling_factor": 2.5, "num_experts_per_tok": 3},
    "all": {"num_experts": 4, "num_experts_per_tok": 4},
}
SPARSE = "model.layers.1.feed_forward"  # the first sparse one


def raw_config(**changes: object) -> dict[str, object]:
    """A two-layer config; a change to None writes null."""
    raw: dict[str, object] = {
        "model_type": "lfm2",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 24,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention"],
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 4,
        "pad_token_id": 0,
    }
    return raw | changes


def raw_mixture(**changes: object) -> dict[str, object]:
    """A three-layer config with two experts of four a token behind one dense layer; a change to None writes null."""
    raw: dict[str, object] = {
        "model_type": "lfm2_moe",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "num_dense_layers": 1,
    }
    return {key: value for key, value in raw_config().items() if not key.startswith("block_")} | raw | changes


def tiny_config(**changes: object) -> ModelConfig:
    return parse_config(raw_config(**changes), "config.json")


def stored_weights(config: ModelConfig, dtype: str = "BF16", seed: int = 0) -> dict[str, Stored]:
    """Random normal weights as bytes."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        values = generator.standard_normal(shape).astype(np.float32)
        tensors[name] = stored(values, dtype)
    return tensors


def stored(values: np.ndarray, dtype: str) -> Stored:
    """BF16 cuts the lower half of the float32 off."""
    bits = values.astype("<f4")
    if dtype == "BF16":
        return dtype, values.shape, (bits.view("<u4") >> 16).astype("<u2").tobytes()
    kinds = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "i1", "F8_E4M3": "i1"}
    return dtype, values.shape, bits.astype(kinds[dtype]).tobytes()


def safetensors_bytes(tensors: Mapping[str, Stored]) -> bytes:
    """A file made by hand: the library's NumPy writer knows no bfloat16."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body, offset = b"", 0
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(content)]}
        body, offset = body + content, offset + len(content)
    return with_header(json.dumps(header).encode(), body)


def with_header(header: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def write_checkpoint(directory: Path, config: ModelConfig, dtype: str = "BF16") -> dict[str, Stored]:
    """model.safetensors with random weights."""
    tensors = stored_weights(config, dtype)
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return tensors


def write_shards(directory: Path, shards: Mapping[str, Mapping[str, Stored]]) -> Path:
    """Each shard and an index that is right about them."""
    weight_map = {}
    for shard, tensors in shards.items():
        (directory / shard).write_bytes(safetensors_bytes(tensors))
        weight_map.update(dict.fromkeys(tensors, shard))
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return index


def byte_level_tokenizer(post_processor: bool = True) -> Tokenizer:
    """SPECIALS, one id per byte, the merges "he" and "ll", one ordinary added token with a letter that is no byte's."""
    vocabulary = {token: index for index, token in enumerate(SPECIALS)}
    for letter in [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll"]:
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.add_tokens([AddedToken("tool é → call", normalized=False)])
    if post_processor:
        bos = SPECIALS[1]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=None, special_tokens=[(bos, 1)]
        )
    return tokenizer


def write_tokenizer(directory: Path, template: str | None = PLAIN_TEMPLATE, post_processor: bool = True) -> Path:
    """tokenizer.json, tokenizer_config.json and, if there is a template, chat_template.jinja."""
    path = directory / "tokenizer.json"
    byte_level_tokenizer(post_processor).save(str(path))
    eos_token = {"__type": "AddedToken", "content": SPECIALS[4], "special": True}
    settings = {"bos_token": SPECIALS[1], "eos_token": eos_token, "pad_token": SPECIALS[0]}
    (directory / "tokenizer_config.json").write_text(
        json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path


def write_model(directory: Path) -> Path:
    """A whole tiny checkpoint, tokenizer included, in a directory made for it."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw_config()))
    write_checkpoint(directory, tiny_config())
    write_tokenizer(directory)
    return directory


def overflowing_at_token_seven(directory: Path) -> None:
    """Only its embedding makes a state that lies in one dimension, and there one row of the head is near the end."""
    (directory / "config.json").write_text(json.dumps(raw_config(tie_word_embeddings=False)))
    tensors = stored_weights(tiny_config(tie_word_embeddings=False))
    for name, token_id, value in (("model.embed_tokens.weight", 7, 1e4), ("lm_head.weight", 290, 1e38)):
        kind, shape, content = tensors[name]
        row = stored(np.eye(1, shape[1], dtype=np.float32) * value, "BF16")[2]
        tensors[name] = kind, shape, content[: token_id * len(row)] + row + content[(token_id + 1) * len(row) :]
    tensors["model.embedding_norm.weight"] = stored(np.ones(16, np.float32), "BF16")
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))


@cache
def mixtures_home() -> TemporaryDirectory[str]:
    """As long as the process lasts."""
    return TemporaryDirectory(prefix="mixtures-")


@cache
def mixture(name: str) -> Path:
    """A directory with one of MIXTURES, in float32, without a tokenizer: three layers, of which the first is dense."""
    directory = Path(mixtures_home().name) / name
    directory.mkdir()
    raw = raw_config(
        model_type="lfm2_moe",
        vocab_size=80,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,  # 16 bytes times a whole number, which PyTorch demands
        num_dense_layers=1,
        use_expert_bias=True,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
    )
    del raw["block_auto_adjust_ff_dim"]
    (directory / "config.json").write_text(json.dumps(raw | MIXTURES[name]))
    random = np.random.default_rng(7)
    tensors = {}
    for key, shape in expected_tensors(parse_config(raw | MIXTURES[name], "config.json")).items():
        drawn = random.standard_normal(shape).astype(np.float32)
        if key.endswith("norm.weight"):
            values = 1.0 + 0.1 * drawn
        elif key.endswith("expert_bias"):
            values = 0.15 * drawn
        else:
            values = drawn / np.sqrt(shape[-1]) * (1.5 if ".gate." in key else 1.0)
        tensors[key] = stored(values, "F32")
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return directory
