"""What requests hold: blocks and a state slot. Each change that arrays must follow is a move, in order.

A running request owns one slot (its live convolution state) and the blocks of its tables, those of windowed layers in
a pool of their own (window.py); any other owns nothing. No rule of scheduling stands here: who runs, and who is
preempted, scheduler.py says.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.block_pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.plan import Move
from scheduler.prefix_cache import PrefixCache
from scheduler.request import Request
from scheduler.window import WindowBlocks


class Memory:
    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.windows = WindowBlocks(config)
        self.prefix_cache = PrefixCache(self.pool, self.windows, config.block_size, config.prefix_caching)
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fit_together(self, requests: Iterable[Request], most_tokens: int, free: int) -> bool:
        """Whether all would get their whole length in `free` blocks, and all but the first a place among the tokens."""
        tokens, blocks = 0, 0
        for count, request in enumerate(requests, start=1):
            tokens += request.num_tokens
            blocks += self.blocks_for(request.most_computed_tokens)
            if (count > 1 and tokens > most_tokens) or blocks > free:
                return False
        return True

    def enter(self, request: Request, hit: tuple[int, ...], needed: int, moves: list[Move]) -> None:
        """A slot, the blocks of a prefix hit and `needed` more; the moves bring its state to where it starts."""
        request.slot = self.free_slots.pop()
        for block in hit:
            self.pool.share(block)
        request.block_table = (*hit, *(self._allocate() for _ in range(needed)))
        request.most_blocks = max(request.most_blocks, len(request.block_table))
        window_hit = self.windows.hit(self.prefix_cache.keys(request, len(hit)))
        self.windows.enter(request, window_hit, len(request.block_table))
        request.num_computed_tokens = len(hit) * self.block_size
        request.num_cached_tokens += request.num_computed_tokens
        if hit:
            moves.append(Move("restore_state", hit[-1], request.slot))
        else:
            moves.append(Move("zero_state", request.slot, request.slot))

    def grow(self, request: Request, count: int, moves: list[Move]) -> bool:
        """Blocks for the next `count` tokens, a copy of a shared one included; False, and no change, if too few."""
        first = request.num_computed_tokens // self.block_size
        table = list(request.block_table)
        shared = first < len(table) and self.pool.is_shared(table[first])
        stop = request.num_computed_tokens + count
        missing = max(0, self.blocks_for(stop) - len(table))
        if missing + shared > self.pool.num_free or not self.windows.can_grow(request, stop):
            return False
        if shared:
            copy = self._allocate()
            moves.append(Move("copy_block", table[first], copy))
            self.pool.release(table[first])
            table[first] = copy
        if missing or shared:
            table += [self._allocate() for _ in range(missing)]
            request.block_table = tuple(table)
            request.most_blocks = max(request.most_blocks, len(table))
        self.windows.grow(request, stop, moves)
        return True

    def grow_from_unused(self, request: Request, stop: int) -> int:
        """Blocks for the tokens before `stop`, while free ones hold nothing cached; where that ended."""
        while len(request.block_table) < self.blocks_for(stop):
            block = self.pool.allocate_unused()
            if block is None:
                return len(request.block_table) * self.block_size
            if not self.windows.grow_from_unused(request):
                self.pool.release(block)
                return len(request.block_table) * self.block_size
            request.block_table = (*request.block_table, block)
            request.most_blocks = max(request.most_blocks, len(request.block_table))
        return stop

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Gives back the blocks behind the first `num_tokens` tokens: the latest first, so they lie as they lay."""
        used = self.blocks_for(num_tokens)
        self.pool.release_table(request.block_table[used:])
        request.block_table = request.block_table[:used]
        self.windows.shrink(request, used)

    def split(self, parent: Request, child: Request, reserves: bool, moves: list[Move]) -> bool:
        """The child shares all that its parent has computed, the half-filled block included; False if it can't.

        With `reserves` it gets its own copy of that block, and all its blocks at once.
        """
        computed = parent.num_computed_tokens
        used = self.blocks_for(computed)
        partial = computed % self.block_size != 0
        reserve = self.blocks_for(child.most_computed_tokens) - used + partial if reserves else 0
        if not self.windows.has_room((), reserve):
            return False
        if parent.slot is None or not self.free_slots or reserve > self.pool.num_free:
            return False
        child.slot = self.free_slots.pop()
        child.block_table = parent.block_table[:used]
        for block in child.block_table:
            self.pool.share(block)
        if reserves:
            if partial:
                source, copy = child.block_table[-1], self._allocate()
                moves.append(Move("copy_block", source, copy))
                self.pool.release(source)
                child.block_table = (*child.block_table[:-1], copy)
            child.block_table += tuple(self._allocate() for _ in range(reserve - partial))
        child.num_computed_tokens = child.furthest_computed = computed
        self.windows.split(parent, child, used, reserve, moves)
        moves.append(Move("copy_state", parent.slot, child.slot))
        child.block_keys = list(parent.block_keys)
        child.most_blocks = len(child.block_table)
        return True

    def release(self, request: Request) -> None:
        """Slot and blocks of a running request."""
        assert request.slot is not None
        self.free_slots.append(request.slot)
        request.slot = None
        self.pool.release_table(request.block_table)
        request.block_table = ()
        self.windows.shrink(request, 0)

    def _allocate(self) -> int:
        block, evicted = self.pool.allocate()
        if evicted is not None:
            self.prefix_cache.note_eviction(evicted)
        return block
