"""A model without arithmetic, under the real scheduler's plans: a wrong block or state is a wrong token.

It has the parts of the real one, under the same names, with names of tokens where that has numbers:

    network/cache.py, step.py         here
    keys and values of one position   a cell: (position, token id)
    the last L-1 columns of u         a state: the last L-1 cells, EMPTY ones at the start of a sequence
    logits of one row                 a hash of all cells that attention reads and the L cells that convolution reads
    the sampler                       that hash and the request's seed, modulo the vocabulary

Whatever stands in a cell is hashed as it is, so the logits are right only if every cell and the state are. `truth` is
the same hash of a request's own tokens, with no cache at all: what reference.py is to step.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from scheduler import FREED, BatchPlan, Move, ScheduledTokens, SchedulerConfig

Cell = tuple[int, int]  # position, token id
State = tuple[Cell, ...]  # L-1 cells
EMPTY: Cell = (-1, -1)


def truth(token_ids: Sequence[int], taps: int, window: int | None = None) -> int:
    """The logits of the last of these tokens, computed from nothing but them."""
    cells = list(enumerate(token_ids))
    return logits(cells, seen(cells, window), (*state_after(cells[:-1], taps), cells[-1]))


def state_after(cells: Sequence[Cell], taps: int) -> State:
    """The convolution state after a sequence."""
    return ((EMPTY,) * (taps - 1) + tuple(cells))[len(cells) :]


def logits(cells: list[Cell], in_window: list[Cell], columns: State) -> int:
    """One row: what it attends to, with and without a window, and what its convolution sees."""
    return int.from_bytes(blake2b(repr((cells, in_window, columns)).encode(), digest_size=8).digest(), "little")


def sample(row: int, seed: int, vocab_size: int) -> int:
    """Two requests with the same tokens differ from here on, as two samples of one prompt do."""
    return (row + seed) % vocab_size


@dataclass(eq=False)
class FakeCache:
    """Letters: N blocks, P block size, S slots, Q host blocks, L taps, W window, M blocks of windowed layers."""

    block_size: int
    window: int | None  # W; None: no layer has a window
    blocks: list[list[Cell]]  # [N][P]
    window_blocks: list[list[Cell]]  # [M][P]
    host_window_blocks: list[list[Cell]]  # [Q][P]
    states: list[State]  # [S]
    checkpoints: list[State]  # [N]
    host_blocks: list[list[Cell]]  # [Q][P]
    host_states: list[State]  # [Q]

    def read(self, table: Sequence[int], stop: int) -> list[Cell]:
        """Positions 0 to stop - 1 of a request, or as many as its table has."""
        return [cell for block in table for cell in self.blocks[block]][:stop]

    def read_windows(self, table: Sequence[int], stop: int) -> list[Cell]:
        """The same in windowed layers, without what stood in freed blocks."""
        freed = sum(block == FREED for block in table)
        cells = [cell for block in table[freed:] for cell in self.window_blocks[block]]
        return cells[: stop - freed * self.block_size]


def make_cache(sizes: SchedulerConfig, taps: int) -> FakeCache:
    nothing = (EMPTY,) * (taps - 1)
    return FakeCache(
        block_size=sizes.block_size,
        window=sizes.sliding_window,
        blocks=[[EMPTY] * sizes.block_size for _ in range(sizes.num_blocks)],
        window_blocks=[[EMPTY] * sizes.block_size for _ in range(sizes.num_window_blocks)],
        host_window_blocks=[[EMPTY] * sizes.block_size for _ in range(sizes.num_host_blocks)],
        states=[nothing] * sizes.max_num_seqs,
        checkpoints=[nothing] * sizes.num_blocks,
        host_blocks=[[EMPTY] * sizes.block_size for _ in range(sizes.num_host_blocks)],
        host_states=[nothing] * sizes.num_host_blocks,
    )


def move(cache: FakeCache, moves: tuple[Move, ...]) -> None:
    """Carries out a plan's moves, one after another: see lfm2np.network.cache.move."""
    for one in moves:
        source, destination = one.source, one.destination
        match one.kind:
            case "copy_block":
                cache.blocks[destination] = list(cache.blocks[source])
            case "save_block":
                cache.host_blocks[destination] = list(cache.blocks[source])
            case "load_block":
                cache.blocks[destination] = list(cache.host_blocks[source])
            case "copy_window_block":
                cache.window_blocks[destination] = list(cache.window_blocks[source])
            case "save_window_block":
                cache.host_window_blocks[destination] = list(cache.window_blocks[source])
            case "load_window_block":
                cache.window_blocks[destination] = list(cache.host_window_blocks[source])
            case "zero_state":
                cache.states[destination] = (EMPTY,) * len(cache.states[destination])
            case "restore_state":
                cache.states[destination] = cache.checkpoints[source]
            case "copy_state":
                cache.states[destination] = cache.states[source]
            case "save_state":
                cache.host_states[destination] = cache.states[source]
            case "load_state":
                cache.states[destination] = cache.host_states[source]


def commit(cache: FakeCache, entry: ScheduledTokens, window: State, kept: int) -> None:
    """What the first `kept` tokens leave behind; `window` is the state before them, then the new cells."""
    columns = len(cache.states[entry.slot])
    for cell in window[columns : columns + kept]:
        index, place = divmod(cell[0], cache.block_size)
        cache.blocks[entry.block_table[index]][place] = cell
        if cache.window is not None:
            cache.window_blocks[entry.window_table[index]][place] = cell
    cache.states[entry.slot] = window[kept : kept + columns]
    for position, block in entry.checkpoints:
        end = position - entry.start
        if end <= kept:
            cache.checkpoints[block] = window[end : end + columns]


def seen(cells: list[Cell], window: int | None) -> list[Cell]:
    """What the last of these sees in a windowed layer."""
    return [] if window is None else cells[-window:]


@dataclass(eq=False)
class FakeModel:
    """`execute` writes nothing but the moves; `commit` then writes what is kept of each request's tokens."""

    cache: FakeCache
    windows: dict[str, State] = field(default_factory=dict)  # by request: L-1+t cells of the step in flight

    def execute(self, plan: BatchPlan) -> dict[str, list[int]]:
        """One step: the moves, then the logits of each request's rows from `first_logits` on."""
        move(self.cache, plan.moves)
        rows, self.windows = {}, {}
        for entry in plan.scheduled:
            new = list(enumerate(entry.token_ids, entry.start))
            cells = self.cache.read(entry.block_table, entry.start) + new
            in_windows = self.cache.read_windows(entry.window_table, entry.start) + new
            state = self.cache.states[entry.slot]
            window = self.windows[entry.request_id] = (*state, *new)
            first = entry.first_logits - entry.start
            rows[entry.request_id] = [
                logits(
                    cells[: entry.start + row + 1],
                    seen(in_windows[: len(in_windows) - len(new) + row + 1], self.cache.window),
                    window[row : row + len(state) + 1],
                )
                for row in range(first, len(new))
            ]
        return rows

    def commit(self, plan: BatchPlan, num_answered: Mapping[str, int], errors: Sequence[str] = ()) -> None:
        """By request id how many tokens came of it; requests that failed leave nothing."""
        for entry in plan.scheduled:
            if entry.request_id not in errors:
                kept = entry.num_kept(num_answered.get(entry.request_id, 0))
                commit(self.cache, entry, self.windows[entry.request_id], kept)
