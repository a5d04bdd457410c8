"""Cache groups: the layers that see equally far share a pool of blocks, and each request has a table in each group.

There are at most two. Full attention is the group without a window. In the one with a window W the row of position p
sees positions p-W+1 to p, so of a request that has computed n tokens, the blocks that end before position n-W+1 are
given back while it runs: it holds blocks for its window and one step, whatever its length. A policy that reserves takes
the whole length at first, and gives it back in the same way. The rules are the same for both: without a window nothing
gets out of sight.

Why a pool and not a ring of W+step places for each slot: a block can be shared, published and found again. vLLM has
such groups, too (FullAttentionManager and SlidingWindowManager).

All tables of a request are equally long: position p lies in table[p // P] of each. FREED stands where no later row
looks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from scheduler.block_pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.plan import Move, MoveKind
from scheduler.request import Request

FREED = -1


class Group:
    """One pool and its tables: request.tables[index]."""

    def __init__(self, index: int, num_blocks: int, window: int | None, config: SchedulerConfig) -> None:
        self.index, self.window, self.block_size = index, window, config.block_size
        self.pool = BlockPool(num_blocks)
        self.watermark = int(config.watermark * num_blocks)  # blocks that an admission leaves free
        self.evicted: OrderedDict[bytes, None] = OrderedDict()  # the latest keys, at most one a block
        self.copy_kind: MoveKind = "copy_block" if window is None else "copy_window_block"

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- what rows see

    def first_seen(self, num_computed: int) -> int:
        """The first block that a row from position `num_computed` on can see."""
        return 0 if self.window is None else max(0, num_computed - self.window + 1) // self.block_size

    def longest_span(self, num_tokens: int, step: int) -> int:
        """The most blocks that a request of that many tokens sees in any step of at most `step` tokens."""
        whole = self.blocks_for(num_tokens)
        if self.window is None:
            return whole
        return min(whole, (self.window - 1 + step + self.block_size - 2) // self.block_size + 1)

    # --- the prefix cache

    def usable(self, keys: Sequence[bytes]) -> int:
        """How many blocks the longest hit within these has: all that its next row sees must be cached."""
        longest = run = 0  # `run`: neighbours that are cached, up to this one
        for count, key in enumerate(keys, start=1):
            run = run + 1 if key in self.pool.block_of else 0
            if run >= count - self.first_seen(count * self.block_size):
                longest = count
            elif self.window is None:
                break
        return longest

    def hit(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """The table of a hit that is `usable`, not yet shared."""
        first = self.first_seen(len(keys) * self.block_size)
        return (FREED,) * first + tuple(self.pool.block_of[key] for key in keys[first:])

    def publish(self, request: Request, first: int, keys: Sequence[bytes]) -> None:
        """After the write: the blocks from number `first` on, which became full."""
        for block, key in zip(request.tables[self.index][first:], keys, strict=False):
            if self.pool.key_of[block] is None and self.pool.publish(block, key):
                self.evicted.pop(key, None)

    # --- admission and growth

    def has_room(self, hit: Sequence[int], needed: int, watermark: int = 0) -> bool:
        """Whether `needed` blocks beside those of a hit are free."""
        available = self.pool.num_free - sum(self.pool.references[block] == 0 for block in held(hit))
        return needed <= available - watermark

    def enter(self, request: Request, hit: tuple[int, ...], num_blocks: int) -> None:
        """The blocks of a hit, and new ones up to `num_blocks`."""
        for block in held(hit):
            self.pool.share(block)
        request.tables[self.index] = (*hit, *self.allocate(num_blocks - len(hit)))

    def needed(self, request: Request, stop: int) -> int:
        """How many blocks it takes to go on to `stop`, the copy of a shared one included."""
        return self.missing(request, stop) + self.is_shared(request)

    def grow(self, request: Request, stop: int, moves: list[Move]) -> None:
        """Blocks for the tokens before `stop`, and a copy of the block to be written where others share it."""
        if self.is_shared(request):
            table, place = list(request.tables[self.index]), request.num_computed_tokens // self.block_size
            (copy,) = self.allocate(1)
            moves.append(Move(self.copy_kind, table[place], copy))
            self.pool.release(table[place])
            table[place] = copy
            request.tables[self.index] = tuple(table)
        if missing := self.missing(request, stop):
            request.tables[self.index] += tuple(self.allocate(missing))

    def grow_from_unused(self, request: Request) -> bool:
        """One block more, if one is free that holds nothing cached."""
        block = self.pool.allocate_unused()
        if block is not None:
            request.tables[self.index] = (*request.tables[self.index], block)
        return block is not None

    def missing(self, request: Request, stop: int) -> int:
        return max(0, self.blocks_for(stop) - len(request.tables[self.index]))

    def is_shared(self, request: Request) -> bool:
        """Whether the block of the next token is there, and another's, too."""
        table, place = request.tables[self.index], request.num_computed_tokens // self.block_size
        return place < len(table) and self.pool.is_shared(table[place])

    def split(self, parent: Request, child: Request, used: int, reserve: int, moves: list[Move]) -> None:
        """The child shares the first `used` blocks; of `reserve` more, the first copies one that is half full."""
        child.tables[self.index] = parent.tables[self.index][:used]
        for block in held(child.tables[self.index]):
            self.pool.share(block)
        if reserve and child.num_computed_tokens % self.block_size:
            self.grow(child, child.num_computed_tokens, moves)
            reserve -= 1
        child.tables[self.index] += tuple(self.allocate(reserve))

    def allocate(self, count: int) -> list[int]:
        blocks = []
        for _ in range(count):
            block, evicted = self.pool.allocate()
            blocks.append(block)
            if evicted is not None:
                self.evicted[evicted] = None
                if len(self.evicted) > self.pool.num_blocks:
                    self.evicted.popitem(last=False)
        return blocks

    # --- giving back

    def release_unseen(self, request: Request) -> None:
        """Gives back what no later row sees: the earliest first, which are evicted first, too."""
        first = self.first_seen(request.num_computed_tokens)
        table = request.tables[self.index]
        for block in held(table[:first]):
            self.pool.release(block)
        request.tables[self.index] = (FREED,) * first + table[first:]

    def shrink(self, request: Request, num_blocks: int) -> None:
        """Gives back the blocks behind the first `num_blocks`: the latest first, so they lie as they lay."""
        self.pool.release_table(held(request.tables[self.index][num_blocks:]))
        request.tables[self.index] = request.tables[self.index][:num_blocks]


def groups_of(config: SchedulerConfig) -> list[Group]:
    """Full attention, and windowed layers if there are any."""
    groups = [Group(0, config.num_blocks, None, config)]
    if config.sliding_window is not None:
        groups.append(Group(1, config.num_window_blocks, config.sliding_window, config))
    return groups


def held(table: Sequence[int]) -> tuple[int, ...]:
    """The blocks of a table that are not freed."""
    return tuple(block for block in table if block != FREED)
