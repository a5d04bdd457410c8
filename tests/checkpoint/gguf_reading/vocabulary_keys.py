"""The tokenizer's keys of a GGUF file, made of a checkpoint directory as llama.cpp's converter makes them."""

from __future__ import annotations

import json
from pathlib import Path

from gguf_bytes import ARRAY, BOOL, I32, STRING, Key, gguf_bytes, model_keys, quantised_tensors

from lfm2np.checkpoint.config_json import load_config
from lfm2np.truth.config import ModelConfig

FIXTURES = Path(__file__).parents[3] / "fixtures"
TRAINED = FIXTURES / "trained"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
LFM2_SPLIT = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def tokenizer_keys(raw: dict, config: ModelConfig, pre: str, template: str | None) -> dict[str, Key]:
    """Source: conversion/base.py (get_vocab_base, _set_vocab_gpt2) and gguf-py's SpecialVocab."""
    added = {token["content"]: token for token in raw["added_tokens"]}
    texts = {token_id: text for text, token_id in raw["model"]["vocab"].items()}
    texts |= {value["id"]: text for text, value in added.items()}
    tokens, types = [], []
    for token_id in range(config.vocab_size):
        text = texts.get(token_id)
        tokens.append(f"[PAD{token_id}]" if text is None else text)
        looks_special = text is not None and text.startswith("<|") and text.endswith("|>")
        if text is None:
            types.append(UNUSED)
        elif text not in added:
            types.append(NORMAL)
        else:
            types.append(CONTROL if added[text]["special"] or looks_special else USER_DEFINED)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]]
    keys: dict[str, Key] = {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, pre),
        "tokenizer.ggml.tokens": (ARRAY, STRING, tokens),
        "tokenizer.ggml.token_type": (ARRAY, I32, types),
        "tokenizer.ggml.merges": (ARRAY, STRING, merges),
        "tokenizer.ggml.add_sep_token": (BOOL, False),
    }
    if raw["post_processor"] is not None:
        keys["tokenizer.ggml.add_bos_token"] = (BOOL, True)
    return keys | ({} if template is None else {"tokenizer.chat_template": (STRING, template)})


def trained_keys(pre: str = "lfm2") -> dict[str, Key]:
    """All keys of the trained fixture, its tokenizer under the name of a pattern that it may not have."""
    config = load_config(TRAINED)
    raw = json.loads((TRAINED / "tokenizer.json").read_text(encoding="utf-8"))
    template = (TRAINED / "chat_template.jinja").read_text(encoding="utf-8")
    return model_keys(config) | tokenizer_keys(raw, config, pre, template)


def write_gguf(path: Path, keys: dict[str, Key]) -> Path:
    """With weights that nobody multiplies."""
    path.write_bytes(gguf_bytes(keys, quantised_tensors(load_config(TRAINED), "Q8_0")))
    return path
