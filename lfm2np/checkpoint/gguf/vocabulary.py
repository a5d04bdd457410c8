"""The tokenizer of a GGUF file's own tables, as the tokenizer.json that says the same; and its chat template.

The converter writes tokenizer.json's vocabulary as a list by id (with [PADn] for rows that have no entry), a type for
each, the merges in their order, and the name of the pattern that splits text before merging. It names that pattern by
what a tokenizer makes of a long text, so a name is a promise. Two are kept here, the others refused:

lfm2   the pattern of Llama 3, which tokenizers of 65,536 ids have. That of 128,000 ids is written in other words and
       splits alike: `\\s*[\\r\\n]` ends where `\\s*[\\r\\n]+` does, at the last line break of a run of blanks.
gpt-2  what the library `tokenizers` does for "use_regex".

What the file does not tell, and what is taken for it: `ignore_merges` false; added tokens match exactly what they
spell, without regard to blanks or words around them. Of an added token that is not special, but looks so (<|...|>),
the converter says that it is. llama.cpp takes a whole word first if it is an entry (`ignore_merges` true), for lfm2:
that differs from tokenizer.json where merges do not lead to an entry.
Source: conversion/base.py, gguf-py/gguf/vocab.py, src/llama-vocab.cpp of llama.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from lfm2np.checkpoint.gguf.container import Container, Keys
from lfm2np.checkpoint.text.chat import MAX_TEMPLATE_BYTES, Chat
from lfm2np.errors import TokenizerError
from lfm2np.truth.config import ModelConfig
from lfm2np.values import show

MODEL, TEMPLATE = "tokenizer.ggml.model", "tokenizer.chat_template"
NONE = ("none", "no_vocab")  # of MODEL: the file has no tables
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # enum llama_token_type
TYPES = (NORMAL, CONTROL, USER_DEFINED, UNUSED)
SPLITS = {
    "lfm2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-2": None,  # the library's own
}
ADDS_BOS = {"lfm2": True, "gpt-2": False}  # unless the key says another
NEVER = (  # keys that would ask for what no LFM2 tokenizer does
    "add_eos_token",
    "add_space_prefix",
    "remove_extra_whitespaces",
    "normalizer.lowercase",
    "normalizer.strip_accents",
)


def has_tables(container: Container) -> bool:
    """Whether there are tables at all; what they hold shows when they are read."""
    model = container.keys.get(MODEL)
    return model is not None and model.value not in NONE


def tokenizer_json(container: Container, config: ModelConfig) -> str:
    """The text of a tokenizer.json. TokenizerError names the file and the key of a table that is damaged."""
    tables = Keys(container, "tokenizer.ggml", TokenizerError)
    model, pattern = tables.value("model", "string"), tables.value("pre", "string")
    if model != "gpt2":
        raise tables.wrong("model", "'gpt2', byte-level BPE")
    if pattern not in SPLITS:
        raise tables.wrong("pre", f"one of {', '.join(SPLITS)}: how another splits text is not known")
    for name in NEVER:
        if tables.optional(name, "bool"):
            raise tables.wrong(name, "False or no such key")
    vocabulary, added = _entries(tables, config)
    adds_bos = tables.optional("add_bos_token", "bool")
    bos = _bos(tables, config, vocabulary) if (ADDS_BOS[pattern] if adds_bos is None else adds_bos) else None
    fields = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": _pre_tokenizer(SPLITS[pattern]),
        "post_processor": None if bos is None else _post_processor(*bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": _merges(tables, vocabulary)},
    }
    return json.dumps(fields, ensure_ascii=False)


def template_of(container: Container) -> tuple[str, str] | None:
    """The chat template and where it stands; None if there is none."""
    template, source = container.keys.get(TEMPLATE), f"{container.path}: {TEMPLATE}"
    if template is None:
        return None
    if template.kind != "string" or not _is_text(template.value):
        raise TokenizerError(f"{source}: {show(template.value)} ({template.kind}), expected a string of UTF-8")
    if len(template.value) > MAX_TEMPLATE_BYTES:
        raise TokenizerError(f"{source}: {len(template.value)} characters, expected at most {MAX_TEMPLATE_BYTES}")
    return template.value, source


def chat_of(container: Container, config: ModelConfig, text_of: Callable[[int], str | None]) -> Chat:
    """The file's template, which may ask for the texts of the ids that the file names."""
    ids = {
        "bos_token": config.bos_token_id,
        "eos_token": config.eos_token_ids[0] if config.eos_token_ids else None,
        "pad_token": config.pad_token_id,
    }
    texts = {name: text_of(token_id) for name, token_id in ids.items() if token_id is not None}
    special = {"bos_token": "", **{name: text for name, text in texts.items() if text is not None}}
    template, source = template_of(container) or (None, "built-in chat layout")
    return Chat(template, special, source)


