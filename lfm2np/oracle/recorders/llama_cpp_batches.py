"""Which rows of llama.cpp's micro-batches belong to a request: how a batch is split, and where its cache has a row.

A model with recurrent memory gets micro-batches with equal numbers of rows of each of their sequences, one sequence
after another. Source: llama.cpp 0c1e570, llama_batch_allocr::split_equal in src/llama-batch.cpp.

T rows of a micro-batch, H query heads, G key/value heads, E head_dim, C cells of the cache that it sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.engines.target import TargetError

Array = NDArray[Any]
OUTPUTS, LOOKS_AT = "out_ids", "looks_at"
INPUTS = ("tokens", "positions", "cells", OUTPUTS)  # of a graph, beside its tensors


@dataclass(frozen=True)
class Row:
    """A token of a batch."""

    sequence: int
    position: int
    token: int


@dataclass(frozen=True)
class Place:
    """Rows start .. stop-1 of a micro-batch: those of its sequence number `number`."""

    number: int
    start: int
    stop: int


def split_equal(rows: Sequence[Row], most: int, sequential: bool) -> Iterator[list[Row]]:
    """Micro-batches of at most `most` rows; sequential: the sequences of one have consecutive numbers."""
    waiting: dict[int, list[Row]] = {}
    for row in rows:
        waiting.setdefault(row.sequence, []).append(row)
    while waiting:
        chosen: list[int] = []
        for sequence in waiting:  # in the order of their first rows
            if len(chosen) <= most and not (sequential and chosen and sequence != chosen[-1] + 1):
                chosen.append(sequence)
        count = min(len(waiting[sequence]) for sequence in chosen)
        count = min(count, max(1, most // len(chosen)))
        yield [row for sequence in chosen for row in waiting[sequence][:count]]
        waiting = {
            sequence: left
            for sequence, rows_left in waiting.items()
            if (left := rows_left[count:] if sequence in chosen else rows_left)
        }


def place_of(rows: Sequence[Row], sequence: int) -> Place | None:
    """The rows of a sequence, if it has any."""
    indices = [index for index, row in enumerate(rows) if row.sequence == sequence]
    if not indices:
        return None
    return Place(indices[0] // len(indices), indices[0], indices[-1] + 1)


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of the cache that an attention sees: in each of its streams those from `first` on."""

    first: int  # number of the first stream's first one
    between: int  # from a stream's first to the next one's
    streams: int
    seen: int  # C, of each

    def stream_of(self, row: int, rows: int) -> int:
        """A micro-batch has equal parts, one per stream."""
        return row // (rows // self.streams)

    def within(self, stream: int, numbers: Sequence[int]) -> Array:
        """Indices of cells among those of a stream. TargetError if one is not among them."""
        places = np.array(numbers, np.int64) - self.first - stream * self.between
        if not np.all((places >= 0) & (places < self.seen)):
            expected = f"{self.seen} from {self.first} on in stream {stream}"
            raise TargetError(f"llama.cpp: cells {list(numbers)}, expected those of {expected}")
        return places


def cached_rows(cached: Array, stream: int, cells: Array) -> Array:
    """[streams, G, C, E] -> [cells, G * E]"""
    rows: Array = cached[stream][:, cells].transpose(1, 0, 2)
    return rows.reshape(len(cells), -1)


def scores_by_row(scores: Array, place: Place, stream: int, cells: Array, tokens: int) -> Array:
    """[streams, H, T / streams, C] -> [t, H, tokens] of one sequence: by position, zeros after the last cell."""
    stream_scores = scores[stream]
    start = place.start - stream * stream_scores.shape[1]
    rows = stream_scores[:, start : start + place.stop - place.start][..., cells]  # [H, t, cells]
    return np.pad(rows.transpose(1, 0, 2), [(0, 0), (0, 0), (0, tokens - len(cells))])


def sequence_tensors(
    graph: Mapping[str, Any], place: Place, cells: Sequence[int], tokens: int
) -> Iterator[tuple[str, Array]]:
    """A sequence's part of each tensor of a micro-batch.

    cells   those of all its tokens so far, in order
    tokens  of the whole dump: scores have as many positions
    """
    for name, values in graph.items():
        prefix, _, part = name.rpartition(".")
        if part == "state":
            yield name, values[place.number][None]
        elif part in ("keys", "values", "scores", "weights"):
            looks_at: Cells = graph[f"{prefix}.{LOOKS_AT}"]
            stream = looks_at.stream_of(place.start, len(graph["tokens"]))
            seen = looks_at.within(stream, cells)
            if part in ("keys", "values"):
                yield f"{name}_read", cached_rows(values, stream, seen)
            else:
                yield name, scores_by_row(values, place, stream, seen, tokens)
        elif name not in INPUTS and part != LOOKS_AT:
            yield name, values[place.start : place.stop]
