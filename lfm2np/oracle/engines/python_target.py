"""package.module:factory: an engine in this process, by the levels of lfm2np/oracle/engines/protocol.py.

    level a   generate(requests)
    level b   score(token_ids): the prompt's log-probabilities, where completions don't carry them
    level c   add(request), step(), abort(request_id), has_unfinished: used where present; asks can be cancelled midway

An engine that hangs can't be stopped from here: put one that may hang behind exec_target.py.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.protocol import Factory, Request, lacking, load_factory, missing, sizes_of, told
from lfm2np.oracle.engines.records import Answer, Ask, answer_as_json, checked_answer, failed, fault
from lfm2np.oracle.engines.target import Abilities, Arrived, TargetError, ignored, in_flight, in_turns, requests_of

ABORT_AFTER_STEPS = 3
STEP = "step"  # the factor of asks that are to share a step of as many tokens
BUDGET = "max_num_batched_tokens"
STEPS_PER_TOKEN = 4  # far more than any engine needs: it computes again what it preempted
FAULTS = (Exception, SystemExit)  # of an engine; a KeyboardInterrupt is the user's


class PythonTarget:
    """An engine that a factory makes: on first use, and again after a fault that may have spoilt it.

    factory  the factory, or its name, "package.module:factory"
    model    the checkpoint directory
    sizes    size hints for the factory, by the names of protocol.SIZES
    at_once  most asks in flight together; None: as target.in_flight has it for the max_num_seqs that it reports
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
        self._options: dict[str, int] = {}  # log-probabilities, as far as it accepts these parameters
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

    def answer(self, asks: Sequence[Ask], aborted: Collection[str] = (), arrived: Arrived = ignored) -> list[Answer]:
        """At most `at_once` together. A round of more tokens than the engine takes in a step goes to one that is made
        with larger steps, if it heeds that hint."""
        steps = max((int(ask.factors.get(STEP, 0)) for ask in asks), default=0)
        if steps and self._large is not None:
            return self._large.answer(asks, aborted, arrived)
        if steps and not self._sizes.get(BUDGET) and BUDGET not in lacking(self._live()):
            self.close()  # two may not fit into memory
            self._large = PythonTarget(self._factory, self._model, {**self._sizes, BUDGET: steps}, self._at_once)
            return self._large.answer(asks, aborted, arrived)
        self._close_large()
        return in_turns(self.probe(), asks, aborted, lambda some: self._together(some, aborted, arrived), arrived)

    def close(self) -> None:
        """The engine's own close(), if it has one."""
        self._close_large()
        engine, self._engine, self._abilities = self._engine, None, None
        close = getattr(engine, "close", None)
        if callable(close):
            close()

    def _close_large(self) -> None:
        large, self._large = self._large, None
        if large is not None:
            large.close()

    def _live(self) -> Any:
        """The engine. TargetError if the factory fails."""
        if self._engine is None:
            try:
                make = load_factory(self._factory) if isinstance(self._factory, str) else self._factory
                self._engine = make(self._model, dict(self._sizes))
            except RequestError as problem:
                raise TargetError(str(problem)) from None
            except FAULTS as problem:
                raise TargetError(f"{self._name}: {fault(problem)}") from problem
        return self._engine

    def _probed(self) -> Abilities:
        ask = Ask("probe", "probe", (0, 1), 2, prompt_logprobs=True)
        for self._options in ({"logprobs": 0, "prompt_logprobs": 0}, {"logprobs": 0}, {}):
            (answer,) = self._together([ask], ())
            if answer.error is None:
                break
        else:
            raise TargetError(f"{self._name}: it can't answer the prompt (0, 1) with 2 tokens: {answer.error}")
        engine = self._live()
        slots, lacks = told(engine).get("max_num_seqs"), lacking(engine)
        return Abilities(
            engine=f"{self._name} ({type(engine).__name__})",
            tells_logprobs=answer.logprobs is not None,
            tells_prompt_logprobs=answer.prompt_logprobs is not None,
            at_once=in_flight(self._at_once, slots),
            can_abort=self._has_steps,
            takes_stops=not lacks & {"stops", "stop-strings"},
            takes_seeds="sampling" not in lacks,
            takes_samples=not lacks & {"sampling", "samples"},
            slots=slots,
        )

    def _together(self, asks: Sequence[Ask], aborted: Collection[str], arrived: Arrived = ignored) -> list[Answer]:
        """Errors of the engine become Answers; those of its factory are raised."""
        engine = self._live()
        if self._has_steps:

            def finished(ask: Ask, answer: Answer) -> None:
                if not self._needs_score(ask, answer):  # score() waits until nothing runs
                    arrived(answer)

            run = Steps(engine, requests_of(asks), self._request, aborted, finished)
            answers = run.answers()
            if run.spoilt:
                self._engine = None
        else:
            answers = self._generated(asks)
        return [self._with_score(ask, answer) for ask, answer in zip(asks, answers, strict=True)]

    def _request(self, ask: Ask) -> Request:
        options = {name: k for name, k in self._options.items() if name != "prompt_logprobs" or ask.prompt_logprobs}
        params = SamplingParams(
            temperature=0.0 if ask.seed is None else 1.0 if ask.temperature is None else ask.temperature,
            seed=ask.seed,
            n=ask.samples,
            stop=() if ask.stop is None else (ask.stop,),
            ignore_eos=True,
            max_tokens=ask.max_tokens,
            **options,  # type: ignore[arg-type]
        )
        return Request(f"{next(self._serial)}:{ask.id}", ask.prompt_token_ids, params)

    def _generated(self, asks: Sequence[Ask]) -> list[Answer]:
        """By generate(). If that raises, each ask is sent alone, to learn which it can't take, then the rest again."""
        answers = self._generated_once(asks)
        if not isinstance(answers, str):
            return answers
        if len(asks) == 1:
            return [failed(asks[0], answers)]
        alone = [self._generated_once([ask]) for ask in asks]
        rest = [ask for ask, result in zip(asks, alone, strict=True) if not isinstance(result, str)]
        again = self._generated_once(rest) if len(rest) < len(asks) else answers
        if isinstance(again, str):
            again = [failed(ask, f"put together with {len(rest) - 1} others: {again}") for ask in rest]
        of_the_rest = iter(again)
        return [
            failed(ask, result) if isinstance(result, str) else next(of_the_rest)
            for ask, result in zip(asks, alone, strict=True)
        ]

    def _generated_once(self, asks: Sequence[Ask]) -> list[Answer] | str:
        """Or what it raised; the engine is then made again, as requests may be left in it."""
        engine = self._live()
        try:
            together = requests_of(asks)
            lists = list(engine.generate([self._request(ask) for ask, *_ in together]))
        except FAULTS as problem:
            self._engine = None
            return fault(problem)
        if len(lists) != len(together):
            return [failed(ask, f"{len(lists)} answers to {len(together)} requests") for ask in asks]
        return [answer for some, completions in zip(together, lists, strict=True) for answer in of(some, completions)]

    def _with_score(self, ask: Ask, answer: Answer) -> Answer:
        """With the prompt's log-probabilities from score(), where the completion has none."""
        if not self._needs_score(ask, answer):
            return answer
        try:
            scores = numbers(self._engine.score(ask.prompt_token_ids))
        except FAULTS as problem:
            return failed(ask, f"score(): {fault(problem)}")
        return checked_answer(ask, {**answer_as_json(answer), "prompt_logprobs": scores})

    def _needs_score(self, ask: Ask, answer: Answer) -> bool:
        is_missing = ask.prompt_logprobs and answer.error is None and answer.prompt_logprobs is None
        has_score = self._engine is not None and missing(self._engine, ["score"]) is None
        return is_missing and has_score and len(ask.prompt_token_ids) > 1


