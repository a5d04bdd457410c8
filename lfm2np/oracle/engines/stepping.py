"""Runs requests on an engine that steps (level c of protocol.py): the only loop that does.

Such an engine is deterministic: a request that is sent after k tokens of another is added before the step that follows
them. Pauses have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lfm2np.oracle.engines.records import FAILED, HANG, NO_ANSWER, Answer, Request, failed, fault, is_due
from lfm2np.oracle.engines.target import Answers

STEPS_PER_TOKEN = 4  # far more than any engine needs: it computes again what it preempted
FAULTS = (Exception, SystemExit)  # of an engine; a KeyboardInterrupt is the user's
Read = Callable[[Request, Any], Answers]


class StepRun:
    """One run. Requests have ids that the engine never saw.

    at_once   most requests in the engine together
    read      what the engine gave for a request, as answers
    finished  gets the index of a request and its answers as soon as it has ended
    """

    def __init__(
        self,
        engine: Any,
        requests: Sequence[Request],
        at_once: int,
        read: Read,
        finished: Callable[[int, Answers], None],
    ) -> None:
        self.is_spoilt = False  # the engine may be left in a state that would harm other requests
        self._engine, self._requests, self._at_once = engine, requests, at_once
        self._read, self._finished = read, finished
        count = len(requests)
        self._latest: list[list[Any]] = [[] for _ in requests]  # what the engine gave last for each
        self._num_tokens = [0] * count  # of each request, of its longest sample
        self._has_ended = [False] * count
        self._errors: dict[int, Answer] = {}
        self._aborted: set[int] = set()
        self._sent: list[float | None] = [None] * count
        self._first: list[float | None] = [None] * count
        self._ended: list[float | None] = [None] * count
        self._steps = 0

    def answers(self) -> list[Answers]:
        most = STEPS_PER_TOKEN * (sum(request.num_tokens for request in self._requests) + 20)
        while True:
            self._add_due()
            if self._abort_due():
                continue  # some may have waited for their end
            if not self._running() or self.is_spoilt:
                break
            self._steps += 1
            if self._steps > most:
                self._fail_running(f"not finished after {most} steps", HANG)
                break
            self._step()
        return [self._answers(index) for index in range(len(self._requests))]

    def _running(self) -> list[int]:
        return [index for index, sent in enumerate(self._sent) if sent is not None and not self._has_ended[index]]

    def _add_due(self) -> None:
        for index, request in enumerate(self._requests):
            has_room = len(self._running()) < self._at_once
            if self._sent[index] is None and has_room and is_due(request, self._num_tokens, self._has_ended):
                self._sent[index] = float(self._steps)
                try:
                    self._engine.add(request)
                except FAULTS as problem:
                    self._errors[index] = failed(fault(problem))
                    self._end(index)

    def _abort_due(self) -> bool:
        """Whether any was aborted."""
        after = [request.abort_after for request in self._requests]
        due = [
            index for index in self._running() if (most := after[index]) is not None and self._num_tokens[index] >= most
        ]
        for index in due:
            self._aborted.add(index)
            try:
                last = list(self._engine.abort(self._requests[index].request_id) or ())
                self._latest[index] = last or self._latest[index]
            except FAULTS as problem:
                self._errors[index] = failed(f"abort(): {fault(problem)}")
            self._end(index)
        return bool(due)

    def _step(self) -> None:
        try:
            if self._engine.has_unfinished:
                self._take({name: list(samples) for name, samples in self._engine.step().items()})
            else:
                self._fail_running("the engine says that it is done, but this was never answered", NO_ANSWER)
        except FAULTS as problem:
            self._fail_running(f"step(): {fault(problem)}", FAILED)

    def _take(self, outputs: Mapping[str, list[Any]]) -> None:
        """What a step reports; of requests that don't run it may report anything."""
        for index in self._running():
            samples = outputs.get(self._requests[index].request_id)
            if samples:
                self._latest[index] = samples
                self._num_tokens[index] = max(len(sample.token_ids) for sample in samples)
                self._first[index] = float(self._steps) if self._first[index] is None else self._first[index]
                if is_finished(samples):
                    self._end(index)

    def _end(self, index: int) -> None:
        self._has_ended[index] = True
        self._ended[index] = float(self._steps)
        if index not in self._errors and index not in self._aborted:
            self._finished(index, self._answers(index))

    def _fail_running(self, why: str, kind: str) -> None:
        self.is_spoilt = True
        for index in self._running():
            self._errors[index] = failed(why, kind)
            self._end(index)

    def _answers(self, index: int) -> Answers:
        is_aborted = index in self._aborted
        if index in self._errors:
            answers: Answers = (self._errors[index],)
        elif self._sent[index] is None:
            answers = (failed("never sent, as the engine failed before"),)
        elif not self._latest[index] and is_aborted:  # before its first token
            answers = (Answer((), finish_reason="abort"),)
        else:
            answers = self._read(self._requests[index], self._latest[index])
        times: dict[str, Any] = {"sent": self._sent[index], "first": self._first[index], "ended": self._ended[index]}
        if is_aborted:
            times |= {"is_aborted": True}
            answers = tuple(replace(each, finish_reason=each.finish_reason or "abort") for each in answers)
        return tuple(replace(answer, **times) for answer in answers)


def is_finished(samples: Iterable[Any]) -> bool:
    reasons = [getattr(sample, "finish_reason", None) for sample in samples]
    return bool(reasons) and None not in reasons
