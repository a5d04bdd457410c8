"""Which block is free, owned or cached: ids, reference counts and an ordered free list; O(1) for each block.

A block is P tokens of keys and values, and one checkpoint: the convolution states after its last token. The pool knows
only the id. A block is
    owned   by `references` tables (more than one: it is shared)
    cached  by none, but published under a key, so that its content can be found again until it is handed out anew
    free    by none, without a key
    a twin  owned, with the content of a published one: it gets the key when that one is handed out anew, so that what
            still runs can be found
Cached and free blocks stand in one list, the next to be handed out first: blocks without a key go to its front, those
with one to its back, so the least recently used content is evicted first (vLLM's order).

The list is doubly linked through two arrays; its ends meet in a sentinel at index `num_blocks`:

    sentinel -> next[] -> front ... back -> sentinel
"""

from __future__ import annotations

from collections import Counter

from scheduler.errors import PoolError


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise PoolError(f"a pool of {num_blocks} blocks: expected at least 1")
        self.num_blocks = num_blocks
        self.num_free = num_blocks  # free and cached: what `allocate` can hand out
        self.references = [0] * num_blocks
        self.key_of: list[bytes | None] = [None] * num_blocks
        self.block_of: dict[bytes, int] = {}  # published key -> block
        self.twins: dict[bytes, list[int]] = {}  # by the key that each waits for
        self.key_of_twin: dict[int, bytes] = {}
        self.evictions = 0
        ring = num_blocks + 1
        self._next = [(index + 1) % ring for index in range(ring)]
        self._previous = [(index - 1) % ring for index in range(ring)]

    def allocate(self) -> tuple[int, bytes | None]:
        """A block that the caller alone owns, and the key that is found no more, if any. PoolError if none is left."""
        block = self._next[self.num_blocks]
        if block == self.num_blocks:
            raise PoolError(f"no block is free: all {self.num_blocks} are owned")
        evicted = self.key_of[block]
        if evicted is not None:
            del self.block_of[evicted]
            self.key_of[block] = None
            self.evictions += 1
            if twins := self.twins.get(evicted):
                self._publish(self._forget_twin(twins[0]), evicted)
                evicted = None
        self._unlink(block)
        self.references[block] = 1
        return block, evicted

    def allocate_unused(self) -> int | None:
        """A block that the caller alone owns, if one is free that holds nothing cached."""
        block = self._next[self.num_blocks]
        if block == self.num_blocks or self.key_of[block] is not None:
            return None
        return self.allocate()[0]

    def share(self, block: int) -> None:
        """One more owner, of an owned or a cached block. PoolError for a free one: its content is no one's."""
        self._require_known(block)
        if self.references[block] == 0:
            if self.key_of[block] is None:
                raise PoolError(f"block {block} is free: it can't be shared")
            self._unlink(block)
        self.references[block] += 1

    def release(self, block: int) -> None:
        """One owner less. PoolError if there is none: a double free."""
        self._require_owned(block)
        self.references[block] -= 1
        if self.references[block] == 0:
            self._forget_twin(block)
            front = self.key_of[block] is None
            self._link_after(self.num_blocks if front else self._previous[self.num_blocks], block)

    def release_table(self, table: tuple[int, ...]) -> None:
        """The tail first, so that of cached blocks the end of a sequence is evicted before its beginning.

        PoolError, and no change, if one of them has no owner.
        """
        for block, count in Counter(table).items():
            self._require_owned(block, count)
        for block in reversed(table):
            self.release(block)

    def publish(self, block: int, key: bytes) -> bool:
        """Lets the content of a block be found by its key; call it after the content is written.

        False if another block already has that key: this one is its twin. PoolError for a block that is not owned, or
        was published before.
        """
        self._require_known(block)
        if self.references[block] == 0:
            raise PoolError(f"block {block} is published, but no one owns it: use after free")
        if self.key_of[block] is not None or block in self.key_of_twin:
            raise PoolError(f"block {block} is published twice")
        if key in self.block_of:
            self.twins.setdefault(key, []).append(block)
            self.key_of_twin[block] = key
            return False
        self._publish(block, key)
        return True

    def require_writable(self, block: int) -> None:
        """PoolError unless the block has one owner and no key: what is shared or published never changes."""
        self._require_known(block)
        if self.references[block] != 1 or self.key_of[block] is not None:
            state = "published" if self.key_of[block] is not None else f"owned by {self.references[block]} tables"
            raise PoolError(f"block {block} is to be written, but it is {state}: expected one owner and no key")

    def is_shared(self, block: int) -> bool:
        return self.references[block] > 1

    def free_order(self) -> list[int]:
        """The blocks that can be handed out, the next one first. O(n): for checks and drawings."""
        order = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            order.append(block)
            block = self._next[block]
        return order

    def _publish(self, block: int, key: bytes) -> None:
        self.key_of[block] = key
        self.block_of[key] = block

    def _forget_twin(self, block: int) -> int:
        """The block, which is no twin any more, if it was one."""
        key = self.key_of_twin.pop(block, None)
        if key is not None:
            self.twins[key].remove(block)
            if not self.twins[key]:
                del self.twins[key]
        return block

    def _require_owned(self, block: int, owners: int = 1) -> None:
        self._require_known(block)
        if self.references[block] < owners:
            raise PoolError(f"block {block} is released, but no one owns it: a double free")

    def _require_known(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise PoolError(f"block {block}: expected 0 to {self.num_blocks - 1}")

    def _link_after(self, place: int, block: int) -> None:
        following = self._next[place]
        self._next[place] = self._previous[following] = block
        self._previous[block], self._next[block] = place, following
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.num_free -= 1
