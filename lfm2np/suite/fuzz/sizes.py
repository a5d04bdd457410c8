"""Sizes of a run and of the engine, around which lengths are drawn: given, reported, or assumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # it needs NumPy, which a help does not
    from lfm2np.oracle.engines.target import Abilities

GIVEN, REPORTED, MODELS, ASSUMED = "given", "reported", "the model's", "assumed"
BLOCK, CHUNK, SLOTS = 16, 64, 8  # assumed: of vLLM, SGLang and small engines; longer requests cross draw_traces.FAR
EXAMPLES, REPLAYS = 200, 10  # of a run; of a trace that is named
LEAST_CONTEXT = 4  # tokens: a BOS, a token, and an answer to it, with one to spare


class Size(NamedTuple):
    """`source` is one of the words above."""

    value: int
    source: str


Sizes = Mapping[str, Size]  # by the names of engines.protocol.TOLD


def sizes_of(given: Mapping[str, int | None], abilities: Abilities, longest: Size) -> Sizes:
    """`longest`: most tokens of a request."""

    def size(name: str, reported: int | None, assumed: int) -> Size:
        number = given[name]
        if number is not None:
            return Size(number, GIVEN)
        return Size(assumed, ASSUMED) if reported is None else Size(reported, REPORTED)

    return {
        "block_size": size("block_size", abilities.block, BLOCK),
        "max_num_batched_tokens": size("max_num_batched_tokens", abilities.chunk, CHUNK),
        "max_num_seqs": size("max_num_seqs", abilities.slots, SLOTS),
        "max_model_len": longest,
    }


def assumed(sizes: Sizes) -> list[str]:
    return [name for name, size in sizes.items() if size.source == ASSUMED]
