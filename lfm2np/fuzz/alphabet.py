"""The tokens of prompts. Any sequence of them is a text that the tokenizer turns back into the same tokens.

So servers that take only text get the same prompts, and no token has a special meaning.
"""

from __future__ import annotations

import random

from lfm2np.checkpoint.tokenizer import Tokenizer

LARGEST, TRIED, SPECIAL = 64, 4000, 8  # without a tokenizer, ids below SPECIAL count as control tokens


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
        if is_plain(tokenizer, token) and all(row_text(tokenizer, row) is not None for row in rows_with(chosen, token)):
            chosen.append(token)
    return tuple(chosen) if len(chosen) > 1 else tuple(ids[:LARGEST])


def rows_with(chosen: list[int], token: int) -> list[list[int]]:
    """Sequences in which the token is next to itself and to each of those chosen, on both sides."""
    around = [each for other in chosen for each in (other, token)]
    return [[token], [token, token], [token, *around, *chosen]]


def is_plain(tokenizer: Tokenizer, token: int) -> bool:
    """Whole printable characters: no special token, no piece of a character, no control."""
    try:
        text = tokenizer.token_bytes(token).decode()
    except UnicodeDecodeError:
        return False
    return bool(text) and text.isprintable()


def row_text(tokenizer: Tokenizer, ids: list[int]) -> str | None:
    """The text that the tokenizer turns into these ids, without a BOS; None if there is none."""
    text = tokenizer.decode(ids)
    return text if text and tokenizer.encode_more(text) == ids else None
