"""What a tokenizer.json may hold: what LFM2's have, and what makes a text longer by no more than a few tokens.

`require_accepted` goes before the package `tokenizers`, which checks the kind of each value by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lfm2np.errors import TokenizerError
from lfm2np.values import show

MAX_PARTS, MAX_PATTERN, MAX_ENTRY, MAX_ADDED = 8, 2048, 1024, 2**20  # all but the first in characters
PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}  # of a Sequence


def require_accepted(raw: Mapping[str, Any], source: str) -> None:
    """TokenizerError that names the file, the key and the value.

    Byte-level BPE without dropout, which would make ids random; nothing that makes a text longer than by BOS and a few
    tokens like it, and no table of endless entries. A pattern that backtracks without end needs no rule: the library
    ends a match after 10**7 tries, with an error.
    """

    def require(fits: bool, key: str, value: str, expected: str) -> None:
        if not fits:
            raise TokenizerError(f"{source}: {key}: {value}, expected {expected}")

    model, decoder = (part if isinstance(part := raw.get(key), dict) else {} for key in ("model", "decoder"))
    kind = model.get("type", "BPE") if model else raw.get("model")
    require(kind == "BPE" and bool(model), "model", show(kind), "BPE")
    require(not model.get("dropout"), "model.dropout", show(model.get("dropout")), "null (ids must not be random)")
    require(decoder.get("type") == "ByteLevel", "decoder", show(decoder.get("type", raw.get("decoder"))), "ByteLevel")
    kinds = [step.get("type") for step in steps(raw, "pre_tokenizer")]
    # A second ByteLevel would write the bytes of the first one's letters: each doubles the text.
    is_right = bool(kinds) and kinds == ["Split"] * (len(kinds) - 1) + ["ByteLevel"]
    last = "ByteLevel, alone or in a Sequence, last and after Splits"
    require(is_right, "pre_tokenizer", show(raw.get("pre_tokenizer")), last)
    for key in PARTS:
        require(len(steps(raw, key)) <= MAX_PARTS, key, f"{len(steps(raw, key))} parts", f"at most {MAX_PARTS}")
    for step in steps(raw, "normalizer"):
        require(step.get("type") == "NFC", "normalizer", show(step), "null or NFC: others may make a text endless")
    for step in steps(raw, "pre_tokenizer"):
        size = len(str(step.get("pattern")))
        require(size <= MAX_PATTERN, "pre_tokenizer", f"a pattern of {size} characters", f"at most {MAX_PATTERN}")
    few = f"ByteLevel, or TemplateProcessing: the text once, at most {MAX_PARTS} pieces, {MAX_PARTS} ids a token"
    for step in steps(raw, "post_processor"):
        require(step.get("type") == "ByteLevel" or _adds_few(step), "post_processor", show(step), few)
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        require(not model.get(name), f"model.{name}", show(model.get(name)), "null or an empty text")
    added, vocabulary = raw.get("added_tokens"), model.get("vocab")
    contents = [token.get("content") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    for key, texts in (("added_tokens", contents), ("model.vocab", vocabulary if isinstance(vocabulary, dict) else ())):
        longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
        require(longest <= MAX_ENTRY, key, f"an entry of {longest} characters", f"at most {MAX_ENTRY}")
    total = sum(len(text) for text in contents if isinstance(text, str))
    require(total <= MAX_ADDED, "added_tokens", f"{total} characters", f"at most {MAX_ADDED} of all entries together")


def steps(raw: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The parts of a Sequence, or the only one; of null none. What is no object is one without a type."""
    part = raw.get(key)
    inner = part.get(PARTS[key]) if isinstance(part, dict) and part.get("type") == "Sequence" else part
    parts = inner if isinstance(inner, list) else [] if inner is None else [inner]
    return [step if isinstance(step, dict) else {} for step in parts]


def _adds_few(step: Mapping[str, Any]) -> bool:
    """Whether a post-processor is a TemplateProcessing that leaves a text as long as it is, but for a few tokens."""
    single, special = step.get("single"), step.get("special_tokens")
    if step.get("type") != "TemplateProcessing" or not isinstance(single, list) or not isinstance(special, dict):
        return False
    ids = [token.get("ids") if isinstance(token, dict) else None for token in special.values()]
    texts = [piece for piece in single if isinstance(piece, dict) and "Sequence" in piece]
    is_few = all(isinstance(each, list) and len(each) <= MAX_PARTS for each in ids)
    return is_few and len(texts) == 1 and len(single) <= MAX_PARTS
