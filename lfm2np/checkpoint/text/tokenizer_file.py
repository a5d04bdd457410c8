"""What a tokenizer.json may hold: what LFM2's have, and what makes a text longer by no more than a few tokens.

`require_accepted` is for both tokenizers, and goes first: it says what of the format is taken at all. `require_plain`
is for the plain one, which nobody else checks: that each value is of the kind that the package `tokenizers` demands (by
serde's rules), and that nothing is asked for that plain_tokenizer.py does not do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from lfm2np.errors import TokenizerError
from lfm2np.values import show

MAX_PARTS, MAX_PATTERN, MAX_ENTRY, MAX_ADDED = 8, 2048, 1024, 2**20  # all but the first in characters
PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}  # of a Sequence


def require_accepted(raw: Mapping[str, Any], source: str) -> None:
    """TokenizerError that names the file, the key and the value."""
    _require_byte_level(raw, source)
    _require_bounded(raw, source)


def _require_byte_level(raw: Mapping[str, Any], source: str) -> None:
    """Byte-level BPE without dropout, which would make ids random."""
    model, decoder = raw.get("model"), raw.get("decoder")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        raise TokenizerError(f"{source}: model: {show(kind)}, expected BPE")
    if model.get("dropout"):
        raise TokenizerError(
            f"{source}: model.dropout: {show(model['dropout'])}, expected null (ids must not be random)"
        )
    kind = decoder.get("type") if isinstance(decoder, dict) else decoder
    if kind != "ByteLevel":
        raise TokenizerError(f"{source}: decoder: {show(kind)}, expected ByteLevel")
    kinds = [step.get("type") for step in steps(raw, "pre_tokenizer")]
    # A second ByteLevel would write the bytes of the first one's letters: each doubles the text.
    if not kinds or kinds != ["Split"] * (len(kinds) - 1) + ["ByteLevel"]:
        shown, expected = show(raw.get("pre_tokenizer")), "ByteLevel, alone or in a Sequence, last and after Splits"
        raise TokenizerError(f"{source}: pre_tokenizer: {shown}, expected {expected}")


def _require_bounded(raw: Mapping[str, Any], source: str) -> None:
    """Nothing that makes a text longer than by BOS and a few tokens like it, and no table of endless entries.

    A pattern that backtracks without end needs no rule: the library ends a match after 10**7 tries, with an error.
    """

    def require(fits: bool, key: str, value: str, expected: str) -> None:
        if not fits:
            raise TokenizerError(f"{source}: {key}: {value}, expected {expected}")

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
        text = raw["model"].get(name)
        require(not text, f"model.{name}", show(text), "null or an empty text")
    added = raw.get("added_tokens")
    contents = [token.get("content") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    vocabulary = raw["model"].get("vocab")
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


# --- for the plain tokenizer

Kind = tuple[Callable[[Any], bool], str]  # whether a value fits, and what was expected
MISSING = object()
MAX_ID = 2**32


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_ID


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**64


def _is_padding(value: object) -> bool:
    return value == "BatchLongest" or (
        isinstance(value, dict) and list(value) == ["Fixed"] and _is_count(value["Fixed"])
    )


def _or_null(kind: Kind) -> Kind:
    fits, expected = kind
    return (lambda value: value is MISSING or value is None or fits(value)), f"{expected} or null"


def _or_missing(kind: Kind) -> Kind:
    fits, expected = kind
    return (lambda value: value is MISSING or fits(value)), expected


BOOL: Kind = (lambda value: type(value) is bool), "true or false"
TEXT: Kind = _is_text, "a text"
ID: Kind = _is_id, f"an integer from 0 to {MAX_ID - 1}"
COUNT: Kind = _is_count, "a count"
OBJECT: Kind = (lambda value: isinstance(value, dict)), "an object"
LIST: Kind = (lambda value: isinstance(value, list)), "a list"
IDS: Kind = (lambda value: isinstance(value, list) and all(map(_is_id, value))), "a list of ids"
TEXTS: Kind = (lambda value: isinstance(value, list) and all(map(_is_text, value))), "a list of texts"
ZERO: Kind = (lambda value: type(value) in (int, float)), "0"  # dropout, of which the rest is refused before
VERSION: Kind = (lambda value: value == "1.0"), "'1.0'"
FILE = {
    "version": _or_missing(VERSION),
    "truncation": _or_null(OBJECT),
    "padding": _or_null(OBJECT),
    "added_tokens": _or_missing(LIST),
    "normalizer": _or_null(OBJECT),
    "pre_tokenizer": OBJECT,
    "post_processor": _or_null(OBJECT),
    "decoder": OBJECT,
    "model": OBJECT,
}
SIDE: Kind = (lambda value: value in ("Left", "Right")), "Left or Right"
STRATEGY: Kind = (lambda value: value in ("LongestFirst", "OnlyFirst", "OnlySecond")), "LongestFirst or the like"
IGNORED = {  # by transformers too
    "truncation": {"direction": _or_missing(SIDE), "max_length": COUNT, "strategy": STRATEGY, "stride": COUNT},
    "padding": {
        "strategy": (_is_padding, "BatchLongest or {'Fixed': a count}"),
        "direction": SIDE,
        "pad_to_multiple_of": _or_null(COUNT),
        "pad_id": ID,
        "pad_type_id": ID,
        "pad_token": TEXT,
    },
}
BYTE_LEVEL = {
    "add_prefix_space": BOOL,
    "trim_offsets": BOOL,
    "use_regex": _or_missing(BOOL),
}
ISOLATED: Kind = (lambda value: value == "Isolated"), "'Isolated'"
SPLIT = {"pattern": OBJECT, "behavior": ISOLATED, "invert": BOOL}  # inverting changes nothing of isolated pieces
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), BOOL)
ADDED = {"id": ID, "content": TEXT, **FLAGS}
MODEL = {
    "vocab": OBJECT,
    "merges": LIST,
    "dropout": _or_null(ZERO),
    "continuing_subword_prefix": _or_null(TEXT),
    "end_of_word_suffix": _or_null(TEXT),
    "ignore_merges": _or_null(BOOL),
    "unk_token": _or_null(TEXT),
    "byte_fallback": _or_null(BOOL),
    "fuse_unk": _or_null(BOOL),
}
TEMPLATE = {"type": TEXT, "single": LIST, "pair": LIST, "special_tokens": OBJECT}
INSERTED = {"id": TEXT, "ids": IDS, "tokens": TEXTS}


def merges(model: Mapping[str, Any]) -> list[Any]:
    """Pairs of texts, in either spelling: 'a b', of which a line "#version" is none, or ['a', 'b']."""
    lines = [merge for merge in model["merges"] if not (isinstance(merge, str) and merge.startswith("#version"))]
    return [line.split(" ") if isinstance(line, str) else line for line in lines]


def refused(source: str, key: str, value: object, expected: str) -> TokenizerError:
    return TokenizerError(f"{source}: {key}: {show(value)}, expected {expected}")


def require_plain(raw: Mapping[str, Any], source: str) -> None:
    """TokenizerError that names the file, the key and the value; for what `require_accepted` let pass."""
    try:
        json.dumps(raw, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as problem:
        raise refused(source, "a text", problem.object[problem.start], "valid Unicode, no lone surrogate") from None
    _fields(raw, FILE, "", source)
    _only(raw, FILE, "", source)
    for key, inner in PARTS.items():
        part = raw.get(key)
        if part is not None and part.get("type") == "Sequence":
            _fields(part, {inner: LIST}, key, source)
            _only(part, {"type": TEXT, inner: LIST}, key, source)
    for key, kinds in IGNORED.items():
        if raw.get(key) is not None:
            _fields(raw[key], kinds, key, source)
    _fields(raw["decoder"], BYTE_LEVEL, "decoder", source)
    for step in steps(raw, "pre_tokenizer"):
        _fields(step, SPLIT if step["type"] == "Split" else BYTE_LEVEL, "pre_tokenizer", source)
        pattern = step.get("pattern", {})
        if step["type"] == "Split" and not (list(pattern) in (["Regex"], ["String"]) and _is_text(*pattern.values())):
            raise refused(source, "pre_tokenizer.pattern", pattern, "{'Regex': a text} or {'String': a text}")
    for index, token in enumerate(raw.get("added_tokens", [])):
        _fields(token, ADDED, f"added_tokens[{index}]", source)
    _fields(raw["model"], MODEL, "model", source)
    _require_plain_model(raw["model"], source)
    for step in steps(raw, "post_processor"):
        _require_plain_processor(step, source)
    if sum(step["type"] == "TemplateProcessing" for step in steps(raw, "post_processor")) > 1:
        raise refused(source, "post_processor", raw["post_processor"], "at most one TemplateProcessing")


def _fields(part: Any, kinds: Mapping[str, Kind], where: str, source: str) -> None:
    """That a part is an object and has what it must have."""
    if not isinstance(part, dict):
        raise refused(source, where, part, "an object")
    for name, (fits, expected) in kinds.items():
        if not fits(part.get(name, MISSING)):
            raise refused(source, f"{where}.{name}" if where else name, part.get(name), expected)


def _only(part: Mapping[str, Any], names: Mapping[str, Kind], where: str, source: str) -> None:
    """That a part has no other keys: by them serde may take it for another type."""
    for name in part:
        if name not in names:
            raise refused(source, where or "keys", name, f"no key but {', '.join(names)}")


def _require_plain_processor(step: Mapping[str, Any], source: str) -> None:
    if step["type"] == "ByteLevel":
        _fields(step, BYTE_LEVEL, "post_processor", source)
        _only(step, {"type": TEXT, **BYTE_LEVEL}, "post_processor", source)
        return
    _fields(step, TEMPLATE, "post_processor", source)
    _only(step, TEMPLATE, "post_processor", source)
    special = step["special_tokens"]
    for name, token in special.items():
        _fields(token, INSERTED, f"post_processor.special_tokens[{show(name)}]", source)
    for key, names in (("single", ("A",)), ("pair", ("A", "B"))):
        where = f"post_processor.{key}"
        for piece in step[key]:
            kind = next(iter(piece)) if isinstance(piece, dict) and len(piece) == 1 else ""
            if kind not in ("Sequence", "SpecialToken"):
                raise refused(source, where, piece, "a Sequence or a SpecialToken")
            _fields(piece[kind], {"id": TEXT, "type_id": ID}, where, source)
            name = piece[kind]["id"]
            if name not in (names if kind == "Sequence" else special):
                raise refused(source, where, name, "a text, or one of special_tokens")


def _require_plain_model(model: Mapping[str, Any], source: str) -> None:
    vocabulary: dict[str, int] = model["vocab"]
    texts: dict[int, str] = {}
    for text, token_id in vocabulary.items():
        if not _is_text(text) or not _is_id(token_id):
            raise refused(source, f"model.vocab[{show(text)}]", token_id, "a text and its id")
        if token_id in texts:
            raise refused(
                source, f"model.vocab[{show(text)}]", token_id, f"another id than {show(texts[token_id])} has"
            )
        texts[token_id] = text
    if len(set(map(type, model["merges"]))) > 1:
        raise refused(source, "model.merges", "two spellings", "all as 'a b', or all as ['a', 'b']")
    for rank, pair in enumerate(merges(model)):
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_text, pair)):
            raise refused(source, f"model.merges[{rank}]", pair, "two texts")
        for text in (*pair, "".join(pair)):
            if text not in vocabulary:
                raise refused(
                    source, f"model.merges[{rank}]", pair, f"entries of model.vocab, which has no {show(text)}"
                )
