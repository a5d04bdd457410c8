"""A GGUF file made by hand, and what a small LFM2 has in one: so the tests need no package that writes it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blocks_drawn import random_rows

from lfm2np.checkpoint.config import ModelConfig
from lfm2np.checkpoint.gguf.formats import NUMBERS, QUANTISED
from lfm2np.checkpoint.gguf.names import place_of
from lfm2np.checkpoint.layout import expected_tensors

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
Key = tuple[int, object]  # its type and its value; of an array (ARRAY, type of its values, values)


@dataclass(frozen=True)
class Tensor:
    """As the file has it: shape as NumPy's, content of that type."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


def string(text: str | bytes) -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content)) + content


def value(kind: int, *what: object) -> bytes:
    if kind == STRING:
        return string(what[0])
    if kind == ARRAY:
        inner, values = what
        return struct.pack("<IQ", inner, len(values)) + b"".join(value(inner, one) for one in values)
    return struct.pack(f"<{LETTERS[kind]}", what[0])


def header(keys: Mapping[str, Key], infos: Sequence[bytes], version: int = 3) -> bytes:
    said = [string(key) + struct.pack("<I", kind) + value(kind, *what) for key, (kind, *what) in keys.items()]
    return b"GGUF" + struct.pack("<IQQ", version, len(infos), len(said)) + b"".join([*said, *infos])


def info(name: str, shape: Sequence[int], number: int, offset: int) -> bytes:
    dimensions = b"".join(struct.pack("<Q", size) for size in reversed(shape))
    return string(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", number, offset)


def padded(content: bytes, alignment: int = 32) -> bytes:
    return content + bytes(-len(content) % alignment)


def gguf_bytes(keys: Mapping[str, Key], tensors: Mapping[str, Tensor], alignment: int = 32, version: int = 3) -> bytes:
    infos, body = [], b""
    for name, one in tensors.items():
        infos.append(info(name, one.shape, NUMBERS[one.dtype], len(body)))
        body += padded(one.content, alignment)
    return padded(header(keys, infos, version), alignment) + body


def split_bytes(keys: Mapping[str, Key], tensors: Mapping[str, Tensor], count: int) -> list[bytes]:
    """As llama.cpp's gguf-split makes them: the first has all keys, the others only those of the split."""
    names, found = list(tensors), []
    for number in range(count):
        own = {"split.no": (2, number), "split.count": (2, count), "split.tensors.count": (I32, len(tensors))}
        part = {
            name: tensors[name] for name in names[number * len(names) // count : (number + 1) * len(names) // count]
        }
        found.append(gguf_bytes({**(keys if number == 0 else {}), **own}, part))
    return found


def write_splits(directory: Path, contents: Sequence[bytes]) -> list[Path]:
    paths = [directory / f"x-{number + 1:05}-of-{len(contents):05}.gguf" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


# --- of a model


def model_keys(config: ModelConfig) -> dict[str, Key]:
    """As llama.cpp's converter writes them."""
    arch, mixture = "lfm2" if config.mixture is None else "lfm2moe", config.mixture
    heads = [config.num_key_value_heads if kind != "conv" else 0 for kind in config.layer_types]
    found: dict[str, Key] = {
        "general.architecture": (STRING, arch),
        "general.file_type": (U32, 0),
        f"{arch}.block_count": (U32, config.num_hidden_layers),
        f"{arch}.context_length": (U32, config.max_position_embeddings),
        f"{arch}.embedding_length": (U32, config.hidden_size),
        f"{arch}.feed_forward_length": (U32, config.feed_forward_size),
        f"{arch}.attention.head_count": (U32, config.num_attention_heads),
        f"{arch}.attention.head_count_kv": (ARRAY, I32, heads),
        f"{arch}.attention.key_length": (U32, config.head_dim),
        f"{arch}.attention.value_length": (U32, config.head_dim),
        f"{arch}.attention.layer_norm_rms_epsilon": (F32, config.norm_eps),
        f"{arch}.rope.freq_base": (F32, config.rope_theta),
        f"{arch}.vocab_size": (U32, config.vocab_size),
        f"{arch}.shortconv.l_cache": (U32, config.conv_L_cache),
        "tokenizer.ggml.tokens": (ARRAY, STRING, ["a", "b", b"\xff"]),
    }
    for key, token_id in (("bos", config.bos_token_id), ("padding", config.pad_token_id), ("eos", None)):
        token_id = config.eos_token_ids[0] if key == "eos" and config.eos_token_ids else token_id
        if token_id is not None:
            found[f"tokenizer.ggml.{key}_token_id"] = (U32, token_id)
    if mixture is not None:
        found |= {
            f"{arch}.expert_count": (U32, mixture.num_experts),
            f"{arch}.expert_used_count": (U32, mixture.num_experts_per_tok),
            f"{arch}.expert_feed_forward_length": (U32, mixture.moe_intermediate_size),
            f"{arch}.leading_dense_block_count": (U32, mixture.num_dense_layers),
            f"{arch}.expert_gating_func": (U32, 2),
        }
    return found


def model_tensors(config: ModelConfig, made: Callable[[str, tuple[int, ...]], Tensor]) -> dict[str, Tensor]:
    """What `made(our name, shape)` gives, under llama.cpp's names, a layer's experts put together."""
    found: dict[str, Tensor] = {}
    for name, shape in expected_tensors(config).items():
        one, place = made(name, shape), place_of(name)
        if len(shape) == 3:
            one = Tensor(one.dtype, (shape[0], shape[2]), one.content)
        if place.expert is not None:
            before = found.get(place.name, Tensor(one.dtype, (0, *shape), b""))
            one = Tensor(one.dtype, (before.shape[0] + 1, *shape), before.content + one.content)
        found[place.name] = one
    return found


def quantised_tensors(
    config: ModelConfig, dtype: str, seed: int = 0, exponents: tuple[int, int] = (8, 11)
) -> dict[str, Tensor]:
    """Random blocks for every matrix, random float32 near 1 for all else; routers are float32 as llama.cpp has them."""
    random = np.random.default_rng(seed)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        own = int(random.integers(2**31))
        if len(shape) == 2 and "gate.weight" not in name and dtype in QUANTISED:
            return Tensor(dtype, shape, random_rows(dtype, shape, own, exponents).tobytes())
        values = np.random.default_rng(own).normal(0.0 if "gate" in name else 1.0, 0.1, shape)
        return Tensor("F32", shape, values.astype("<f4").tobytes())

    return model_tensors(config, made)
