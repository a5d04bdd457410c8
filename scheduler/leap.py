"""Many steps at once, where each would do the same: all running requests decode, and nobody is let in.

Such a step makes four calls for each running request: memory.grow() for one token, then, in update(), publish(),
release_unseen() and append(). All but the last change something only where a position crosses the border of a block (or
of a window), and those steps follow from the position alone. leap() makes just these calls, with the same arguments in
the same order; what each call would have left as it is, is left out. So all that a scheduler holds is the same as after
that many schedule() and update(): tables, free lists, keys, counters. Proof that nobody is let in meanwhile:

- Nothing waits, or no slot is free, or the policy lets nobody in beside those that run: no step of the leap changes it.
- Else the step before was of the same kind and let nobody in: too few wait, or the head lacks blocks. While nothing
  comes or goes, a step of decodes takes blocks and gives none back, so as long as the head's prefix hit is the same
  (`Blocked.holds`), it lacks at least as many in the next one. Windowed layers do give blocks back: no leap then.
- A policy that counts steps says how long its rule stays the same (`steps_alike`).

The leap ends early, before a step for which blocks would not suffice (it preempts), and behind one that changed the
head's hit. Drafts and forks in flight are of no step that leap() takes over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from scheduler.blocked import Blocked
from scheduler.errors import PlanError
from scheduler.policy import FirstComeFirstServed
from scheduler.request import Request
from scheduler.scheduler import Scheduler


@dataclass
class Leap:
    """What came of it. `taken`: (step of the leap, blocks that it took from the free list), where there were any."""

    steps: int
    finished: list[Request] = field(default_factory=list)
    taken: list[tuple[int, int]] = field(default_factory=list)


def most_steps(scheduler: Scheduler) -> int:
    """How many steps leap() may take at most; 0: the next one may do something else than decode. O(running)."""
    policy, running = scheduler.policy, scheduler.running
    kind: Any = type(policy)
    if not running or scheduler.in_flight or scheduler._pending or scheduler._num_prefilling:
        return 0
    if len(running) > scheduler.config.max_num_batched_tokens or not _knows_its_plan(kind):
        return 0
    if any(_shares_its_next_block(scheduler, request) for request in running):
        return 0
    limit = min(request.max_tokens - request.num_output_tokens for request in running)
    if not scheduler.waiting or not scheduler.memory.free_slots or not policy.admits_beside_running:
        return limit
    if scheduler._blocked is None or scheduler.memory.windows.pool is not None:
        return 0
    return min(limit, policy.steps_alike()) if scheduler._blocked.holds(scheduler.pool) else 0


@lru_cache
def _knows_its_plan(kind: type[FirstComeFirstServed]) -> bool:
    """Whether steps_alike() speaks of the plan that the policy has, not of one that it inherited."""
    owner = next(base for base in kind.__mro__ if "plan" in vars(base))
    return any("steps_alike" in vars(base) for base in kind.__mro__[: kind.__mro__.index(owner) + 1])


def _shares_its_next_block(scheduler: Scheduler, request: Request) -> bool:
    """Whether the next token goes to a half-filled block that a fork shares: it would be copied."""
    index = request.num_computed_tokens // scheduler.config.block_size
    if index >= len(request.block_table):
        return False
    return scheduler.pool.is_shared(request.block_table[index]) or scheduler.memory.windows.is_shared(request)


def leap(scheduler: Scheduler, count: int, tokens: Mapping[str, Sequence[int]]) -> Leap:
    """At most `count` steps, which get `tokens`, `count` for each running request; none before the last may end it.

    PlanError, and no change, for more than most_steps(), or tokens that are missing, too many, or end too early.
    """
    _require(scheduler, count, tokens)
    running, blocked = list(scheduler.running), scheduler._blocked if scheduler.waiting else None
    starts = [request.num_computed_tokens for request in running]
    for request in running:
        request.token_ids.extend(tokens[request.request_id][: count - 1])
    result = _cross_borders(scheduler, count, running, starts, blocked)
    if result.steps == 0:
        _take_back(running, starts, 1)
        return result
    if result.steps < count:
        _take_back(running, starts, result.steps)
    scheduler.step += result.steps
    scheduler.policy.skip(result.steps)
    for request, start in zip(running, starts, strict=True):
        request.num_steps += result.steps
        if result.steps == count:
            _settle(scheduler, request, start + count)
        request.num_computed_tokens = request.furthest_computed = start + result.steps
        request.append(tokens[request.request_id][result.steps - 1])
        if request.finish_reason is not None:
            scheduler._finish(request)
            result.finished.append(request)
    return result


def _require(scheduler: Scheduler, count: int, tokens: Mapping[str, Sequence[int]]) -> None:
    most = most_steps(scheduler)
    if not 1 <= count <= most:
        raise PlanError(f"leap() over {count} steps: expected 1 to {most}")
    for request in scheduler.running:
        given = tokens.get(request.request_id, ())
        if len(given) != count:
            raise PlanError(f"leap(): {len(given)} tokens for {request.request_id!r}, expected {count}")
        if not request.stop_token_ids.isdisjoint(given[:-1]):
            raise PlanError(f"leap(): {request.request_id!r} ends before the last of {count} steps")


def _cross_borders(
    scheduler: Scheduler, count: int, running: list[Request], starts: list[int], blocked: Blocked | None
) -> Leap:
    """All calls that change anything, but those behind step `count`. The requests' counters are left behind."""
    pool, windows, result = scheduler.pool, scheduler.memory.windows.pool, Leap(count)
    for step, growing, settling in _borders(scheduler, count, starts):
        free = pool.num_free
        if len(growing) > free or (windows is not None and len(growing) > windows.num_free):
            result.steps = step
            return result
        for index in growing:
            running[index].num_computed_tokens = starts[index] + step
            scheduler.memory.grow(running[index], 1, [])
        if pool.num_free != free:
            result.taken.append((step, free - pool.num_free))
        if step == count - 1:
            return result
        for index in settling:
            _settle(scheduler, running[index], starts[index] + step + 1)
        if blocked is not None and not blocked.holds(pool):
            result.steps = step + 1
            return result
    return result


