"""Which lengths are tried beside the small ones: those around the borders of an engine's own blocks and chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hypothesis import strategies as st

from lfm2np.errors import RequestError

ALPHABET = (3, 4, 5)  # token ids of prompts
BEGINNING = (3, 4, 3, 5, 4, 3, 3, 5, 5, 4, 3, 4, 5, 3)
CHUNKS_DEEP = 5
LEAST_LENGTH = 32  # small requests must fit
SMALL_EXAMPLES = 4  # to one at the engine's own lengths


@dataclass(frozen=True)
class Lengths:
    """An engine's sizes, in tokens and requests. `longest` is that of a prompt with its output."""

    block_size: int = 16
    chunk: int = 48
    max_num_seqs: int = 8
    longest: int = 240


def lengths_of(sizes: Mapping[str, int], where: str) -> Lengths:
    """What sizes by the names of engines.protocol.TOLD come to; five chunks or blocks deep if no max_model_len is less.

    RequestError, which names `where` they come from, for a size that is none.
    """
    for name, size in sizes.items():
        least = LEAST_LENGTH if name == "max_model_len" else 1
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise RequestError(f"{where}: {name} {size!r}: expected a whole number of at least {least}")
    usual = Lengths()
    block_size = sizes.get("block_size", usual.block_size)
    chunk = sizes.get("max_num_batched_tokens", max(usual.chunk, block_size))
    longest = max(LEAST_LENGTH, CHUNKS_DEEP * max(block_size, chunk))
    return Lengths(
        block_size=block_size,
        chunk=chunk,
        max_num_seqs=sizes.get("max_num_seqs", usual.max_num_seqs),
        longest=min(longest, sizes.get("max_model_len", longest)),
    )


def at_lengths(
    strategy: Callable[[Lengths | None], st.SearchStrategy[Any]],
) -> Callable[[Lengths], st.SearchStrategy[Any]]:
    """Its small examples, without lengths, and some that reach over blocks and chunks of the engine's own size."""
    return lambda lengths: st.sampled_from((*(None,) * SMALL_EXAMPLES, lengths)).flatmap(strategy)


@lru_cache(maxsize=4096)
def common_text(length: int) -> tuple[int, ...]:
    """The text that prompts begin with: the same for all lengths, without a period that any of them has."""
    ids, state = list(BEGINNING[:length]), 1
    while len(ids) < length:
        state = (state * 1103515245 + 12345) % 2**31
        ids.append(ALPHABET[(state >> 16) % len(ALPHABET)])
    return tuple(ids)
