"""Many steps at once, where each would do the same: all running requests decode, and nobody can be let in.

Such a step makes four calls for each running request: memory.grow() for one token, then, in update(), publish(),
release_unseen() and append(). All but the last change something only where a position crosses the border of a block (or
of a window), and those steps follow from the position alone. leap() makes just these calls, with the same arguments in
the same order; what each call would have left as it is, is left out. So all that a scheduler holds is the same as after
that many schedule() and update(): tables, free lists, keys, counters. Nobody is let in meanwhile, since nothing waits,
or no slot is free, or the policy lets nobody in beside those that run, and no step of the leap changes that.

The leap ends early, before a step for which blocks would not suffice (it preempts). Requests have no forks and no
drafts here, and the policy is one of scheduler.POLICIES.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    pool, pools, result = scheduler.pool, [group.pool for group in scheduler.memory.groups], Leap(count)
    for step, growing, settling in _borders(scheduler, count, starts):
        free = pool.num_free
        if len(growing) > min(each.num_free for each in pools):
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
    scheduler.memory.release_unseen(request)


def _take_back(running: list[Request], starts: list[int], steps: int) -> None:
    """The tokens of steps that were not taken."""
    for request, start in zip(running, starts, strict=True):
        del request.token_ids[start + steps :]
        request.num_computed_tokens = start
