"""The block pool against lists and dicts, as a rule-based state machine of Hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from internal_properties.state_machines.compare import require
from scheduler import BlockPool, PoolError


class PoolMachine(RuleBasedStateMachine):
    """BlockPool against lists and dicts. Misuse must raise and change nothing, which the invariant then sees."""

    schedules: ClassVar[int] = 0
    steps: ClassVar[int] = 0
    blocks = st.integers(-1, 3)
    names = st.integers(0, 2)

    @initialize(num_blocks=st.integers(1, 3))
    def start(self, num_blocks: int) -> None:
        PoolMachine.schedules += 1
        self.pool = BlockPool(num_blocks)
        self.owners = [0] * num_blocks
        self.key_of: dict[int, bytes] = {}
        self.order = self.pool.free_order()  # of those that no one owns, the next to be handed out first
        require(sorted(self.order), list(range(num_blocks)), "free at first", "pool")
        self.evictions = 0

    def _refused(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except PoolError:
            return
        raise AssertionError(f"{call.__name__}{arguments} was not refused")

    def _is_owned(self, block: int) -> bool:
        return 0 <= block < len(self.owners) and self.owners[block] > 0

    @rule()
    def allocate(self) -> None:
        if not self.order:
            return self._refused(self.pool.allocate)
        block = self.order.pop(0)
        self.owners[block] = 1
        self.evictions += block in self.key_of
        return require(self.pool.allocate(), (block, self.key_of.pop(block, None)), "allocated", "pool")

    @precondition(lambda self: bool(self.order))
    @rule(name=names)
    def fill_and_leave(self, name: int) -> None:
        """The life of a block in short, so that cached blocks are common."""
        block = self.order[0]
        self.allocate()
        self.publish(block, name)
        self.release(block)

    @rule()
    def allocate_unused(self) -> None:
        block = self.order[0] if self.order and self.order[0] not in self.key_of else None
        if block is not None:
            self.owners[block] = 1
            self.order.remove(block)
        require(self.pool.allocate_unused(), block, "allocated of those unused", "pool")

    @rule(block=blocks)
    def share(self, block: int) -> None:
        if not self._is_owned(block) and block not in self.key_of:
            return self._refused(self.pool.share, block)
        if block in self.order:
            self.order.remove(block)
        self.owners[block] += 1
        return self.pool.share(block)

    def _release(self, block: int) -> None:
        self.owners[block] -= 1
        if self.owners[block] == 0:
            self.order.insert(len(self.order) if block in self.key_of else 0, block)

    @rule(block=blocks)
    def release(self, block: int) -> None:
        if not self._is_owned(block):
            return self._refused(self.pool.release, block)
        self._release(block)
        return self.pool.release(block)

    @rule(table=st.lists(blocks, max_size=4))
    def release_table(self, table: list[int]) -> None:
        """Refused as a whole if a block is named more often than it is owned."""
        if not all(self._is_owned(block) and table.count(block) <= self.owners[block] for block in table):
            return self._refused(self.pool.release_table, tuple(table))
        for block in reversed(table):
            self._release(block)
        return self.pool.release_table(tuple(table))

    @rule(block=blocks, name=names)
    def publish(self, block: int, name: int) -> None:
        key = bytes([name])
        if not self._is_owned(block) or block in self.key_of:
            return self._refused(self.pool.publish, block, key)
        known = key in self.key_of.values()
        if not known:
            self.key_of[block] = key
        return require(self.pool.publish(block, key), not known, "published", f"block {block}")

    @rule(block=blocks)
    def require_writable(self, block: int) -> None:
        if 0 <= block < len(self.owners) and self.owners[block] == 1 and block not in self.key_of:
            return self.pool.require_writable(block)
        return self._refused(self.pool.require_writable, block)

    @invariant()
    def is_as_the_model_says(self) -> None:
        PoolMachine.steps += 1
        pool = self.pool
        require(pool.free_order(), self.order, "free order", "pool")
        require(pool.num_free, len(self.order), "num_free", "pool")
        require(pool.references, self.owners, "references", "pool")
        require(pool.block_of, {key: block for block, key in self.key_of.items()}, "block_of", "pool")
        require(pool.key_of, [self.key_of.get(block) for block in range(len(self.owners))], "key_of", "pool")
        require(pool.evictions, self.evictions, "evictions", "pool")
        require([pool.is_shared(b) for b in range(len(self.owners))], [n > 1 for n in self.owners], "shared", "pool")
