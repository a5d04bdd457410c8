"""A small scheduler of the suite's own, which runs a block manager: requests in the order of arrival, decodes first."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lfm2np.errors import RequestError
from scheduler.protocol import Copy, Entry, Refused, Request, Step, kind_of

NOT_OF_MANAGERS = frozenset({"children", "drafts", "priorities", "states", "windows"})  # features


def as_scheduler(adapted: Any, sizes: Mapping[str, Any]) -> Any:
    """A scheduler as it is, a block manager under one of ours. RequestError for what is neither."""
    kind = kind_of(adapted)
    if kind is None:
        raise RequestError(
            f"{type(adapted).__name__}: neither a scheduler (add, step, update) nor a block manager (allocate, append, "
            "places, free)"
        )
    return adapted if kind == "scheduler" else ManagedScheduler(adapted, {**sizes, **getattr(adapted, "sizes", {})})


@dataclass(eq=False)
class Managed:
    request: Request
    tokens: list[int]
    arrival: int
    computed: int = 0

    @property
    def name(self) -> str:
        return self.request.request_id


def by_arrival(each: Managed) -> int:
    return each.arrival


class ManagedScheduler:
    """Whoever can't grow is preempted, the last first; it computes all again but what is found in the cache."""

    def __init__(self, manager: Any, sizes: Mapping[str, Any]) -> None:
        self.manager, self.sizes = manager, sizes
        self.lacks = NOT_OF_MANAGERS | frozenset(getattr(manager, "lacks", ()))
        self.policies = frozenset(getattr(manager, "policies", ())) | {"fcfs", "preempts-last"}
        self.budget = sizes.get("max_num_batched_tokens", 16)
        self.most = sizes.get("max_num_seqs", 4)
        self.capacity = sizes["num_blocks"] * sizes["block_size"]
        self.arrivals = 0
        self.waiting: list[Managed] = []
        self.running: list[Managed] = []
        self.scheduled: list[tuple[Managed, int]] = []  # and where its tokens of this step end
        if hasattr(manager, "free_blocks"):
            self.free_blocks = manager.free_blocks
        if hasattr(manager, "verify"):
            self.verify = manager.verify
        if hasattr(manager, "fork"):
            self.fork = self._fork

    def add(self, request: Request) -> None:
        if len(request.prompt_token_ids) + request.max_tokens - 1 > self.capacity:
            raise Refused(f"request {request.request_id}: larger than the memory")
        self.waiting.append(Managed(request, list(request.prompt_token_ids), self._arrived()))

    def _arrived(self) -> int:
        self.arrivals += 1
        return self.arrivals

    def step(self) -> Step:
        self.scheduled, left = [], self.budget
        copies: list[Copy] = []
        preempted: list[str] = []
        for each in sorted(self.running, key=by_arrival):
            if each not in self.running or not left or len(self.scheduled) == self.most:
                continue
            new = min(left, len(each.tokens) - each.computed)
            if self._grow(each, each.computed + new, copies, preempted):
                self.scheduled.append((each, each.computed + new))
                left -= new
        while self.waiting and left and len(self.running) < self.most and not preempted:
            first = self.waiting[0]
            cached = self.manager.allocate(first.name, tuple(first.tokens), first.request.cache_salt)
            if cached is None:
                break
            if isinstance(cached, bool) or not 0 <= cached < len(first.tokens):
                raise TypeError(f"allocate() returned {cached!r}, expected None or 0 to {len(first.tokens) - 1}")
            first.computed = cached
            self.running.append(self.waiting.pop(0))
            new = min(left, len(first.tokens) - cached)
            self.scheduled.append((first, cached + new))
            left -= new
        return Step([self._entry(each, stop) for each, stop in self.scheduled], copies, preempted)

    def _grow(self, each: Managed, stop: int, copies: list[Copy], preempted: list[str]) -> bool:
        """Room for tokens that came since; False if it is preempted itself."""
        known = len(self._places(each))
        while known < stop:
            room = self.manager.append(each.name, tuple(each.tokens[known:stop]))
            if not isinstance(room, bool | list | tuple):
                raise TypeError(f"append() returned {type(room).__name__}, expected a bool or copies")
            if room is not False:
                copies += room if room is not True else ()
                break
            victim = max(self.running, key=by_arrival)
            self._preempt(victim)
            preempted.append(victim.name)
            if victim is each:
                return False
        return True

    def _places(self, each: Managed) -> list[int]:
        places = self.manager.places(each.name)
        if not hasattr(places, "__len__"):
            raise TypeError(f"places() returned {type(places).__name__}, expected a list")
        return list(places)

    def _entry(self, each: Managed, stop: int) -> Entry:
        places = self._places(each)[:stop]
        ids = tuple(each.tokens[each.computed : stop])
        return Entry(each.name, each.computed, ids, places[each.computed :], places)

    def update(self, tokens: Mapping[str, Sequence[int]]) -> Collection[str]:
        ended = []
        for each, stop in self.scheduled:
            if each not in self.running:  # aborted in flight
                continue
            if hasattr(self.manager, "publish"):
                self.manager.publish(each.name, tuple(each.tokens[:stop]))
            each.computed = stop
            each.tokens += tokens.get(each.name, ())
            if each.name in tokens and has_ended(each):
                self._remove(each)
                ended.append(each.name)
        return ended

    def abort(self, request_id: str) -> None:
        for each in (*self.running, *self.waiting):
            if each.name == request_id:
                self._remove(each)

    def _remove(self, each: Managed) -> None:
        if each in self.running:
            self.running.remove(each)
            self.manager.free(each.name)
        else:
            self.waiting.remove(each)

    def _running(self, request_id: str) -> Managed:
        return next(each for each in self.running if each.name == request_id)

    def preempt(self, request_id: str) -> None:
        self._preempt(self._running(request_id))

    def _preempt(self, each: Managed) -> None:
        self._remove(each)
        self.waiting = sorted([*self.waiting, each], key=by_arrival)

    def _fork(self, parent_id: str, child: Request) -> None:
        parent = self._running(parent_id)
        self.manager.fork(parent_id, child.request_id)
        self.running.append(Managed(child, list(parent.tokens), self._arrived(), parent.computed))


def has_ended(each: Managed) -> bool:
    outputs = len(each.tokens) - len(each.request.prompt_token_ids)
    return outputs >= each.request.max_tokens or each.tokens[-1] in each.request.stop_token_ids
