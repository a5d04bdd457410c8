"""Byte-level BPE in plain Python, to be read from top to bottom: a tokenizer.json's texts as ids, and back.

The package `tokenizers` is what runs where it is installed. This takes its place where that has no build, as in the
browser, and is the reference that it is compared with: the same ids and the same text, or a TokenizerError that names
file, key and value of what is not done here (parts of patterns, splits that remove or join pieces, unknown tokens).

A text becomes ids in five steps:
1. Added tokens are cut out, the leftmost and there the longest first; those that are "normalized" after step 2.
2. What is between is normalised: NFC, or not at all.
3. Patterns split it into pieces.
4. A piece is its UTF-8 bytes, each of which has an id; then neighbours merge, those of the lowest rank first.
5. The post-processor puts its ids around them, if special tokens are wanted.

Which characters are letters, digits or blanks is in the tables of Python's `unicodedata` (Unicode 14 in Python 3.11,
15 in 3.12), and for `tokenizers` 0.23 in those of Unicode 16; its NFC is of Unicode 10. So both are equal for text
whose characters both tables have: tests/checkpoint/test_plain_tokenizer.py counts the others.
Source: tokenizers, tokenizer/added_vocabulary.rs, pre_tokenizers/byte_level.rs, models/bpe/word.rs (merge_all).
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from lfm2np.checkpoint.text.split_pattern import PatternError, compiled, is_space, is_word
from lfm2np.checkpoint.text.tokenizer_file import merges, refused, require_plain, steps

CACHED_PIECES, CACHED_LENGTH = 2**16, 256  # a longer piece, in characters, is merged each time
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # what "use_regex" means
SHIFT = 2**32  # in the queue of merges: rank * SHIFT + position
GONE = -1  # no id: what has merged into its left neighbour


def _byte_alphabet() -> dict[str, int]:
    """Letter -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest follows from U+0100 on.

    Source: GPT-2's bytes_to_unicode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_LETTER: Mapping[str, int] = _byte_alphabet()
LETTER_OF_BYTE: Mapping[int, str] = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}


Texts = tuple[Mapping[str, int], Mapping[str, Sequence[int]]]  # of added tokens: text -> id, first letter -> lengths


def entry_bytes(entry: str) -> bytes:
    """What an entry of the vocabulary stands for; one with a letter outside the alphabet stands for itself."""
    try:
        return bytes(BYTE_OF_LETTER[letter] for letter in entry)
    except KeyError:
        return entry.encode("utf-8")


