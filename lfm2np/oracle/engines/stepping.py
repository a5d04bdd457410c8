"""Runs requests on an engine that steps (level c of protocol.py): the only loop that does.

Such an engine is deterministic: a request that is sent after k tokens of another is added before the step that follows
them. Pauses have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lfm2np.oracle.engines.records import FAILED, HANG, NO_ANSWER, Answer, Request, failed, fault, is_due
from lfm2np.oracle.engines.target import Answers

STEPS_PER_TOKEN = 4  # far more than any engine needs: it computes again what it preempted
FAULTS = (Exception, SystemExit)  # of an engine; a KeyboardInterrupt is the user's
Read = Callable[[Request, Any], Answers]


@dataclass
class Running:
    """One request of a run: what the engine gave last for it, or why there is nothing; times are steps."""

    request: Request
    samples: list[Any] = field(default_factory=list)
    num_tokens: int = 0  # of its longest sample
    error: Answer | None = None
    is_aborted: bool = False
    sent: float | None = None
    first: float | None = None
    ended: float | None = None


class StepRun:
    """One run. Requests have ids that the engine never saw.

    at_once   most requests in the engine together
    read      what the engine gave for a request, as answers
    """

    def __init__(self, engine: Any, requests: Sequence[Request], at_once: int, read: Read) -> None:
        self.is_spoilt = False  # the engine may be left in a state that would harm other requests
        self._engine, self._at_once, self._read = engine, at_once, read
        self._all = [Running(request) for request in requests]
        self._steps = 0

    def answers(self) -> list[Answers]:
        most = STEPS_PER_TOKEN * (sum(each.request.num_tokens for each in self._all) + 20)
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
        return [self._answers(each) for each in self._all]

    def _running(self) -> list[Running]:
        return [each for each in self._all if each.sent is not None and each.ended is None]

    def _add_due(self) -> None:
        for each in self._all:
            if each.sent is None and len(self._running()) < self._at_once and self._is_due(each.request):
                each.sent = float(self._steps)
                try:
                    self._engine.add(each.request)
                except FAULTS as problem:
                    self._end(each, failed(fault(problem)))

    def _is_due(self, request: Request) -> bool:
        ended = [other.ended is not None for other in self._all]
        return is_due(request, [other.num_tokens for other in self._all], ended)

    def _abort_due(self) -> bool:
        """Whether any was aborted."""
        running = [(each, each.request.abort_after) for each in self._running()]
        due = [each for each, most in running if most is not None and each.num_tokens >= most]
        for each in due:
            each.is_aborted = True
            try:
                each.samples = list(self._engine.abort(each.request.request_id) or ()) or each.samples
                self._end(each)
            except FAULTS as problem:
                self._end(each, failed(f"abort(): {fault(problem)}"))
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
        for each in self._running():
            if samples := outputs.get(each.request.request_id):
                each.samples = samples
                each.num_tokens = max(len(sample.token_ids) for sample in samples)
                each.first = float(self._steps) if each.first is None else each.first
                if is_finished(samples):
                    self._end(each)

    def _end(self, each: Running, error: Answer | None = None) -> None:
        each.ended, each.error = float(self._steps), error

    def _fail_running(self, why: str, kind: str) -> None:
        self.is_spoilt = True
        for each in self._running():
            self._end(each, failed(why, kind))

    def _answers(self, each: Running) -> Answers:
        if each.error is not None:
            answers: Answers = (each.error,)
        elif each.sent is None:
            answers = (failed("never sent, as the engine failed before"),)
        elif not each.samples and each.is_aborted:  # before its first token
            answers = (Answer((), finish_reason="abort"),)
        else:
            answers = self._read(each.request, each.samples)
        times: dict[str, Any] = {"sent": each.sent, "first": each.first, "ended": each.ended}
        if each.is_aborted:
            times |= {"is_aborted": True}
            answers = tuple(replace(answer, finish_reason=answer.finish_reason or "abort") for answer in answers)
        return tuple(replace(answer, **times) for answer in answers)


def is_finished(samples: Iterable[Any]) -> bool:
    reasons = [getattr(sample, "finish_reason", None) for sample in samples]
    return bool(reasons) and None not in reasons
