"""Plays a trace on a Python engine, step by step (level c of engine_protocol.py), or in rounds on any target.

An engine that steps is deterministic: a request that is sent after k tokens of another is added before the step that
follows them. Pauses have no effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import Lfm2npError
from lfm2np.oracle.engines.protocol import Request, lacking, load_factory, missing, told
from lfm2np.oracle.engines.python_target import FAULTS, STEPS_PER_TOKEN, from_completions, is_finished
from lfm2np.oracle.engines.records import Ask, fault
from lfm2np.oracle.engines.target import Abilities, Target, TargetError
from lfm2np.suite.fuzz.played import FAILED, HANG, IMPOSSIBLE, LEAK, Played, Reply, Takes, Trouble
from lfm2np.suite.fuzz.trace import Sent, Trace, is_due


class StepsPlayer:
    """The engine of package.module:factory, which has add(), step(), abort() and has_unfinished.

    It is kept from trace to trace, as a server is, until a fault may have spoilt it. `took`: seconds to make it.
    """

    def __init__(self, name: str, model: Path, make: Callable[[], Any] | None = None) -> None:
        self._name = name
        self._make = make or (lambda: load_factory(name)(str(model), {}))
        self._engine: Any = None
        self._count = 0
        self.took = 0.0

    def steps(self) -> bool:
        """Whether it has these methods. TargetError if it can't be made."""
        return missing(self._live(), ["steps"]) is None

    def probe(self) -> Takes:
        engine = self._live()
        if why := missing(engine, ["steps"]):
            raise TargetError(f"{self._name}: {why}")
        lacks = lacking(engine)
        sampling, tells = "sampling" not in lacks, "logprobs" not in lacks
        abilities = Abilities(
            f"{self._name} ({type(engine).__name__})",
            tells_logprobs=tells,
            tells_prompt_logprobs=tells,
            can_abort=True,
            takes_seeds=sampling,
            slots=told(engine).get("max_num_seqs"),
        )
        stops = not lacks & {"stops", "stop-strings"}
        samples = sampling and "samples" not in lacks
        sizes = told(engine)
        return Takes(
            abilities,
            samples,
            sampling,
            stops,
            longest=sizes.get("max_model_len"),
            slots=abilities.slots,
            block=sizes.get("block_size"),
            chunk=sizes.get("max_num_batched_tokens"),
            cold="salts" not in lacks,
        )

    def play(self, trace: Trace) -> Played:
        engine = self._live()
        run = StepsRun(engine, trace, self._count)
        self._count += len(trace.requests)
        replies = run.replies()
        if any(reply.trouble for reply in replies):
            self._engine = None
            return Played(replies, clock="steps")
        return Played(replies, leak_of(engine), run.metrics(), "steps")

    def close(self) -> None:
        """The next trace has a new engine."""
        self._engine = None

    def _live(self) -> Any:
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
    def __init__(self, engine: Any, trace: Trace, first_id: int) -> None:
        count = len(trace.requests)
        self._engine, self._requests = engine, trace.requests
        self._ids = [f"fuzz-{first_id + index}" for index in range(count)]
        self._completions: dict[str, list[Any]] = {}
        self._num_tokens = [0] * count  # of each request, of its longest sample
        self._has_ended = [False] * count
        self._replies = [Reply()] * count
        self._steps = 0
        self._before = self.counters()
        self._takes_salts = "salts" not in lacking(engine)

    def replies(self) -> tuple[Reply, ...]:
        most = STEPS_PER_TOKEN * (sum(sent.num_tokens for sent in self._requests) + 20)
        while not any(reply.trouble for reply in self._replies):
            self._add_due()
            if self._abort_due():
                continue  # some may have waited for their end
            if not self._running():
                break
            self._steps += 1
            if self._steps > most:
                self._fail_running(HANG, f"not finished after {most} steps")
                break
            self._step()
        return tuple(map(self._with_answers, range(len(self._requests))))

    def metrics(self) -> dict[str, float]:
        return {name: value - self._before.get(name, 0.0) for name, value in self.counters().items()}

    def counters(self) -> dict[str, float]:
        if missing(self._engine, ["metrics"]):
            return {}
        try:
            metrics = self._engine.metrics()
            return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        except FAULTS:
            return {}  # they only steer

    def _running(self) -> list[int]:
        return [
            index for index, reply in enumerate(self._replies) if reply.sent is not None and not self._has_ended[index]
        ]

    def _note(self, index: int, **fields: Any) -> None:
        self._replies[index] = replace(self._replies[index], **fields)

    def _add_due(self) -> None:
        for index, sent in enumerate(self._requests):
            if self._replies[index].sent is None and is_due(sent, self._num_tokens, self._has_ended):
                self._note(index, sent=float(self._steps))
                request_id = self._ids[index]
                try:
                    salt = request_id if sent.cold and self._takes_salts else ""
                    self._engine.add(Request(request_id, sent.prompt, params_of(sent), cache_salt=salt))
                except FAULTS as problem:
                    self._end(index, trouble=Trouble(FAILED, fault(problem)))

    def _abort_due(self) -> bool:
        """Whether any was aborted."""
        after = [sent.abort_after for sent in self._requests]
        due = [i for i in self._running() if (most := after[i]) is not None and self._num_tokens[i] >= most]
        for index in due:
            request_id = self._ids[index]
            try:
                last = list(self._engine.abort(request_id) or ())
                self._completions[request_id] = last or self._completions.get(request_id, [])
            except FAULTS as problem:
                self._note(index, trouble=Trouble(FAILED, f"abort(): {fault(problem)}"))
            self._end(index, left=True)
        return bool(due)

    def _step(self) -> None:
        try:
            if self._engine.has_unfinished:
                self._take({name: list(completions) for name, completions in self._engine.step().items()})
            else:
                self._fail_running(IMPOSSIBLE, "the engine says that it is done, but this was never answered")
        except FAULTS as problem:
            self._fail_running(FAILED, f"step(): {fault(problem)}")

    def _take(self, outputs: Mapping[str, list[Any]]) -> None:
        """What a step reports; of requests that don't run it may report anything."""
        for index in self._running():
            completions = outputs.get(self._ids[index])
            if completions:
                self._completions[self._ids[index]] = completions
                self._num_tokens[index] = max(len(completion.token_ids) for completion in completions)
                if self._replies[index].first is None:
                    self._note(index, first=float(self._steps))
                if is_finished(completions):
                    self._end(index)

    def _end(self, index: int, **fields: Any) -> None:
        self._has_ended[index] = True
        self._note(index, ended=float(self._steps), **fields)

    def _fail_running(self, kind: str, why: str) -> None:
        for index in self._running():
            self._note(index, trouble=Trouble(kind, why))

    def _with_answers(self, index: int) -> Reply:
        sent, reply, completions = self._requests[index], self._replies[index], self._completions.get(self._ids[index])
        if reply.trouble is not None or not completions:
            return reply
        ask, trouble = ask_of(index, sent), None
        answers = tuple(replace(from_completions(ask, [each]), text=text_of(each)) for each in completions)
        if len(answers) != sent.samples:
            trouble = Trouble(IMPOSSIBLE, f"{len(answers)} samples, expected {sent.samples}")
        return replace(reply, answers=answers, trouble=trouble)