def _entries(tables: Keys, config: ModelConfig) -> tuple[dict[str, int], list[dict[str, object]]]:
    """The vocabulary, without rows that have no entry, and which of it are added tokens."""
    tokens, types = tables.value("tokens", "array of string"), tables.value("token_type", "array of int32")
    if len(tokens) != config.vocab_size:
        raise tables.wrong("tokens", f"{config.vocab_size}, the rows of the embedding", f"{len(tokens)} entries")
    if len(types) != len(tokens):
        raise tables.wrong("token_type", f"{len(tokens)}, as tokenizer.ggml.tokens has", f"{len(types)} entries")
    vocabulary: dict[str, int] = {}
    added: list[dict[str, object]] = []
    for token_id, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind not in TYPES:
            raise tables.wrong(f"token_type[{token_id}]", f"one of {', '.join(map(str, TYPES))}", str(kind))
        if kind == UNUSED:
            continue
        if not text or not _is_text(text):
            raise tables.wrong(f"tokens[{token_id}]", "text in UTF-8", show(text))
        if text in vocabulary:
            raise tables.wrong(f"tokens[{token_id}]", "one id a text", f"{show(text)} as for id {vocabulary[text]}")
        vocabulary[text] = token_id
        if kind != NORMAL:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": token_id, "content": text, **flags, "special": kind == CONTROL})
    return vocabulary, added


def _merges(tables: Keys, vocabulary: Mapping[str, int]) -> list[str]:
    seen: dict[str, int] = {}
    for index, text in enumerate(tables.value("merges", "array of string")):
        first, _, second = text.partition(" ")
        for piece in (first, second, first + second):
            if piece not in vocabulary or " " in piece:
                expected = f"two pieces of tokenizer.ggml.tokens, which has no {show(piece)}"
                raise tables.wrong(f"merges[{index}]", expected, show(text))
        if text in seen:
            raise tables.wrong(f"merges[{index}]", "each merge once", f"{show(text)} as merges[{seen[text]}]")
        seen[text] = index
    return list(seen)


def _bos(tables: Keys, config: ModelConfig, vocabulary: Mapping[str, int]) -> tuple[str, int]:
    token_id = config.bos_token_id
    if token_id is None:
        raise tables.wrong("bos_token_id", "an id, as prompts begin with it (add_bos_token)", "absent")
    text = tables.value("tokens", "array of string")[token_id]
    if vocabulary.get(text) != token_id:
        raise tables.wrong("bos_token_id", "an id of a token", f"{token_id}, a row without an entry")
    return text, token_id


def _pre_tokenizer(pattern: str | None) -> dict[str, object]:
    """Text in pieces, each as the letters of its bytes."""
    letters: dict[str, object] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if pattern is None:
        return {**letters, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**letters, "use_regex": False}]}


def _post_processor(text: str, token_id: int) -> dict[str, object]:
    """The token before one text, or before each of two."""
    first, second = (
        [{"SpecialToken": {"id": text, "type_id": number}}, {"Sequence": {"id": name, "type_id": number}}]
        for number, name in enumerate("AB")
    )
    special = {text: {"id": text, "ids": [token_id], "tokens": [text]}}
    return {"type": "TemplateProcessing", "single": first, "pair": first + second, "special_tokens": special}


def _is_text(text: str) -> bool:
    """Whether the file had UTF-8 there: other bytes are read as lone surrogates."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)
