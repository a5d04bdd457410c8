"""Conservation: every block is free, owned or cached, exactly once. For tests: O(pool)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scheduler.block_pool import BlockPool
from scheduler.errors import PoolError
from scheduler.groups import FREED, held
from scheduler.request import Request, Status, is_queued
from scheduler.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """PoolError with the first thing that does not add up; call it between steps."""
    for group in scheduler.memory.groups:
        _check_pool(group.pool, (held(request.tables[group.index]) for request in scheduler.running))
    _check_requests(scheduler)


def _check_pool(pool: BlockPool, tables: Iterable[tuple[int, ...]]) -> None:
    owned = Counter(block for table in tables for block in table)
    free = pool.free_order()
    _require(len(free) == len(set(free)) == pool.num_free, f"free list {free}: {pool.num_free} blocks expected")
    for block in range(pool.num_blocks):
        _require(
            pool.references[block] == owned[block],
            f"block {block}: {pool.references[block]} references, but {owned[block]} tables name it",
        )
        key = pool.key_of[block]
        _require(key is None or pool.block_of.get(key) == block, f"block {block}: its key leads elsewhere")
    _require(not set(free) & set(owned), f"blocks {sorted(set(free) & set(owned))}: free and owned")
    _require(len(free) + len(owned) == pool.num_blocks, "a block is neither free nor owned")
    _require(len(pool.block_of) == sum(key is not None for key in pool.key_of), "a key leads to a block that has none")
    keyed = [pool.key_of[block] is not None for block in free]
    _require(keyed == sorted(keyed), "a block with a key stands before one without in the free list")


def _check_requests(scheduler: Scheduler) -> None:
    running, reserves = scheduler.running, scheduler.memory.reserves
    slots = [request.slot for request in running]
    _require(len(set(slots)) == len(slots) and None not in slots, f"slots {slots}: each running request has its own")
    _require(
        len(slots) + len(scheduler.memory.free_slots) == scheduler.config.max_num_seqs,
        f"slots {slots}: one is lost",
    )
    keys = [scheduler.policy.key(request) for request in running]
    _require(keys == sorted(keys), "the running requests are out of order")
    for request in scheduler.requests.values():
        is_running = request.status is Status.RUNNING
        in_place = is_running == (request.slot is not None) and not (is_running and request.awaits_split)
        _require(in_place, f"request {request.request_id!r}: {request.status}, in no place")
        _require(request.num_computed_tokens < request.num_tokens, f"request {request.request_id!r}: nothing to do")
        if is_running:
            tokens = request.most_computed_tokens if reserves else request.num_computed_tokens
            needed, owned = scheduler.memory.blocks_for(tokens), len(request.tables[0])
            _require(owned == needed, f"request {request.request_id!r}: {owned} blocks, its tokens need {needed}")
            unwritten = request.tables[0][request.num_computed_tokens // scheduler.memory.block_size :]
            its_own = not any(scheduler.pool.is_shared(block) for block in unwritten)
            _require(its_own or not reserves, f"request {request.request_id!r}: shares a block that it reserves")
            _check_freed(scheduler, request)
        else:
            _require(not any(request.tables), f"request {request.request_id!r}: {request.status}, but owns blocks")
    waiting = [request for request in scheduler.requests.values() if is_queued(request)]
    waiting.sort(key=scheduler.policy.key)
    _require(scheduler.waiting == waiting, "the queue is out of order, or not of those that wait")


def _check_freed(scheduler: Scheduler, request: Request) -> None:
    """Freed is what no later row sees, and nothing else; all tables are equally long, those of no group empty."""
    groups = scheduler.memory.groups
    _require(not any(request.tables[len(groups) :]), f"request {request.request_id!r}: a table of no group")
    for group in groups:
        table, first = request.tables[group.index], group.first_seen(request.num_computed_tokens)
        freed = [index for index, block in enumerate(table) if block == FREED]
        as_many = len(table) == len(request.tables[0])
        _require(
            as_many and freed == list(range(first)),
            f"request {request.request_id!r}: {table} in group {group.index}, expected {len(request.tables[0])} blocks "
            f"of which the first {first} are freed",
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise PoolError(f"conservation: {message}")