def text_of(completion: Any) -> str | None:
    text = getattr(completion, "text", None)
    return text if isinstance(text, str) else None


def params_of(sent: Sent) -> SamplingParams:
    return SamplingParams(
        temperature=sent.temperature,
        seed=sent.seed if sent.temperature else None,
        n=sent.samples,
        max_tokens=sent.max_tokens,
        ignore_eos=True,
        stop=() if sent.stop is None else (sent.stop,),
        logprobs=0,
        prompt_logprobs=0 if sent.scored else None,
    )


def leak_of(engine: Any) -> Trouble | None:
    """Slots that are not free though nothing runs, if the engine reports them."""
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
    """Any target of a check: a request that waits for the end of another is in a later round, all others together."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def probe(self) -> Takes:
        return Takes(self._target.probe())

    def play(self, trace: Trace) -> Played:
        replies: dict[int, Reply] = {}
        for number, indices in enumerate(rounds_of(trace)):
            asks = [ask_of(index, trace.requests[index]) for index in indices]
            aborted = [
                ask.id
                for index, ask in zip(indices, asks, strict=True)
                if trace.requests[index].abort_after is not None
            ]
            for index, answer in zip(indices, self._target.answer(asks, aborted), strict=True):
                left, trouble = answer.id in aborted, None
                if answer.error is not None and not left:
                    trouble = Trouble(IMPOSSIBLE if answer.refuted else FAILED, answer.error)
                answers = (answer,) if answer.error is None and answer.token_ids else ()
                replies[index] = Reply(answers, trouble, sent=float(number), ended=float(number + 1), left=left)
        return Played(tuple(replies[index] for index in range(len(trace.requests))), clock="rounds")

    def close(self) -> None:
        self._target.close()


def ask_of(index: int, sent: Sent) -> Ask:
    factors = {"cold": sent.cold}
    return Ask(str(index), "fuzz", sent.prompt, sent.max_tokens, prompt_logprobs=sent.scored, factors=factors)


def rounds_of(trace: Trace) -> list[list[int]]:
    """Indices by round: a request that waits for tokens of another is in its round; for its end, in a later one."""
    rounds: list[int] = []
    for sent in trace.requests:
        before = -1 if sent.after is None else rounds[sent.after]
        rounds.append(before + (sent.after is None or sent.after_tokens is None))
    return [[index for index, number in enumerate(rounds) if number == each] for each in range(max(rounds) + 1)]
