"""Carries out a trace on a Python engine, step by step (level c of engine_protocol.py), or in rounds on any target.

An engine that steps is deterministic: a request that is sent after k tokens of another is added before the step that
follows them. A pause means nothing there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lfm2np.engine_protocol import Request, lacking, load_factory, missing
from lfm2np.errors import Lfm2npError
from lfm2np.fuzz.played import FAILED, HANG, IMPOSSIBLE, LEAK, Played, Reply, Takes, Trouble
from lfm2np.fuzz.trace import Sent, Trace
from lfm2np.oracle.targets.python_target import FAULTS, STEPS_PER_TOKEN, fault, from_completions, is_finished
from lfm2np.oracle.targets.records import Answer, Ask
from lfm2np.oracle.targets.target import Abilities, Target, TargetError
from lfm2np.sampling.params import SamplingParams


class StepsPlayer:
    """The engine of package.module:factory, which has add(), step(), abort() and has_unfinished.

    It lives on from trace to trace, as a server does, until a fault may have spoilt it. `took`: seconds to make it.
    """

    def __init__(self, name: str, model: Path, make: Callable[[], Any] | None = None) -> None:
        self._name = name
        self._make = make or (lambda: load_factory(name)(str(model), {}))
        self._engine: Any = None
        self._count = 0
        self.took = 0.0

    def steps(self) -> bool:
        """Whether it offers what is needed. TargetError if it can't be made."""
        return missing(self._made(), ["steps"]) is None

    def probe(self) -> Takes:
        engine = self._made()
        if why := missing(engine, ["steps"]):
            raise TargetError(f"{self._name}: {why}")
        lacks = lacking(engine)
        abilities = Abilities(f"{self._name} ({type(engine).__name__})", tells_logprobs=True, can_abort=True)
        sampling = "sampling" not in lacks
        stops = not lacks & {"stops", "stop-strings"}
        return Takes(abilities, sampling and "samples" not in lacks, sampling, stops)

    def play(self, trace: Trace) -> Played:
        engine = self._made()
        run = StepsRun(engine, trace, self._count)
        self._count += len(trace.requests)
        replies = run.replies()
        if any(one.trouble for one in replies):
            self._engine = None
            return Played(replies)
        return Played(replies, leak_of(engine), run.metrics())

    def close(self) -> None:
        """The next trace has a new engine."""
        self._engine = None

    def _made(self) -> Any:
        if self._engine is None:
            began = time.monotonic()
            try:
                self._engine = self._make()
            except Lfm2npError as problem:
                raise TargetError(str(problem)) from None
            except FAULTS as problem:
                raise TargetError(f"{self._name}: {fault(problem)}") from problem
            self.took = time.monotonic() - began
        return self._engine