def _borders(scheduler: Scheduler, count: int, starts: list[int]) -> Iterator[tuple[int, list[int], list[int]]]:
    """Steps at which something changes: who begins a block in it, who has one full, or one unseen, behind it."""
    size, window = scheduler.config.block_size, scheduler.config.sliding_window
    growing: dict[int, list[int]] = {}
    settling: dict[int, list[int]] = {}
    for index, start in enumerate(starts):
        growing.setdefault(-start % size, []).append(index)
        settling.setdefault((-start - 1) % size, []).append(index)
        if window is not None and (window - 1) % size:
            settling.setdefault((window - 2 - start) % size, []).append(index)
    if window is not None:
        for indices in settling.values():
            indices.sort()
    phases = [(phase, growing.get(phase, []), settling.get(phase, [])) for phase in sorted({*growing, *settling})]
    for base in range(0, count, size):
        for phase, grows, settles in phases:
            if base + phase < count:
                yield base + phase, grows, settles


def _settle(scheduler: Scheduler, request: Request, stop: int) -> None:
    """As after a step that computed the token before `stop`."""
    request.num_computed_tokens = request.furthest_computed = stop
    if stop % scheduler.config.block_size == 0:
        scheduler.prefix_cache.publish(request, stop - 1)
    scheduler.memory.windows.release_unseen(request)


def _take_back(running: list[Request], starts: list[int], steps: int) -> None:
    """The tokens of steps that were not taken."""
    for request, start in zip(running, starts, strict=True):
        del request.token_ids[start + steps :]
        request.num_computed_tokens = start
