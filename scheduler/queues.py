"""Who waits and who runs, each list in the policy's order, and the ways from one to the other."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

from scheduler.memory import Memory
from scheduler.request import Request, Status, is_queued


class Queues:
    """Waiting and running requests, each in the policy's order.

    key  orders requests and never changes for one: see policy.py
    """

    def __init__(self, key: Callable[[Request], Any], memory: Memory) -> None:
        self.key, self.memory = key, memory
        self.waiting: list[Request] = []  # the first is admitted next
        self.running: list[Request] = []  # the last is preempted first
        self.num_preemptions = 0

    def wait(self, request: Request) -> None:
        request.awaits_split = False
        insort(self.waiting, request, key=self.key)

    def run(self, request: Request) -> None:
        """It has been given a slot and blocks."""
        request.awaits_split, request.status = False, Status.RUNNING
        insort(self.running, request, key=self.key)

    def preempt(self, request: Request) -> None:
        """From running back to waiting, at its old place; slot and blocks are given back.

        Admitted again, it finds what is still cached as any request does (prefix_cache.py), and computes the rest.
        """
        self.remove(request)
        request.status, request.num_computed_tokens = Status.PREEMPTED, 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.wait(request)

    def remove(self, request: Request) -> None:
        """From the list that it is in, if any; slot and blocks are given back."""
        if request.slot is None and not is_queued(request):
            return
        queue = self.waiting if request.slot is None else self.running
        del queue[bisect_left(queue, self.key(request), key=self.key)]
        if request.slot is not None:
            self.memory.release(request)
