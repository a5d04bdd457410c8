"""Tokens of which prompts are made: such that any row of them is a text that the tokenizer turns into the same tokens.

Servers that take only text can then be asked the same, and no token of the prompt means something special.
"""

from __future__ import annotations

import random

from lfm2np.checkpoint.tokenizer import Tokenizer

LARGEST, TRIED, SPECIAL = 64, 4000, 8  # ids below SPECIAL are those of controls, in a vocabulary without a tokenizer


def alphabet_of(tokenizer: Tokenizer | None, vocab_size: int, seed: int = 0) -> tuple[int, ...]:
    """At most LARGEST token ids, the same for the same seed."""
    ids = list(range(min(SPECIAL, vocab_size - 1), vocab_size))
    random.Random(seed).shuffle(ids)
    if tokenizer is None:
        return tuple(ids[:LARGEST])
    chosen: list[int] = []
    for token in ids[:TRIED]:
        if len(chosen) == LARGEST:
            break
        if is_plain(tokenizer, token) and all(is_text(tokenizer, row) for row in rows_with(chosen, token)):
            chosen.append(token)
    return tuple(chosen) if len(chosen) > 1 else tuple(ids[:LARGEST])


def rows_with(chosen: list[int], token: int) -> list[list[int]]:
    """Rows in which the token meets itself and each of those chosen, on both sides."""
    around = [one for other in chosen for one in (other, token)]
    return [[token], [token, token], [token, *around, *chosen]]


def is_plain(tokenizer: Tokenizer, token: int) -> bool:
    """Whole printable characters: no special token, no piece of a character, no control."""
    try:
        text = tokenizer.token_bytes(token).decode()
    except UnicodeDecodeError:
        return False
    return bool(text) and text.isprintable()


def is_text(tokenizer: Tokenizer, ids: list[int]) -> bool:
    return row_text(tokenizer, ids) is not None


def row_text(tokenizer: Tokenizer, ids: list[int]) -> str | None:
    """The text of a row of ids without the BOS, which the tokenizer turns into them again; None if there is none."""
    text = tokenizer.decode(ids)
    return text if text and tokenizer.encode_more(text) == ids else None
