"""The waiting requests in a policy's order: a heap in which a request that left is skipped when it comes up."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from scheduler.request import Request, Status

Key = tuple[int, int]


class WaitingQueue:
    """Push, pop and leave cost O(log n), whatever waits. No two requests have the same key."""

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._heap: list[tuple[Key, Request]] = []
        self._count = 0  # of those still waiting

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """In order, without taking any: O(n log n)."""
        return (request for _, request in sorted(self._heap) if is_waiting(request))

    def push(self, request: Request) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self._key(request), request))

    def peek(self) -> Request:
        """The first one; IndexError if none waits."""
        while not is_waiting(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        self._count -= 1
        return request

    def left(self) -> None:
        """One request in the queue is finished: it is dropped when half of the heap is such."""
        self._count -= 1
        if len(self._heap) > 2 * self._count + 64:
            self._heap = [entry for entry in self._heap if is_waiting(entry[1])]
            heapq.heapify(self._heap)


def is_waiting(request: Request) -> bool:
    return request.status in (Status.WAITING, Status.PREEMPTED)