class PlainTokenizer:
    """A backend of `Tokenizer`: of a parsed tokenizer.json that `require_accepted` has let pass."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        require_plain(raw, source)
        model = raw["model"]
        self._vocabulary: dict[str, int] = model["vocab"]
        self._entries = {token_id: text for text, token_id in self._vocabulary.items()}
        self._ignores_merges = bool(model.get("ignore_merges"))
        self._id_of_byte = [self._vocabulary.get(LETTER_OF_BYTE[byte]) for byte in range(256)]
        if None in self._id_of_byte and (model.get("unk_token") is not None or model.get("byte_fallback")):
            letter = LETTER_OF_BYTE[self._id_of_byte.index(None)]
            raise refused(source, "model.vocab", f"no {letter!r}", "all letters, beside unk_token or byte_fallback")
        pairs = merges(model)
        self._rank = {(self._vocabulary[a], self._vocabulary[b]): rank for rank, (a, b) in enumerate(pairs)}
        self._merged_id = [self._vocabulary[a + b] for a, b in pairs]  # by rank
        self._is_nfc = bool(steps(raw, "normalizer"))
        self._added = _added_tokens(raw.get("added_tokens", []), self._vocabulary, source)
        self._special = {token["content"] for token in self._added.values() if token["special"]}
        self._raw_texts, self._nfc_texts = (self._texts(is_normalized, source) for is_normalized in (False, True))
        *splits, byte_level = steps(raw, "pre_tokenizer")
        self._patterns = [_pattern_of(step["pattern"], source) for step in splits]
        self._adds_space: bool = byte_level["add_prefix_space"]
        self._last_patterns = [compiled(GPT2)] if byte_level.get("use_regex", True) else []
        self._before, self._after = _around(steps(raw, "post_processor"))
        self._cached = functools.lru_cache(CACHED_PIECES)(self._merged)

    def vocabulary(self) -> dict[str, int]:
        return self._vocabulary | {token["content"]: token_id for token_id, token in self._added.items()}

    def special_texts(self) -> set[str]:
        return self._special

    def entry(self, token_id: int) -> str | None:
        token = self._added.get(token_id)
        return self._entries.get(token_id) if token is None else self._spelling(token)

    def decode(self, ids: Iterable[int]) -> str:
        entries = [entry for entry in map(self.entry, ids) if entry is not None and entry not in self._special]
        return b"".join(map(entry_bytes, entries)).decode("utf-8", "replace")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        for raw_id, part in self._cut(text, self._raw_texts):
            if raw_id is not None:
                ids.append(raw_id)
                continue
            normal = unicodedata.normalize("NFC", part) if self._is_nfc else part
            for nfc_id, words in self._cut(normal, self._nfc_texts):
                ids += self._ids_of_words(words) if nfc_id is None else [nfc_id]
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def _cut(self, text: str, texts: Texts) -> Iterator[tuple[int | None, str]]:
        """The added tokens in a text, each as (id, ""), and what is between as (None, part).

        Where a token is found, no other is looked for inside it, not even if it has to be a single word and is none.
        """
        id_of, lengths = texts
        done = place = 0
        letters = re.compile(f"[{''.join(map(re.escape, lengths))}]") if lengths else None
        while letters is not None and (start := letters.search(text, place)):
            first = start.start()
            parts = (text[first : first + length] for length in lengths[text[first]])
            content = next((part for part in parts if part in id_of), None)
            if content is None:
                place = first + 1
                continue
            token_id, place = id_of[content], first + len(content)
            token, last = self._added[token_id], place
            neighbours = text[max(first - 1, 0) : first] + text[last : last + 1]
            if token["single_word"] and any(map(is_word, neighbours)):
                continue
            while token["lstrip"] and first > done and is_space(text[first - 1]):
                first -= 1
            while token["rstrip"] and last < len(text) and is_space(text[last]):
                last += 1
            if done < first:
                yield None, text[done:first]
            yield token_id, ""
            done = last
        if done < len(text):
            yield None, text[done:]

    def _ids_of_words(self, text: str) -> list[int]:
        pieces = [text]
        for pattern in self._patterns:
            pieces = _split(pattern, pieces)
        if self._adds_space:
            pieces = [piece if piece[0] == " " else f" {piece}" for piece in pieces]
        for pattern in self._last_patterns:
            pieces = _split(pattern, pieces)
        ids: list[int] = []
        for piece in pieces:
            ids += self._cached(piece) if len(piece) <= CACHED_LENGTH else self._merged(piece)
        return ids

    def _merged(self, piece: str) -> list[int]:
        """The ids of a piece: of all pairs of neighbours that can merge, the one of the lowest rank does, the leftmost
        first, until none can.

        The queue holds such pairs; one that is no longer there when its turn comes is dropped.
        """
        content = piece.encode("utf-8")
        if self._ignores_merges:
            whole = self._vocabulary.get("".join(LETTER_OF_BYTE[byte] for byte in content))
            if whole is not None:
                return [whole]
        ids = [token_id for byte in content if (token_id := self._id_of_byte[byte]) is not None]
        rank_of, length = self._rank, len(ids)
        pairs = enumerate(itertools.pairwise(ids))
        queue = [rank_of[pair] * SHIFT + position for position, pair in pairs if pair in rank_of]
        heapify(queue)
        left_of, right_of = list(range(-1, length)), list(range(1, length + 1))
        ids.append(GONE)  # right of the last, and as ids[-1] left of the first
        while queue:
            rank, position = divmod(heappop(queue), SHIFT)
            right = right_of[position]
            if rank_of.get((ids[position], ids[right])) != rank:
                continue
            ids[position], ids[right] = self._merged_id[rank], GONE
            left, after = left_of[position], right_of[right]
            right_of[position], left_of[after] = after, position
            for first, second in ((left, position), (position, after)):
                next_rank = rank_of.get((ids[first], ids[second]))
                if next_rank is not None:
                    heappush(queue, next_rank * SHIFT + first)
        return [token_id for token_id in ids if token_id != GONE]

    def _spelling(self, token: Mapping[str, Any]) -> str:
        """How an added token is matched, and decoded."""
        content: str = token["content"]
        return unicodedata.normalize("NFC", content) if self._is_nfc and token["normalized"] else content

    def _texts(self, is_normalized: bool, source: str) -> Texts:
        """Of the added tokens that are matched before or after NFC; the lengths from the longest on."""
        id_of: dict[str, int] = {}
        lengths: dict[str, set[int]] = {}
        for token_id, token in self._added.items():
            text = self._spelling(token)
            if token["normalized"] == is_normalized:
                if id_of.setdefault(text, token_id) != token_id:
                    raise refused(source, "added_tokens", text, "texts that differ, also after NFC")
                lengths.setdefault(text[0], set()).add(len(text))
        blank = next(filter(is_space, lengths), None)
        if blank is not None and any(self._added[token_id]["rstrip"] for token_id in id_of.values()):
            raise refused(source, "added_tokens", blank, "no blank first, as another token's rstrip would take it")
        return id_of, {letter: sorted(each, reverse=True) for letter, each in lengths.items()}


def _added_tokens(
    tokens: Sequence[Mapping[str, Any]], vocabulary: Mapping[str, int], source: str
) -> dict[int, Mapping[str, Any]]:
    """By id: that of the vocabulary, else the next behind as many as that has. The id in the file is not read."""
    by_id: dict[int, Mapping[str, Any]] = {}
    next_id = len(vocabulary)
    for token in tokens:
        content = token["content"]
        if not content:
            continue
        token_id = vocabulary.get(content, next_id)
        next_id += content not in vocabulary
        if token_id in by_id:
            raise refused(source, "added_tokens", content, f"an id of its own, not {token_id}")
        by_id[token_id] = token
    return by_id


def _pattern_of(pattern: Mapping[str, str], source: str) -> re.Pattern[str]:
    ((kind, text),) = pattern.items()
    if not text:
        raise refused(source, "pre_tokenizer.pattern", text, "at least a character")
    try:
        return re.compile(re.escape(text)) if kind == "String" else compiled(text)
    except PatternError as problem:
        raise refused(source, "pre_tokenizer.pattern", text, f"what the plain tokenizer knows; {problem}") from None


def _split(pattern: re.Pattern[str], pieces: Iterable[str]) -> list[str]:
    """Each piece where the pattern matches, and what is between."""
    parts = []
    for piece in pieces:
        done = 0
        for match in pattern.finditer(piece):
            first, last = match.span()
            if done < first:
                parts.append(piece[done:first])
            parts.append(piece[first:last])
            done = last
        if done < len(piece):
            parts.append(piece[done:])
    return parts


def _around(processors: Iterable[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
    """The ids before a text and those behind it."""
    around: tuple[list[int], list[int]] = ([], [])
    for step in processors:
        is_behind = False
        for piece in step.get("single", []):  # of a TemplateProcessing
            if "Sequence" in piece:
                is_behind = True
            else:
                around[is_behind].extend(step["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
    return around
