"""What requests hold: a state slot, and blocks in each cache group. Each change that arrays must follow is a move.

A running request owns one slot (its live convolution state) and the blocks of its tables (groups.py); so does one that
was aborted within a step, until update(). Any other owns nothing. Who runs, and who is preempted, step.py says.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.config import SchedulerConfig
from scheduler.groups import groups_of
from scheduler.plan import Move
from scheduler.prefix_cache import PrefixCache
from scheduler.request import Request


class Memory:
    def __init__(self, config: SchedulerConfig, reserves: bool) -> None:
        """reserves: each request gets the blocks for its whole length when it enters"""
        self.block_size, self.reserves = config.block_size, reserves
        self.groups = groups_of(config)
        self.pool = self.groups[0].pool  # of full attention; its blocks carry the checkpoints of states
        self.prefix_cache = PrefixCache(self.groups, config.block_size, config.prefix_caching)
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))

    def blocks_for(self, num_tokens: int) -> int:
        return self.groups[0].blocks_for(num_tokens)

    def fit_together(self, requests: Sequence[Request], most_tokens: int, free: int) -> bool:
        """Whether all would get their whole length in `free` blocks, and a place in one step."""
        tokens = sum(request.num_tokens for request in requests)
        blocks = sum(self.blocks_for(request.most_computed_tokens) for request in requests)
        return blocks <= free and tokens <= most_tokens

    def enter(
        self, request: Request, keys: Sequence[bytes], stop: int, moves: list[Move], above_watermark: bool
    ) -> bool:
        """A slot, and blocks for the tokens before `stop`, behind a prefix hit under these keys; a move brings its
        state to where it starts. False, and no change, if blocks are too few."""
        num_blocks = self.blocks_for(request.most_computed_tokens if self.reserves else stop)
        hits = [group.hit(keys) for group in self.groups]
        for group, hit in zip(self.groups, hits, strict=True):
            if not group.has_room(hit, num_blocks - len(keys), group.watermark if above_watermark else 0):
                return False
        request.slot = self.free_slots.pop()
        for group, hit in zip(self.groups, hits, strict=True):
            group.enter(request, hit, num_blocks)
        request.most_blocks = max(request.most_blocks, num_blocks)
        request.num_computed_tokens = len(keys) * self.block_size
        request.num_cached_tokens += request.num_computed_tokens
        if keys:
            moves.append(Move("restore_state", request.tables[0][len(keys) - 1], request.slot))
        else:
            moves.append(Move("zero_state", request.slot, request.slot))
        return True

    def grow(self, request: Request, count: int, moves: list[Move]) -> bool:
        """Blocks for the next `count` tokens, a copy of a shared one included; False, and no change, if too few."""
        stop = request.num_computed_tokens + count
        growing = [group for group in self.groups if group.needed(request, stop)]
        if not all(group.needed(request, stop) <= group.pool.num_free for group in growing):
            return False
        for group in growing:
            group.grow(request, stop, moves)
        request.most_blocks = max(request.most_blocks, len(request.tables[0]))
        return True

    def grow_from_unused(self, request: Request, stop: int) -> int:
        """Blocks for the tokens before `stop`, while free ones hold nothing cached; where that ended."""
        while (num_blocks := len(request.tables[0])) < self.blocks_for(stop):
            if not all(group.grow_from_unused(request) for group in self.groups):
                self.shrink(request, num_blocks * self.block_size)
                return num_blocks * self.block_size
            request.most_blocks = max(request.most_blocks, num_blocks + 1)
        return stop

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Gives back the blocks behind the first `num_tokens` tokens."""
        for group in self.groups:
            group.shrink(request, self.blocks_for(num_tokens))

    def split(self, parent: Request, child: Request, moves: list[Move]) -> bool:
        """The child shares all that its parent has computed, the half-filled block included; False if it can't.

        If it reserves, it gets its own copy of that block, and all its blocks at once.
        """
        computed = parent.num_computed_tokens
        used = self.blocks_for(computed)
        is_partial = computed % self.block_size != 0
        reserve = self.blocks_for(child.most_computed_tokens) - used + is_partial if self.reserves else 0
        has_room = all(group.has_room((), reserve) for group in self.groups)
        if parent.slot is None or not self.free_slots or not has_room:
            return False
        child.slot = self.free_slots.pop()
        child.num_computed_tokens = child.furthest_computed = computed
        for group in self.groups:
            group.split(parent, child, used, reserve, moves)
        moves.append(Move("copy_state", parent.slot, child.slot))
        child.block_keys = list(parent.block_keys)
        child.most_blocks = len(child.tables[0])
        return True

    def release_unseen(self, request: Request) -> None:
        """Gives back what no later row of the request sees."""
        for group in self.groups[1:]:
            group.release_unseen(request)

    def release(self, request: Request) -> None:
        """Slot and blocks of a running request."""
        assert request.slot is not None
        self.free_slots.append(request.slot)
        request.slot = None
        self.shrink(request, 0)