class Steps:
    """Adds asks to an engine of level c, all at once, and steps it to the end.

    asks      those of one request together
    finished  gets each ask with its answer when that has a finish_reason
    """

    def __init__(
        self,
        engine: Any,
        asks: Sequence[Sequence[Ask]],
        request_of: Callable[[Ask], Request],
        aborted: Collection[str],
        finished: Callable[[Ask, Answer], None],
    ) -> None:
        self.spoilt = False  # the engine may be left in a state that would harm other requests
        self._finished = finished
        self._engine = engine
        self._requests = [request_of(first) for first, *_ in asks]
        names = [request.request_id for request in self._requests]
        self._samples = dict(zip(names, asks, strict=True))
        self._asks = {name: first for name, (first, *_) in self._samples.items()}
        self._abort_after = {
            name: min(ABORT_AFTER_STEPS, ask.max_tokens // 2) for name, ask in self._asks.items() if ask.id in aborted
        }
        self._aborted: set[str] = set()
        self._last: dict[str, Any] = {}  # by request: its latest completions, or an Answer with an error

    def answers(self) -> list[Answer]:
        for request in self._requests:
            self._guarded(request.request_id, self._engine.add, request)
        work = sum(len(ask.prompt_token_ids) + ask.max_tokens for ask in self._asks.values())
        most = STEPS_PER_TOKEN * (work + 20)
        for step in range(most):
            self._abort_those_due(step)
            if self.spoilt or not self._step():
                break
        else:
            self._fail_the_unfinished(f"not finished after {most} steps")
        return [answer for name in self._asks for answer in self._answers(name)]

    def _step(self) -> bool:
        """One step; whether there may be more to do."""
        try:
            if not self._engine.has_unfinished:
                return False
            outputs = self._engine.step().items()
            newest = {name: list(completions) for name, completions in outputs if self._is_open(name)}
        except FAULTS as problem:
            self._fail_the_unfinished(f"step(): {fault(problem)}")
            return False
        self._last.update(newest)
        for name, completions in newest.items():
            if is_finished(completions):
                for ask, answer in zip(self._samples[name], self._answers(name), strict=True):
                    self._finished(ask, answer)
        return True

    def _abort_those_due(self, step: int) -> None:
        for name, after in self._abort_after.items():
            if step == after and self._is_open(name) and not is_finished(self._last.get(name, ())):
                self._guarded(name, self._abort, name)

    def _abort(self, name: str) -> None:
        """Takes what abort() returns for the request, or its latest completions if that is nothing."""
        self._aborted.add(name)
        self._last[name] = list(self._engine.abort(name) or ()) or self._last.get(name, [])

    def _guarded(self, name: str, call: Callable[..., Any], argument: Any) -> None:
        """An error of the call is the answer to that ask."""
        try:
            call(argument)
        except FAULTS as problem:
            self._last[name] = failed(self._asks[name], fault(problem))

    def _is_open(self, name: str) -> bool:
        """Whether it is a request of this run, and without an error so far."""
        return name in self._asks and not isinstance(self._last.get(name), Answer)

    def _fail_the_unfinished(self, why: str) -> None:
        self.spoilt = True
        for name, ask in self._asks.items():
            if self._is_open(name) and not is_finished(self._last.get(name, ())):
                self._last[name] = failed(ask, why)

    def _answers(self, name: str) -> list[Answer]:
        last, asks = self._last.get(name), self._samples[name]
        if isinstance(last, Answer):
            return [replace(last, id=ask.id) for ask in asks]
        if not last:
            if name in self._aborted:  # before its first token
                return [Answer(ask.id, (), finish_reason="abort") for ask in asks]
            why = "the engine says that it is done, but this was never answered"
            return [failed(ask, why) for ask in asks]
        answers = of(asks, last)
        cut = name in self._aborted
        return [
            replace(answer, finish_reason="abort")
            if cut and answer.error is None and answer.finish_reason is None
            else answer
            for answer in answers
        ]


def of(asks: Sequence[Ask], completions: Any) -> list[Answer]:
    """The samples of one request that these ask for."""
    (first, *_), samples = asks, completions
    if first.samples == 1:
        return [from_completions(first, completions)]
    samples = list(completions)
    if len(samples) != first.samples:
        return [failed(ask, f"{len(samples)} samples, expected {ask.samples}", refuted=True) for ask in asks]
    return [from_completions(ask, [samples[ask.sample]]) for ask in asks]


def from_completions(ask: Ask, completions: Any) -> Answer:
    """The one completion of a request as an Answer."""
    try:
        (completion,) = completions
        fields = {
            "token_ids": [operator.index(token) for token in completion.token_ids],
            "logprobs": numbers(getattr(completion, "logprobs", None)),
            "prompt_logprobs": numbers(getattr(completion, "prompt_logprobs", None)),
            "finish_reason": getattr(completion, "finish_reason", None),
            "text": text if isinstance(text := getattr(completion, "text", None), str) else None,
            "routes": whole_numbers(getattr(completion, "routes", None)),
        }
    except FAULTS as problem:
        return failed(ask, f"no completion: {fault(problem)}")
    if fields["finish_reason"] == "error":
        return failed(ask, "the engine ended it with finish_reason error")
    if fields["finish_reason"] == "abort":
        fields["prompt_logprobs"] = None  # of only a part of it
    return checked_answer(ask, fields)


def numbers(values: Any) -> list[float] | None:
    """As floats, NumPy's too."""
    return None if values is None else [float(value) for value in values]


def whole_numbers(routes: Any) -> list[list[list[int]]] | None:
    """As lists, NumPy's arrays too."""
    if routes is None:
        return None
    return [[[operator.index(expert) for expert in experts] for experts in layers] for layers in routes]


def is_finished(completions: Iterable[Any]) -> bool:
    reasons = [getattr(completion, "finish_reason", None) for completion in completions]
    return bool(reasons) and None not in reasons
