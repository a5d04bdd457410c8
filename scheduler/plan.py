"""What one step does, as plain data: it can be written to a file, replayed, checked and drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

MoveKind = Literal[
    "copy_block",  # block -> block: copy-on-write
    "copy_window_block",  # the same in the pool of windowed layers
    "zero_state",  # -> slot: a request starts at position 0
    "restore_state",  # checkpoint of a block -> slot: a request starts after a prefix hit
    "copy_state",  # slot -> slot: fork
]


@dataclass(frozen=True)
class Move:
    """One thing to copy before the step computes. Moves are done in their order: a later one may reuse a source."""

    kind: MoveKind
    source: int  # the slot itself for zero_state
    destination: int


class ScheduledTokens(NamedTuple):
    """The tokens of one request in one step: positions start to start + len(token_ids) - 1, drafts at the end."""

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]  # position p lies in block_table[p // block_size]
    slot: int  # live convolution state: read for the tokens before start, written after the last that stays
    checkpoints: tuple[tuple[int, int], ...]  # (position, block): the block gets the state there, if its tokens stay
    first_logits: int  # the first position whose logits are wanted; start + len(token_ids): none
    samples: tuple[str, ...]  # the requests that get a token from the last row: none in the middle of a prompt
    num_drafts: int = 0  # of token_ids; then a token may come from each of the last num_drafts + 1 rows
    window_table: tuple[int, ...] = ()  # as block_table, in the pool of windowed layers: see groups.py

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    def num_kept(self, num_answered: int) -> int:
        """How many of token_ids stay computed when that many tokens came of it: all but the rejected drafts.

        Of the tokens that came, the last has not been computed yet; those before it were the accepted drafts.
        """
        return len(self.token_ids) - self.num_drafts + max(0, num_answered - 1)

    def without_drafts(self, block_size: int) -> ScheduledTokens:
        stop = self.stop - self.num_drafts
        return self._replace(
            token_ids=self.token_ids[: stop - self.start],
            block_table=self.block_table[: -(-stop // block_size)],
            window_table=self.window_table[: -(-stop // block_size)],
            checkpoints=tuple(checkpoint for checkpoint in self.checkpoints if checkpoint[0] <= stop),
            num_drafts=0,
        )


@dataclass(frozen=True)
class BatchPlan:
    """One step: first the moves, then one forward pass over all tokens, each request's one after another."""

    step: int
    moves: tuple[Move, ...]
    scheduled: tuple[ScheduledTokens, ...]
    preempted: tuple[str, ...]
    admitted: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(entry.token_ids) for entry in self.scheduled)
