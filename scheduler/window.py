"""The blocks of layers with a sliding window: a pool of their own, and of a request only what a later row can see.

The row of position p sees positions p-W+1 to p. So of a request that has computed n tokens, the blocks that end before
position n-W+1 are given back while it runs: it holds blocks for its window and one step, whatever its length. A policy
that reserves takes the whole length at first, and gives it back in the same way.

Why a pool and not a ring of W+step places for each slot: a block can be shared, published and found again. A prefix hit
of n blocks needs every block of the other layers, and here only those that the next row sees. vLLM has such groups,
too (kv_cache_coordinator.py, SlidingWindowManager).

A table is as long as that of the other layers, so position p lies in window_table[p // P]; FREED stands where no later
row looks. Without a window (None) there is no pool, tables are empty, and every count is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.block_pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.plan import Move
from scheduler.request import Request

FREED = -1


class WindowBlocks:
    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size, self.window = config.block_size, config.sliding_window
        self.pool = BlockPool(config.num_window_blocks) if self.window is not None else None
        self.watermark = int(config.watermark * config.num_window_blocks)  # blocks that an admission leaves free

    def first_seen(self, num_computed: int) -> int:
        """The first block that a row from position `num_computed` on can see."""
        assert self.window is not None
        return max(0, num_computed - self.window + 1) // self.block_size

    def span(self, start: int, stop: int) -> int:
        """Blocks that rows from `start` to `stop` - 1 see or are written to."""
        return 0 if self.window is None else -(-stop // self.block_size) - self.first_seen(start)

    def longest_span(self, num_tokens: int, step: int) -> int:
        """The most blocks that a request of that many tokens sees in any step of at most `step` tokens."""
        if self.window is None:
            return 0
        seen = self.window - 1 + step
        return min(-(-num_tokens // self.block_size), (seen + self.block_size - 2) // self.block_size + 1)

    # --- the prefix cache

    def usable(self, keys: Sequence[bytes]) -> int:
        """How many blocks the longest hit within these has: all that its next row sees must be cached."""
        if self.pool is None:
            return len(keys)
        longest, run = 0, 0  # `run`: neighbours that are cached, up to this one
        for count, key in enumerate(keys, start=1):
            run = run + 1 if key in self.pool.block_of else 0
            if run >= count - self.first_seen(count * self.block_size):
                longest = count
        return longest

    def hit(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """The table of a hit that is `usable`, not yet shared."""
        if self.pool is None:
            return ()
        first = self.first_seen(len(keys) * self.block_size)
        return (FREED,) * min(first, len(keys)) + tuple(self.pool.block_of[key] for key in keys[first:])

    def publish(self, request: Request, first: int, keys: Sequence[bytes]) -> None:
        """After the write: the blocks from number `first` on, which became full."""
        if self.pool is not None:
            for block, key in zip(request.window_table[first:], keys, strict=False):
                if self.pool.key_of[block] is None:
                    self.pool.publish(block, key)

    # --- admission and growth

    def has_room(self, hit: Sequence[int], needed: int, watermark: int = 0) -> bool:
        """Whether `needed` blocks beside those of a hit are free."""
        if self.pool is None:
            return True
        available = self.pool.num_free - sum(self.pool.references[block] == 0 for block in held(hit))
        return needed <= available - watermark

    def require_writable(self, block: int) -> None:
        """PoolError unless the request alone owns it, and it is not published."""
        assert self.pool is not None
        self.pool.require_writable(block)

    def enter(self, request: Request, hit: tuple[int, ...], num_blocks: int) -> None:
        """The blocks of a hit, and new ones up to `num_blocks`."""
        if self.pool is None:
            return
        for block in held(hit):
            self.pool.share(block)
        request.window_table = (*hit, *(self.pool.allocate()[0] for _ in range(num_blocks - len(hit))))

    def can_grow(self, request: Request, stop: int) -> bool:
        return self.pool is None or self._missing(request, stop) + self.is_shared(request) <= self.pool.num_free

    def grow(self, request: Request, stop: int, moves: list[Move]) -> None:
        """Blocks for the tokens before `stop`, and a copy of the block to be written where others share it."""
        if self.pool is None:
            return
        table, index = list(request.window_table), request.num_computed_tokens // self.block_size
        if self.is_shared(request):
            copy, _ = self.pool.allocate()
            moves.append(Move("copy_window_block", table[index], copy))
            self.pool.release(table[index])
            table[index] = copy
        table += [self.pool.allocate()[0] for _ in range(self._missing(request, stop))]
        request.window_table = tuple(table)

    def grow_from_unused(self, request: Request) -> bool:
        """One block more, if one is free that holds nothing cached."""
        if self.pool is None:
            return True
        block = self.pool.allocate_unused()
        if block is not None:
            request.window_table = (*request.window_table, block)
        return block is not None

    def _missing(self, request: Request, stop: int) -> int:
        return max(0, -(-stop // self.block_size) - len(request.window_table))

    def is_shared(self, request: Request) -> bool:
        """Whether the block of the next token is another's, too."""
        index = request.num_computed_tokens // self.block_size
        return self.pool is not None and any(map(self.pool.is_shared, request.window_table[index : index + 1]))

    def split(self, parent: Request, child: Request, used: int, reserve: int, moves: list[Move]) -> None:
        """The child shares the first `used` blocks; of `reserve` more, the first copies one that is half full."""
        if self.pool is None:
            return
        child.window_table = parent.window_table[:used]
        for block in held(child.window_table):
            self.pool.share(block)
        if reserve and child.num_computed_tokens % self.block_size:
            self.grow(child, child.num_computed_tokens, moves)
            reserve -= 1
        child.window_table += tuple(self.pool.allocate()[0] for _ in range(reserve))

    # --- giving back

    def release_unseen(self, request: Request) -> None:
        """Gives back what no later row sees: the earliest first, which are evicted first, too."""
        if self.pool is None:
            return
        first = self.first_seen(request.num_computed_tokens)
        for block in held(request.window_table[:first]):
            self.pool.release(block)
        request.window_table = (FREED,) * first + request.window_table[first:]

    def shrink(self, request: Request, num_blocks: int) -> None:
        """Gives back the blocks behind the first `num_blocks`."""
        if self.pool is not None:
            self.pool.release_table(held(request.window_table[num_blocks:]))
            request.window_table = request.window_table[:num_blocks]


def held(table: Sequence[int]) -> tuple[int, ...]:
    """The blocks of a table that are not freed."""
    return tuple(block for block in table if block != FREED)
