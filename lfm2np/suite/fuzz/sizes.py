"""Sizes of a run and of the engine, around which lengths are drawn: given, reported, or plausible ones in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they need NumPy and Hypothesis, which a help does not
    from lfm2np.oracle.engines.target import Abilities
    from lfm2np.suite.fuzz.draw_traces import Around

GIVEN, REPORTED, MODELS, ASSUMED = "given", "reported", "the model's", "assumed"
BLOCKS, CHUNKS, SLOTS = (16, 64), (64, 256, 512), (8,)  # of vLLM, SGLang and small engines
EXAMPLES, REPLAYS = 200, 10  # of a run; of a trace that is named
LEAST_CONTEXT = 4  # tokens: a BOS, a token, and an answer to it, with one to spare
CONTEXT = 6  # chunks, of which a chunk that is assumed sees at most so many: more and shorter requests to a trace


@dataclass(frozen=True)
class Size:
    """`values` are tried in turn; `source` is one of the words above."""

    values: tuple[int, ...]
    source: str


Sizes = Mapping[str, Size]  # by the names of engines.protocol.TOLD


def sizes_of(given: Mapping[str, int | None], abilities: Abilities, longest: Size) -> Sizes:
    """`longest`: most tokens of a request."""

    def size(name: str, reported: int | None, assumed: Sequence[int]) -> Size:
        number = given[name]
        if number is not None:
            return Size((number,), GIVEN)
        return Size(tuple(assumed), ASSUMED) if reported is None else Size((reported,), REPORTED)

    return {
        "block_size": size("block_size", abilities.block, BLOCKS),
        "max_num_batched_tokens": size("max_num_batched_tokens", abilities.chunk, CHUNKS),
        "max_num_seqs": size("max_num_seqs", abilities.slots, SLOTS),
        "max_model_len": longest,
    }


def arounds_of(around: Around, sizes: Sizes) -> tuple[Around, ...]:
    """One for each combination of sizes that may be the engine's."""
    blocks, chunks, slots = (sizes[name] for name in ("block_size", "max_num_batched_tokens", "max_num_seqs"))
    (longest,) = sizes["max_model_len"].values
    return tuple(
        replace(
            around,
            block=block,
            chunk=chunk,
            slots=slot,
            longest=min(longest, CONTEXT * chunk) if chunks.source == ASSUMED else longest,
        )
        for block, chunk, slot in product(blocks.values, chunks.values, slots.values)
    )


def assumed(sizes: Sizes) -> list[str]:
    return [name for name, size in sizes.items() if size.source == ASSUMED]
