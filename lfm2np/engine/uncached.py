"""The network of reference.py over several whole sequences in one flat array: no padding, and no cache to keep.

What step.py does for one step of the engine, for sequences that are there from their first token to their last. The
two share reference.py and no line of their own: the oracle's truth comes from here, and faults are put in there.
T tokens of S sequences, each a run of rows; only attention and the convolution look at which row is whose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import Numerics
from lfm2np.errors import NumericsError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.processor import require_ieee
from lfm2np.truth.reference import Mixing, final_states
from lfm2np.truth.rope import RotaryTable, rotary_table
from lfm2np.truth.weights import AttentionWeights, ModelWeights, ShortConvWeights

Array = NDArray[Any]


@dataclass(eq=False)
class Run:
    """One sequence's rows of the flat batch, and why its numbers are of no use, if they are not.

    before  rows of other sequences that it begins with, from its first token on: they are computed once
    """

    rows: slice
    before: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    error: NumericsError | None = None

    @property
    def visible(self) -> slice | NDArray[np.int64]:
        """All rows of the sequence."""
        rows = self.rows
        return np.concatenate([self.before, np.arange(rows.start, rows.stop)]) if len(self.before) else rows


def hidden_states(
    weights: ModelWeights,
    config: ModelConfig,
    numerics: Numerics,
    sequences: Sequence[Sequence[int]],
    table: RotaryTable = rotary_table,
) -> tuple[Array, list[Run]]:
    """Final hidden states [T, D] of sequences from position 0 on, one after another, and the run of each.

    What several begin with is computed once, if no token goes to experts. An overflow that attention meets is the
    `error` of its own run; those in the logits are for the caller to see.
    table  gives the angles of positions, as rope.rotary_table does
    """
    require_ieee()
    runs, ids, positions = runs_of(sequences)
    if not config.sparse_layers:
        branches, rows = branches_of(sequences)
        first = np.unique(rows, return_index=True)[1]  # where each row that is computed stands
        mixing = several(numerics, branches)
        states = final_states(weights, config, numerics, ids[first], positions[first], mixing, table=table)
        if not any(run.error for run in branches):
            return states[rows], runs
    return final_states(weights, config, numerics, ids, positions, several(numerics, runs), table=table), runs


def runs_of(sequences: Sequence[Sequence[int]]) -> tuple[list[Run], NDArray[np.int64], NDArray[np.int64]]:
    """The run of each sequence by itself, and all tokens [T] and their positions [T]."""
    lengths = [len(sequence) for sequence in sequences]
    runs = [Run(slice(start, stop)) for start, stop in pairwise(np.cumsum([0, *lengths]).tolist())]
    ids = np.array([token for sequence in sequences for token in sequence], np.int64)
    return runs, ids, np.concatenate([np.arange(length) for length in lengths])


def branches_of(sequences: Sequence[Sequence[int]]) -> tuple[list[Run], NDArray[np.int64]]:
    """Runs of what each sequence adds to those before it, and the row of each token [T] of all of them."""
    rows: dict[tuple[int, int], int] = {}  # by the row of the token before it (-1: none) and its own id
    runs, paths = [], []
    for ids in sequences:
        start, path = len(rows), [-1]
        for token in ids:
            path.append(rows.setdefault((path[-1], token), len(rows)))
        paths.append(np.array(path[1:], np.int64))
        if len(rows) > start:
            runs.append(Run(slice(start, len(rows)), paths[-1][: len(ids) - (len(rows) - start)]))
    return runs, np.concatenate(paths)


def common_prefix(ids: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    most = min(len(ids), len(other))
    differ = np.asarray(ids[:most]) != np.asarray(other[:most])
    return int(np.argmax(differ)) if differ.any() else most


def several(numerics: Numerics, runs: list[Run]) -> Mixing:
    """Each sequence by itself."""
    return Mixing(partial(convolve, numerics, runs), partial(attend, numerics, runs))


def convolve(numerics: Numerics, runs: list[Run], weights: ShortConvWeights, u: Array) -> Array:
    """Zeros stand before the first token of each: [T, D] -> [T, D]."""
    zeros = np.zeros_like(u, shape=(weights.taps.shape[1] - 1, u.shape[1]))  # [L-1, D]
    windows = [window_of(run, u, zeros) for run in runs]
    return numerics.convolve_ragged(windows, weights.taps, weights.taps_bias)


def window_of(run: Run, u: Array, zeros: Array) -> Array:
    """The L-1 rows before a run's own, zeros [L-1, D] where there are none, and its own: [L-1+t, D]."""
    before = u[run.before[max(0, len(run.before) - len(zeros)) :]]
    return np.concatenate([zeros[len(before) :], before, u[run.rows]])


def attend(
    numerics: Numerics, runs: list[Run], weights: AttentionWeights, queries: Array, keys: Array, values: Array
) -> Array:
    """Each sequence over itself: queries [T, H, E], keys and values [T, G, E] -> [T, H, E]."""
    mixed = np.zeros_like(queries)
    for run in runs:
        if run.error:
            continue
        try:
            seen = run.visible
            mixed[run.rows] = numerics.attend(queries[run.rows], keys[seen], values[seen], weights.scale)
        except NumericsError as error:
            run.error = error
    return mixed
