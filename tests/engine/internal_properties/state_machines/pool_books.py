"""A block pool against a list and a dictionary: each of its calls is made on both, whoever makes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from internal_properties.state_machines.compare import require
from scheduler import BlockPool, PoolError

CALLS = ("allocate", "allocate_unused", "share", "release", "release_table", "publish")


def nothing(block: int, key: bytes) -> None:
    """Is done."""


class PoolBooks:
    """`published` is called before a block is, `evicted` when its key is lost."""

    def __init__(
        self,
        pool: BlockPool,
        name: str,
        published: Callable[[int, bytes], None] = nothing,
        evicted: Callable[[int, bytes], None] = nothing,
    ) -> None:
        self.pool, self.name, self.on_publish, self.on_evict = pool, name, published, evicted
        self.owners = [0] * pool.num_blocks
        self.key_of: dict[int, bytes] = {}
        self.block_of: dict[bytes, int] = {}
        self.order = pool.free_order()  # of those that no one owns, the next to be handed out first
        require(sorted(self.order), list(range(pool.num_blocks)), "free at first", name)
        self.evictions = self.turn = 0
        self.is_inside = False
        for call in CALLS:
            setattr(pool, call, self._listening(getattr(pool, call), getattr(self, f"_{call}")))

    def _listening(self, call: Callable[..., Any], expected: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def listening(*arguments: Any) -> Any:
            if self.is_inside:  # the pool calls itself
                return call(*arguments)
            wanted, self.is_inside = expected(*arguments), True
            try:
                returned = call(*arguments)
            finally:
                self.is_inside = False
            require(returned, wanted, f"{call.__name__}{arguments}", self.name)
            return returned

        return listening

    # --- what each call does and returns; IndexError and ValueError where it must not be made

    def _allocate(self) -> tuple[int, bytes | None]:
        block = self.order.pop(0)
        self.owners[block] = 1
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.block_of[key]
            self.evictions += 1
            self.on_evict(block, key)
        return block, key

    def _allocate_unused(self) -> int | None:
        return self._allocate()[0] if self.order and self.order[0] not in self.key_of else None

    def _share(self, block: int) -> None:
        if self.owners[block] == 0:
            require(block in self.key_of, True, "is owned or cached:", f"{self.name}: block {block}, to be shared,")
            self.order.remove(block)
        self.owners[block] += 1

    def _release(self, block: int) -> None:
        require(self.owners[block] > 0, True, "has an owner:", f"{self.name}: block {block}, to be released,")
        self.owners[block] -= 1
        if self.owners[block] == 0:
            self.order.insert(len(self.order) if block in self.key_of else 0, block)

    def _release_table(self, table: tuple[int, ...]) -> None:
        for block in reversed(table):
            self._release(block)

    def _publish(self, block: int, key: bytes) -> bool:
        require(self.owners[block] > 0, True, "has an owner:", f"{self.name}: block {block}, to be published,")
        require(self.key_of.get(block), None, "its key", f"{self.name}: block {block}, to be published,")
        self.on_publish(block, key)
        if key in self.block_of:
            return False
        self.key_of[block], self.block_of[key] = key, block
        return True

    # --- between calls

    def verify(self) -> None:
        """It is as the books say, then refuses what it must: of another block each time, and without a change."""
        self._require_state()
        self.turn += 1
        self._misuse(self.turn % (self.pool.num_blocks + 2) - 1)

    def _misuse(self, block: int) -> None:
        pool, owners = self.pool, self.owners[block] if 0 <= block < self.pool.num_blocks else 0
        self.is_inside = True
        if not owners:
            self._refused(pool.release, block)
            self._refused(pool.publish, block, b"another key")
        if not owners and block not in self.key_of:
            self._refused(pool.share, block)
        if block in self.key_of:
            self._refused(pool.publish, block, b"another key")
        used = [other for other, count in enumerate(self.owners) if count]
        self._refused(pool.release_table, (*used[:1], *(block,) * (owners + 1)))
        if owners == 1 and block not in self.key_of:
            pool.require_writable(block)
        else:
            self._refused(pool.require_writable, block)
        if not self.order:
            self._refused(pool.allocate)
        self.is_inside = False

    def _refused(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except PoolError:
            return
        raise AssertionError(f"{self.name}: {call.__name__}{arguments} was not refused")

    def _require_state(self) -> None:
        pool, blocks = self.pool, range(self.pool.num_blocks)
        require(pool.free_order(), self.order, "free order", self.name)
        require(pool.num_free, len(self.order), "num_free", self.name)
        require(pool.references, self.owners, "references", self.name)
        require(pool.block_of, self.block_of, "block_of", self.name)
        require(pool.key_of, [self.key_of.get(block) for block in blocks], "key_of", self.name)
        require(pool.evictions, self.evictions, "evictions", self.name)
        require([pool.is_shared(block) for block in blocks], [count > 1 for count in self.owners], "shared", self.name)
