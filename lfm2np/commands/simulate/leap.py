"""Many steps at once, where each would do the same: all running requests decode, and nobody can be let in.

Such a step makes three calls for each running request: memory.grow() for one token, then, in update(), publish() and
append(). The first two change something only where a position crosses the border of a block, and those steps follow
from the position alone. leap() makes just these calls, with the same arguments in
the same order; what each call would have left as it is, is left out. So all that a scheduler holds is the same as after
that many schedule() and update(): tables, free lists, keys, counters. Nobody is let in meanwhile, since nothing waits,
or no slot is free, or the policy lets nobody in beside those that run, and no step of the leap changes that.

The leap ends early, before a step for which blocks would not suffice (it preempts). Requests have no forks,
drafts and windows here, and the policy is one of scheduler.POLICIES.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler import Request, Scheduler


@dataclass
class Leap:
    """What came of it. `taken`: (step of the leap, blocks that it took from the free list), where there were any."""

    steps: int
    finished: list[Request] = field(default_factory=list)
    taken: list[tuple[int, int]] = field(default_factory=list)


def most_steps(scheduler: Scheduler) -> int:
    """How many steps leap() may take at most; 0: the next one may do something else than decode. O(running)."""
    policy, running = scheduler.policy, scheduler.running
    if not running or scheduler.in_flight or not all(request.is_decoding for request in running):
        return 0
    if scheduler.config.sliding_window is not None:
        return 0
    if len(running) > scheduler.config.max_num_batched_tokens:
        return 0
    if scheduler.waiting and scheduler.memory.free_slots and policy.admits_beside_running:
        return 0
    return min(request.max_tokens - request.num_output_tokens for request in running)


def leap(scheduler: Scheduler, count: int, tokens: Mapping[str, Sequence[int]]) -> Leap:
    """At most `count` steps, not more than most_steps(), which get `tokens`, `count` for each running request; none
    before the last may end it."""
    running = list(scheduler.running)
    starts = [request.num_computed_tokens for request in running]
    for request in running:
        request.token_ids.extend(tokens[request.request_id][: count - 1])
    result = _cross_borders(scheduler, count, running, starts)
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
            scheduler.finish(request.request_id, request.finish_reason)
            result.finished.append(request)
    return result


def _cross_borders(scheduler: Scheduler, count: int, running: list[Request], starts: list[int]) -> Leap:
    """All calls that change anything, but those behind step `count`. The requests' counters are left behind."""
    pool, size, result = scheduler.pool, scheduler.config.block_size, Leap(count)
    beginners: dict[int, list[int]] = {}  # who begins a block, by step of a block's length
    for index, start in enumerate(starts):
        beginners.setdefault(-start % size, []).append(index)
    for step in range(count):
        growing, free = beginners.get(step % size, ()), pool.num_free
        if len(growing) > free:
            result.steps = step
            return result
        for index in growing:
            scheduler.memory.grow(running[index], 1, [])
        if pool.num_free != free:
            result.taken.append((step, free - pool.num_free))
        for index in beginners.get((step + 1) % size, ()) if step < count - 1 else ():  # whose block is full
            _settle(scheduler, running[index], starts[index] + step + 1)
    return result


def _settle(scheduler: Scheduler, request: Request, stop: int) -> None:
    """As after a step that computed the token before `stop`."""
    request.num_computed_tokens = request.furthest_computed = stop
    if stop % scheduler.config.block_size == 0:
        scheduler.prefix_cache.publish(request, stop - 1)


def _take_back(running: list[Request], starts: list[int], steps: int) -> None:
    """The tokens of steps that were not taken."""
    for request, start in zip(running, starts, strict=True):
        del request.token_ids[start + steps :]
