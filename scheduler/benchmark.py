"""Microseconds per scheduled token of the pure scheduler: `python -m scheduler.benchmark`.

Running requests all decode, in one step each; the queue holds 100,000 others. Medians of several steps.
"""

from __future__ import annotations

import statistics
import time

from scheduler.config import SchedulerConfig
from scheduler.request import Request
from scheduler.scheduler import Scheduler

SIZES = (10, 100, 1_000, 10_000)
WAITING = 100_000
STEPS = 40


def cost(num_running: int, num_waiting: int, steps: int) -> float:
    """Median microseconds of schedule() and update() together, per scheduled token."""
    config = SchedulerConfig(
        num_blocks=6 * num_running, max_num_seqs=num_running, max_num_batched_tokens=max(num_running, 16)
    )
    scheduler = Scheduler(config)
    for index in range(num_running + num_waiting):
        scheduler.add(Request(str(index), (1, 2, 3, index), max_tokens=64))
    while any(not request.is_decoding for request in scheduler.running) or len(scheduler.running) < num_running:
        one_step(scheduler)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        count = one_step(scheduler)
        times.append((time.perf_counter() - began) / count)
    return statistics.median(times) * 1e6


def one_step(scheduler: Scheduler) -> int:
    plan = scheduler.schedule()
    scheduler.update(plan, {name: [7] for entry in plan.scheduled for name in entry.samples})
    return plan.num_tokens


def main() -> None:
    print(f"{'running':>8}{'waiting':>9}{'us per scheduled token':>24}{'times that of 100':>19}")
    costs = {size: cost(size, WAITING, STEPS) for size in SIZES}
    for size, micros in costs.items():
        print(f"{size:>8}{WAITING:>9}{micros:>24.1f}{micros / costs[100]:>19.2f}")


if __name__ == "__main__":
    main()
