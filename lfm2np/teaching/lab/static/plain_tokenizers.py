"""What the laboratory needs of the package `tokenizers`, for a browser that has none: there it has that name.

It makes the ids of the fixtures' tokenizer.json, whose rules alone it knows: added tokens are cut out of a text, a
pattern splits what is between them, and the bytes of a piece merge, neighbours of the lowest rank first.
Which characters are letters or numbers is in the tables of Python's `unicodedata`, the package has others: they differ
in characters that are new. Source: tokenizers, models/bpe/word.rs (merge_all).
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from lfm2np.checkpoint.text.tokenizer import BYTE_OF_LETTER, entry_bytes

LETTER_OF_BYTE = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
# The fixtures' pattern, r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+", for what `kind` says of each character.
KINDS = re.compile(" ?L+| ?N| ?x+|[ s]+")


@dataclass(frozen=True)
class AddedToken:
    content: str
    special: bool


@dataclass(frozen=True)
class Encoding:
    ids: list[int]


class Tokenizer:
    """Of a tokenizer.json that has passed `require_accepted`."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        model, added, self._post_processor = raw["model"], raw["added_tokens"], raw["post_processor"]
        self._vocabulary: dict[str, int] = model["vocab"]
        self._entries = {token_id: text for text, token_id in self._vocabulary.items()}
        self._added = {token["id"]: AddedToken(token["content"], token["special"]) for token in added}
        longest_first = sorted((token.content for token in self._added.values()), key=len, reverse=True)
        self._cuts = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._ranks = {(first, second): rank for rank, (first, second) in enumerate(model["merges"])}

    @classmethod
    def from_buffer(cls, content: bytes) -> Self:
        return cls(json.loads(content))

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        return self._vocabulary

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self._added

    def id_to_token(self, token_id: int) -> str | None:
        return self._entries.get(token_id)

    def encode(self, text: str, add_special_tokens: bool) -> Encoding:
        ids = list(self._ids(text))
        inserted = {name: token["ids"] for name, token in self._post_processor["special_tokens"].items()} | {"A": ids}
        parts = [inserted[part["id"]] for (part,) in map(dict.values, self._post_processor["single"])]
        return Encoding([*itertools.chain(*parts)] if add_special_tokens else ids)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[Encoding]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        special = {token_id for token_id, token in self._added.items() if token.special}
        known = [token_id for token_id in ids if token_id in self._entries and token_id not in special]
        return b"".join(entry_bytes(self._entries[token_id]) for token_id in known).decode("utf-8", "replace")

    def _ids(self, text: str) -> Iterator[int]:
        for index, part in enumerate(self._cuts.split(text)):
            if index % 2:  # an added token
                yield self._vocabulary[part]
                continue
            for match in KINDS.finditer("".join(map(kind, part))):
                yield from self._merged(part[match.start() : match.end()])

    def _merged(self, piece: str) -> list[int]:
        """Of all neighbours that can merge those of the lowest rank do, the leftmost first, until none can."""
        parts = [LETTER_OF_BYTE[byte] for byte in piece.encode()]
        while ranked := [
            (self._ranks[pair], place) for place, pair in enumerate(itertools.pairwise(parts)) if pair in self._ranks
        ]:
            _, place = min(ranked)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        return [self._vocabulary[part] for part in parts]


def kind(character: str) -> str:
    """L for a letter, N for a number, a space for itself, s for other white space, x for the rest."""
    category = unicodedata.category(character)[0]
    if character == " " or category in "LN":
        return " " if character == " " else category
    return "s" if category == "Z" or character in "\t\n\v\f\r\x85" else "x"
