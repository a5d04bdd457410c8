"""Many steps at once, where each would do the same: all running requests decode, and nobody can be let in.

Such a step makes three calls for each running request: memory.grow() for one token, then, in update(), publish() and
append(). The first two change something only between two blocks: the one before is full and is published, the next one
is taken. leap() makes just these calls, with the same arguments in the same order; what each call would have left as it
is, is left out. So all that a scheduler holds is the same as after that many schedule() and update(): tables, free
lists, keys, counters. Nobody is let in meanwhile, since nothing waits, or no slot is free, or the policy lets nobody in
beside those that run, and no step of the leap changes that.

The leap ends early, before a step for which blocks would not suffice (it preempts). Requests have no forks,
drafts and windows here, and the policy is one of scheduler.POLICIES.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from scheduler import Request, Scheduler


@dataclass
class Leap:
    """What came of it. `taken`: (step of the leap, blocks that it took from the free list, less those given back)."""

    steps: int
    finished: list[Request] = field(default_factory=list)
    taken: list[tuple[int, int]] = field(default_factory=list)


def most_steps(scheduler: Scheduler) -> int:
    """How many steps leap() may take at most; 0: the next one may do something else than decode. O(running)."""
    running, config = scheduler.running, scheduler.config
    if scheduler.waiting and scheduler.memory.free_slots and scheduler.policy.admits_beside_running:
        return 0
    if config.sliding_window is not None or not 0 < len(running) <= config.max_num_batched_tokens:
        return 0
    if not all(request.is_decoding for request in running):
        return 0
    return min(request.max_tokens - request.num_output_tokens for request in running)


def leap(scheduler: Scheduler, count: int, tokens: Mapping[str, int]) -> Leap:
    """At most `count` steps, not more than most_steps(), in which each running request gets its one of `tokens` again
    and again; none before the last may end it."""
    running = list(scheduler.running)
    starts = [request.num_computed_tokens for request in running]
    for request in running:
        request.token_ids.extend(repeat(tokens[request.request_id], count - 1))
    result = _cross_blocks(scheduler, count, running, starts)
    scheduler.step += result.steps
    if result.steps:
        scheduler.policy.skip(result.steps)
    for request, start in zip(running, starts, strict=True):
        del request.token_ids[start + max(1, result.steps) :]  # of steps that were not taken
        if result.steps == 0:
            continue
        request.num_steps += result.steps
        if result.steps == count:
            _settle(scheduler, request, start + count)
        request.num_computed_tokens = request.furthest_computed = start + result.steps
        request.append(tokens[request.request_id])
        if request.finish_reason is not None:
            scheduler.finish(request.request_id, request.finish_reason)
            result.finished.append(request)
    return result


def _cross_blocks(scheduler: Scheduler, count: int, running: Sequence[Request], starts: Sequence[int]) -> Leap:
    """All calls that change anything, but those behind step `count`. The requests' counters are left behind."""
    pool, size, result = scheduler.pool, scheduler.config.block_size, Leap(count)
    beginners: dict[int, list[int]] = {}  # who begins a block, by step of a block's length
    for index, start in enumerate(starts):
        beginners.setdefault(-start % size, []).append(index)
    for step in sorted(step for turn in beginners for step in range(turn, count, size)):
        growing, free = beginners[step % size], pool.num_free
        for index in growing if step else ():  # whose last block is full since the step before
            _settle(scheduler, running[index], starts[index] + step)
        if not scheduler.memory.reserves:  # else blocks for the whole length are there
            if len(growing) > pool.num_free:
                result.steps = step
                return result
            for index in growing:
                scheduler.memory.grow(running[index], 1, [])
        result.taken.append((step, free - pool.num_free))
    return result


def _settle(scheduler: Scheduler, request: Request, stop: int) -> None:
    """As after a step that computed the token before `stop`."""
    request.num_computed_tokens = request.furthest_computed = stop
    if stop % scheduler.config.block_size == 0:
        scheduler.prefix_cache.publish(request, stop - 1)
