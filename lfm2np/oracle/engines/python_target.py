"""package.module:factory: an engine in this process, by the levels of lfm2np/oracle/engines/protocol.py.

    level a   generate(requests)
    level b   score(token_ids): the prompt's log-probabilities, where answers don't carry them
    level c   add(request), step(), abort(request_id), has_unfinished: used where present; see stepping.py

An engine that hangs can't be stopped from here, and one that ends its process ends the check: one that may do so runs
behind exec_server.py, in its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lfm2np.errors import Lfm2npError
from lfm2np.oracle.engines.protocol import Factory, lacking, load_factory, missing, offers, sizes_of, told
from lfm2np.oracle.engines.records import (
    IMPOSSIBLE,
    NO_ANSWER,
    PROCESSORS,
    Answer,
    Request,
    Trace,
    changed,
    failed,
    fault,
    greedy,
)
from lfm2np.oracle.engines.records_json import answer_as_json, checked_answer
from lfm2np.oracle.engines.stepping import FAULTS, StepRun
from lfm2np.oracle.engines.target import (
    LEAK,
    Abilities,
    Answers,
    Played,
    TargetError,
    Trouble,
    in_flight,
    play_in_rounds,
)

STEP = "step"  # the tag of requests that are to share a step of as many tokens
BUDGET = "max_num_batched_tokens"
OPTIONS = ("logprobs", "prompt_logprobs")  # parameters that an engine may not accept
REPORTED = (  # fields of an answer that an engine's object may have
    *("token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "text"),
    *("finish_reason", "stop_reason", "routes", "cached_tokens"),
)


class PythonTarget:
    """An engine that a factory makes: on first use, and again after a fault that may have spoilt it.

    factory  the factory, or its name, "package.module:factory"
    model    the checkpoint directory
    sizes    size hints for the factory, by the names of protocol.SIZES
    at_once  most requests in flight together; None: as target.in_flight has it for the max_num_seqs that it reports
    """

    def __init__(
        self,
        factory: str | Factory,
        model: str | Path,
        sizes: Mapping[str, Any] | None = None,
        at_once: int | None = None,
    ) -> None:
        self._factory, self._model, self._sizes = factory, str(model), sizes_of(sizes or {})
        self._name = factory if isinstance(factory, str) else getattr(factory, "__qualname__", type(factory).__name__)
        self._at_once = at_once
        self._engine: Any = None
        self._large: PythonTarget | None = None  # the same engine with larger steps, while it is in use
        self._abilities: Abilities | None = None
        self._has_steps = False
        self._accepted: tuple[str, ...] = OPTIONS
        self.took = 0.0  # seconds to make the engine, the last time
        self._serial = itertools.count()  # makes request ids unique

    def probe(self) -> Abilities:
        """Makes the engine and sends small requests, each with fewer options, until it answers. TargetError if it
        answers none."""
        if self._abilities is None:
            engine = self._live()
            self._has_steps = missing(engine, ["steps"]) is None
            if not self._has_steps and missing(engine, ["generate"]) is not None:
                raise TargetError(f"{self._name}: {type(engine).__name__}: expected generate(), or add() and step()")
            self._abilities = self._probed()
        return self._abilities

    def play(self, trace: Trace) -> Played:
        """At most `at_once` together. A trace of more tokens than the engine takes in a step goes to one that is made
        with larger steps, if it heeds that hint."""
        steps = max((int(request.tags.get(STEP, 0)) for request in trace.requests), default=0)
        if steps and self._large is not None:
            return self._large.play(trace)
        if steps and not self._sizes.get(BUDGET) and BUDGET not in lacking(self._live()):
            self.close()  # two may not fit into memory
            self._large = PythonTarget(self._factory, self._model, {**self._sizes, BUDGET: steps}, self._at_once)
            return self._large.play(trace)
        self._close_large()
        return self._played(trace, self.probe())

    def close(self) -> None:
        """The engine's own close(), if it has one."""
        self._close_large()
        engine, self._engine = self._engine, None
        if offers(engine, "close"):
            engine.close()

    def _close_large(self) -> None:
        large, self._large = self._large, None
        if large is not None:
            large.close()

    def _live(self) -> Any:
        """The engine. TargetError if the factory fails."""
        if self._engine is None:
            began = time.monotonic()
            try:
                make = load_factory(self._factory) if isinstance(self._factory, str) else self._factory
                self._engine = make(self._model, dict(self._sizes))
            except Lfm2npError as problem:
                raise TargetError(str(problem)) from None
            except FAULTS as problem:
                raise TargetError(f"{self._name}: {fault(problem)}") from problem
            self.took = time.monotonic() - began
        return self._engine

    def _probed(self) -> Abilities:
        request = greedy("probe", (0, 1), 2, prompt_logprobs=0)
        for self._accepted in (OPTIONS, OPTIONS[:1], ()):
            ((answer,),) = self._played(Trace((request,)), Abilities(self._name)).answers
            if answer.error is None or answer.is_refuted:  # refuted: it takes them, and is judged by what it says
                break
        else:
            raise TargetError(f"{self._name}: it can't answer the prompt (0, 1) with 2 tokens: {answer.error}")
        engine = self._live()
        sizes, lacks = told(engine), lacking(engine)
        return Abilities(
            engine=f"{self._name} ({type(engine).__name__})",
            tells_logprobs=answer.logprobs is not None or answer.is_refuted,
            tells_prompt_logprobs=answer.prompt_logprobs is not None or answer.is_refuted,
            at_once=in_flight(self._at_once, sizes.get("max_num_seqs")),
            can_abort=self._has_steps,
            takes_stops=not lacks & {"stops", "stop-strings"},
            takes_sampling="sampling" not in lacks,
            takes_seeds="sampling" not in lacks,
            takes_samples=not lacks & {"sampling", "samples"},
            processors=() if "processors" in lacks else PROCESSORS,
            takes_cold=self._has_steps and "salts" not in lacks,
            slots=sizes.get("max_num_seqs"),
            block=sizes.get("block_size"),
            chunk=sizes.get(BUDGET),
            longest=sizes.get("max_model_len"),
        )

    def _played(self, trace: Trace, abilities: Abilities) -> Played:
        """Errors of the engine become answers; those of its factory are raised."""
        engine = self._live()
        if not self._has_steps:
            return play_in_rounds(trace, abilities, self._generated)
        requests = [self._for_engine(request) for request in trace.requests]
        run = StepRun(engine, requests, abilities.at_once, answers_of)
        answers = tuple(run.answers())
        if run.is_spoilt:
            self._engine = None
            return Played(answers, clock="steps")
        scored = tuple(map(self._with_score, trace.requests, answers))
        return Played(scored, leak_of(engine), "steps")

    def _for_engine(self, request: Request) -> Request:
        """With an id of its own, and without what the engine does not accept."""
        name = f"{next(self._serial)}:{request.request_id}"
        refused: dict[str, Any] = {option: None for option in OPTIONS if option not in self._accepted}
        salt = name if request.cold and "salts" not in lacking(self._live()) else request.cache_salt
        return changed(request, request_id=name, cache_salt=salt, **refused)

    def _generated(self, requests: Sequence[Request]) -> list[Answers]:
        """By generate(). If that raises, each is sent alone, to learn which it can't take, then the rest again."""
        answers = self._generated_once(requests)
        if not isinstance(answers, str):
            return answers
        if len(requests) == 1:
            return [(failed(answers),)]
        alone = [self._generated_once([request]) for request in requests]
        rest = [request for request, result in zip(requests, alone, strict=True) if not isinstance(result, str)]
        again = self._generated_once(rest) if len(rest) < len(requests) else answers
        if isinstance(again, str):
            again = [(failed(f"put together with {len(rest) - 1} others: {again}"),)] * len(rest)
        of_the_rest = iter(again)
        return [(failed(result),) if isinstance(result, str) else next(of_the_rest) for result in alone]

    def _generated_once(self, requests: Sequence[Request]) -> list[Answers] | str:
        """Or what it raised; the engine is then made again, as requests may be left in it."""
        engine = self._live()
        try:
            lists = listed(engine.generate([self._for_engine(request) for request in requests]))
        except FAULTS as problem:
            self._engine = None
            return fault(problem)
        if len(lists) != len(requests):
            return [(failed(f"{len(lists)} answers to {len(requests)} requests"),)] * len(requests)
        return [
            self._with_score(request, answers_of(request, samples))
            for request, samples in zip(requests, lists, strict=True)
        ]

    def _with_score(self, request: Request, answers: Answers) -> Answers:
        """With the prompt's log-probabilities from score(), where the answer has none."""
        if not self._needs_score(request, answers):
            return answers
        try:
            scores = self._live().score(request.prompt_token_ids)
        except FAULTS as problem:
            return (failed(f"score(): {fault(problem)}"),)
        return (checked_answer(request, {**answer_as_json(answers[0]), "prompt_logprobs": scores}),)

    def _needs_score(self, request: Request, answers: Answers) -> bool:
        answer = answers[0] if len(answers) == 1 else None
        if answer is None or not request.is_scored or len(request.prompt_token_ids) == 1 or answer.is_aborted:
            return False
        is_missing = answer.error is None and answer.prompt_logprobs is None
        return is_missing and self._engine is not None and missing(self._engine, ["score"]) is None