class StepsRun:
    """One trace on an engine that steps."""

    def __init__(self, engine: Any, trace: Trace, first_id: int) -> None:
        self._engine, self._sent = engine, trace.requests
        self._names = [f"fuzz-{first_id + index}" for index in range(len(self._sent))]
        self._found: dict[str, list[Any]] = {}
        self._came = [0] * len(self._sent)  # tokens of each, of its longest sample
        self._state: list[str] = ["waiting"] * len(self._sent)  # then running, ended, left
        self._trouble: dict[int, Trouble] = {}
        self._steps = 0
        self._times: dict[int, dict[str, float]] = {index: {} for index in range(len(self._sent))}
        self._before = self.counters()

    def replies(self) -> tuple[Reply, ...]:
        most = STEPS_PER_TOKEN * (sum(len(one.prompt) + one.max_tokens * one.samples for one in self._sent) + 20)
        while not self._trouble:
            self._send_those_due()
            if self._leave_those_due():
                continue  # some may have waited for their end
            if not any(state == "running" for state in self._state):
                break
            self._steps += 1
            if self._steps > most:
                self._all_fail(HANG, f"not finished after {most} steps")
                break
            self._step()
        return tuple(self._reply(index) for index in range(len(self._sent)))

    def metrics(self) -> dict[str, float]:
        return {name: value - self._before.get(name, 0.0) for name, value in self.counters().items()}

    def counters(self) -> dict[str, float]:
        if missing(self._engine, ["metrics"]):
            return {}
        try:
            found = self._engine.metrics()
            return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
        except FAULTS:
            return {}  # they only steer

    def _send_those_due(self) -> None:
        for index, one in enumerate(self._sent):
            if self._state[index] == "waiting" and self._is_due(one):
                self._state[index] = "running"
                self._times[index]["sent"] = float(self._steps)
                try:
                    salt = self._names[index] if one.cold else ""
                    self._engine.add(Request(self._names[index], one.prompt, params_of(one), cache_salt=salt))
                except FAULTS as problem:
                    self._trouble[index] = Trouble(FAILED, fault(problem))
                    self._state[index] = "ended"

    def _is_due(self, one: Sent) -> bool:
        if one.after is None or self._state[one.after] in ("ended", "left"):
            return True
        return one.after_tokens is not None and self._came[one.after] >= one.after_tokens

    def _leave_those_due(self) -> bool:
        """Whether there were any."""
        before = self._state.count("left")
        for index, one in enumerate(self._sent):
            running = self._state[index] == "running" and one.abort_after is not None
            if running and self._came[index] >= (one.abort_after or 0):
                try:
                    left = list(self._engine.abort(self._names[index]) or ())
                    self._found[self._names[index]] = left or self._found.get(self._names[index], [])
                except FAULTS as problem:
                    self._trouble[index] = Trouble(FAILED, f"abort(): {fault(problem)}")
                self._state[index] = "left"
                self._times[index]["ended"] = float(self._steps)
        return self._state.count("left") > before

    def _step(self) -> None:
        try:
            if not self._engine.has_unfinished:
                self._all_fail(IMPOSSIBLE, "the engine says that it is done, but this was never answered")
                return
            self._take({name: list(found) for name, found in self._engine.step().items()})
        except FAULTS as problem:
            self._all_fail(FAILED, f"step(): {fault(problem)}")

    def _take(self, told: Mapping[str, list[Any]]) -> None:
        """What a step told of those that run; of those that were left or have ended it may tell what it likes."""
        for index, name in enumerate(self._names):
            if self._state[index] == "running" and told.get(name):
                self._found[name] = told[name]
                self._came[index] = max(len(one.token_ids) for one in told[name])
                self._times[index].setdefault("first", float(self._steps))
                if is_finished(told[name]):
                    self._state[index] = "ended"
                    self._times[index]["ended"] = float(self._steps)

    def _all_fail(self, kind: str, why: str) -> None:
        for index, state in enumerate(self._state):
            if state == "running":
                self._trouble[index] = Trouble(kind, why)

    def _reply(self, index: int) -> Reply:
        one, found = self._sent[index], self._found.get(self._names[index], [])
        left = self._state[index] == "left"
        answers: tuple[Answer, ...] = ()
        trouble = self._trouble.get(index)
        if trouble is None and found:
            ask = Ask(str(index), "fuzz", one.prompt, one.max_tokens)
            answers = tuple(replace(from_completions(ask, [each]), text=text_of(each)) for each in found)
            if len(answers) != one.samples:
                trouble = Trouble(IMPOSSIBLE, f"{len(answers)} samples, expected {one.samples}")
        times = self._times[index]
        return Reply(answers, trouble, times.get("sent"), times.get("first"), times.get("ended"), left)


def text_of(completion: Any) -> str | None:
    text = getattr(completion, "text", None)
    return text if isinstance(text, str) else None


def params_of(one: Sent) -> SamplingParams:
    return SamplingParams(
        temperature=one.temperature,
        seed=one.seed if one.temperature else None,
        n=one.samples,
        max_tokens=one.max_tokens,
        ignore_eos=True,
        stop=() if one.stop is None else (one.stop,),
        logprobs=0,
    )


def leak_of(engine: Any) -> Trouble | None:
    """Slots that are not free though nothing runs, if the engine tells."""
    if missing(engine, ["state"]):
        return None
    try:
        state = engine.state()
        free, there = state.get("free_slots"), state.get("num_slots")
        if free is not None and there is not None and free != there:
            return Trouble(LEAK, f"all requests have ended, but {there - free} of {there} slots are not free")
    except FAULTS as problem:
        return Trouble(FAILED, f"state(): {fault(problem)}")
    return None


class RoundsPlayer:
    """Any target of a check: what waits for another's end goes out in a later round, all else together."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def probe(self) -> Takes:
        return Takes(self._target.probe())

    def play(self, trace: Trace) -> Played:
        replies: dict[int, Reply] = {}
        for number, indices in enumerate(rounds_of(trace)):
            asks = [ask_of(index, trace.requests[index]) for index in indices]
            left = [str(index) for index in indices if trace.requests[index].abort_after is not None]
            for index, answer in zip(indices, self._target.answer(asks, left), strict=True):
                was_left = str(index) in left
                trouble = None if answer.error is None or was_left else Trouble(kind_of_error(answer), answer.error)
                told = (answer,) if answer.error is None and answer.token_ids else ()
                replies[index] = Reply(told, trouble, sent=float(number), ended=float(number + 1), left=was_left)
        return Played(tuple(replies[index] for index in range(len(trace.requests))))

    def close(self) -> None:
        self._target.close()


def ask_of(index: int, one: Sent) -> Ask:
    return Ask(str(index), "fuzz", one.prompt, one.max_tokens, factors={"cold": one.cold})


def kind_of_error(answer: Answer) -> str:
    return IMPOSSIBLE if answer.refuted else FAILED


def rounds_of(trace: Trace) -> list[list[int]]:
    """Indices by round: one that waits for tokens of another is in its round, one that waits for its end later."""
    number: list[int] = []
    for one in trace.requests:
        before = -1 if one.after is None else number[one.after]
        number.append(before + (one.after is None or one.after_tokens is None))
    return [[index for index, of in enumerate(number) if of == each] for each in range(max(number) + 1)]