def listed(given: Any) -> list[Any]:
    """What generate() returned, or its part for one request. TypeError that says what it is to return."""
    if not isinstance(given, Iterable):
        raise TypeError(f"{type(given).__name__}, expected for each request a list of its n Answers")
    return list(given)


def answers_of(request: Request, samples: Any) -> Answers:
    """What an engine gave for each of the request's samples, checked."""
    try:
        samples = listed(samples)
    except FAULTS as problem:
        return (failed(f"no answers: {fault(problem)}", NO_ANSWER),)
    if len(samples) != request.params.n:
        return (failed(f"{len(samples)} samples, expected {request.params.n}", IMPOSSIBLE),)
    return tuple(answer_of(request, sample) for sample in samples)


def answer_of(request: Request, sample: Any) -> Answer:
    """An engine's own object with some of an Answer's fields, NumPy's numbers too, as an Answer."""
    try:
        fields = {name: getattr(sample, name) for name in REPORTED if hasattr(sample, name)}
    except FAULTS as problem:
        return failed(f"no answer: {fault(problem)}", NO_ANSWER)
    if not fields:
        return failed(f"no answer: {type(sample).__name__}, expected an Answer, or what has its fields", NO_ANSWER)
    if fields.get("finish_reason") == "error":
        return failed("the engine ended it with finish_reason error")
    told = fields.get("prompt_logprobs")
    if fields.get("finish_reason") == "abort" or (isinstance(told, list | tuple) and not told):
        fields["prompt_logprobs"] = None  # of only a part of it; or none, by an engine that has none to tell
    return checked_answer(request, fields)


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
        return Trouble("5xx", f"state(): {fault(problem)}")
    return None
