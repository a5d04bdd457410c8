"""package.module:factory: an engine in this process, by the levels of lfm2np/engine_protocol.py.

    level a   generate(requests)
    level b   score(token_ids): the prompt's log-probabilities, where completions don't carry them
    level c   add(request), step(), abort(request_id), has_unfinished: asks can be cancelled midway; used where offered

An engine that hangs can't be ended from here; put one that may behind exec_target.py.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lfm2np.engine_protocol import Request, lacking, load_factory, missing, sizes_of, told
from lfm2np.errors import RequestError
from lfm2np.oracle.targets.checked import NO_ABORT, checked_answer, failed, shortened
from lfm2np.oracle.targets.records import Answer, Ask, answer_as_json
from lfm2np.oracle.targets.target import Abilities, TargetError, in_flight
from lfm2np.sampling.params import SamplingParams

ABORT_AFTER_STEPS = 3
STEPS_PER_TOKEN = 4  # far more than any engine needs: it computes again what it preempted
FAULTS = (Exception, SystemExit)  # of an engine; a KeyboardInterrupt is the user's


class PythonTarget:
    """An engine made by a factory. It is made when first needed, and anew after a fault that may have spoilt it.

    name     "package.module:factory"
    model    the checkpoint directory
    sizes    wishes for the factory, by the names of protocol.SIZES
    at_once  most asks that it is given together; None: what target.in_flight makes of max_num_seqs of its `sizes`
    """

    def __init__(
        self, name: str, model: str | Path, sizes: Mapping[str, Any] | None = None, at_once: int | None = None
    ) -> None:
        self._name, self._model, self._sizes = name, str(model), sizes_of(sizes or {})
        self._wanted = at_once
        self._engine: Any = None
        self._abilities: Abilities | None = None
        self._has_steps = False
        self._wishes: dict[str, int] = {}  # log-probabilities, as far as it takes the wish
        self._serial = itertools.count()  # makes request ids unique

    def probe(self) -> Abilities:
        """Makes the engine and puts one small ask, with fewer and fewer wishes. TargetError if it answers none."""
        if self._abilities is None:
            engine = self._made()
            self._has_steps = missing(engine, ["steps"]) is None
            if not self._has_steps and missing(engine, ["generate"]) is not None:
                raise TargetError(f"{self._name}: {type(engine).__name__}: expected generate(), or add() and step()")
            self._abilities = self._tried()
        return self._abilities

    def answer(self, asks: Sequence[Ask], aborted: Collection[str] = ()) -> list[Answer]:
        """At most `at_once` together, more in turns."""
        abilities = self.probe()
        if not abilities.can_abort:
            kept = [ask for ask in asks if ask.id not in aborted]
            answers = iter(self._in_turns(kept, ()))
            return [failed(ask, NO_ABORT) if ask.id in aborted else next(answers) for ask in asks]
        return self._in_turns(asks, aborted)

    def close(self) -> None:
        """The engine's own close(), if it has one."""
        engine, self._engine, self._abilities = self._engine, None, None
        close = getattr(engine, "close", None)
        if callable(close):
            close()

    def _made(self) -> Any:
        """The engine. TargetError if the factory fails."""
        if self._engine is None:
            try:
                self._engine = load_factory(self._name)(self._model, dict(self._sizes))
            except RequestError as problem:
                raise TargetError(str(problem)) from None
            except FAULTS as problem:
                raise TargetError(f"{self._name}: {fault(problem)}") from problem
        return self._engine

    def _tried(self) -> Abilities:
        ask = Ask("probe", "probe", (0, 1), 2, prompt_logprobs=True)
        for wishes in ({"logprobs": 0, "prompt_logprobs": 0}, {"logprobs": 0}, {}):
            self._wishes = wishes
            (answer,) = self._together([ask], ())
            if answer.error is None:
                break
        else:
            raise TargetError(f"{self._name}: it can't answer the prompt (0, 1) with 2 tokens: {answer.error}")
        engine = self._made()
        slots, lacks = told(engine).get("max_num_seqs"), lacking(engine)
        return Abilities(
            engine=f"{self._name} ({type(engine).__name__})",
            tells_logprobs=answer.logprobs is not None,
            tells_prompt_logprobs=answer.prompt_logprobs is not None,
            at_once=in_flight(self._wanted, slots),
            can_abort=self._has_steps,
            takes_stops=not lacks & {"stops", "stop-strings"},
            takes_seeds="sampling" not in lacks,
            slots=slots,
        )

    def _in_turns(self, asks: Sequence[Ask], aborted: Collection[str]) -> list[Answer]:
        answers, at_once = [], self.probe().at_once
        for start in range(0, len(asks), at_once):
            answers += self._together(asks[start : start + at_once], aborted)
        return answers

    def _together(self, asks: Sequence[Ask], aborted: Collection[str]) -> list[Answer]:
        """Never raises for what the engine does, but for what its factory does."""
        engine = self._made()
        if self._has_steps:
            run = Steps(engine, asks, [self._request(ask) for ask in asks], aborted)
            answers = run.answers()
            if run.spoilt:
                self._engine = None
        else:
            answers = self._generated(asks)
        return [self._with_score(ask, answer) for ask, answer in zip(asks, answers, strict=True)]

    def _request(self, ask: Ask) -> Request:
        wishes = {name: k for name, k in self._wishes.items() if name != "prompt_logprobs" or ask.prompt_logprobs}
        params = SamplingParams(
            temperature=0.0 if ask.seed is None else 1.0,
            seed=ask.seed,
            stop=() if ask.stop is None else (ask.stop,),
            ignore_eos=True,
            max_tokens=ask.max_tokens,
            **wishes,  # type: ignore[arg-type]
        )
        return Request(f"{next(self._serial)}:{ask.id}", ask.prompt_token_ids, params)

    def _generated(self, asks: Sequence[Ask]) -> list[Answer]:
        """By generate(). If it raises, each ask is put alone, to learn which it can't take, and then the rest again."""
        answers = self._generated_once(asks)
        if not isinstance(answers, str):
            return answers
        if len(asks) == 1:
            return [failed(asks[0], answers)]
        alone = [self._generated_once([ask]) for ask in asks]
        rest = [ask for ask, one in zip(asks, alone, strict=True) if not isinstance(one, str)]
        again = self._generated_once(rest) if len(rest) < len(asks) else answers
        if isinstance(again, str):
            again = [failed(ask, f"put together with {len(rest) - 1} others: {again}") for ask in rest]
        of_the_rest = iter(again)
        return [
            failed(ask, one) if isinstance(one, str) else next(of_the_rest)
            for ask, one in zip(asks, alone, strict=True)
        ]

    def _generated_once(self, asks: Sequence[Ask]) -> list[Answer] | str:
        """What it raised, if it did; the engine is then made anew, as requests may be left in it."""
        engine = self._made()
        try:
            lists = list(engine.generate([self._request(ask) for ask in asks]))
        except FAULTS as problem:
            self._engine = None
            return fault(problem)
        if len(lists) != len(asks):
            return [failed(ask, f"{len(lists)} answers to {len(asks)} requests") for ask in asks]
        return [from_completions(ask, completions) for ask, completions in zip(asks, lists, strict=True)]

    def _with_score(self, ask: Ask, answer: Answer) -> Answer:
        """The prompt's log-probabilities from score(), where the completion has none."""
        wanted = ask.prompt_logprobs and answer.error is None and answer.prompt_logprobs is None
        if not wanted or self._engine is None or missing(self._engine, ["score"]) or len(ask.prompt_token_ids) < 2:
            return answer
        try:
            scores = numbers(self._engine.score(ask.prompt_token_ids))
        except FAULTS as problem:
            return failed(ask, f"score(): {fault(problem)}")
        return checked_answer(ask, {**answer_as_json(answer), "prompt_logprobs": scores})


class Steps:
    """One run of an engine of level c: asks go in together, then steps to the end."""

    def __init__(self, engine: Any, asks: Sequence[Ask], requests: Sequence[Request], aborted: Collection[str]) -> None:
        self.spoilt = False  # the engine may be left in a state that is no request's fault
        self._engine = engine
        self._asks = {request.request_id: ask for request, ask in zip(requests, asks, strict=True)}
        self._requests = requests
        self._abort_after = {
            name: min(ABORT_AFTER_STEPS, ask.max_tokens // 2) for name, ask in self._asks.items() if ask.id in aborted
        }
        self._aborted: set[str] = set()
        self._found: dict[str, Any] = {}  # what came last of each: completions, or an Answer with an error

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
        return [self._answer(name, ask) for name, ask in self._asks.items()]

    def _step(self) -> bool:
        """One step; whether there may be more to do."""
        try:
            if not self._engine.has_unfinished:
                return False
            self._found.update({name: list(one) for name, one in self._engine.step().items() if self._is_open(name)})
        except FAULTS as problem:
            self._fail_the_unfinished(f"step(): {fault(problem)}")
        return not self.spoilt

    def _abort_those_due(self, step: int) -> None:
        for name, after in self._abort_after.items():
            if step == after and self._is_open(name) and not is_finished(self._found.get(name, ())):
                self._guarded(name, self._abort, name)

    def _abort(self, name: str) -> None:
        """What it says of the request now stands for it; what it said before, if it says nothing."""
        self._aborted.add(name)
        left = list(self._engine.abort(name) or ())
        self._found[name] = left or self._found.get(name, [])

    def _guarded(self, name: str, call: Callable[..., Any], argument: Any) -> None:
        """What the call raises is the answer to that ask."""
        try:
            call(argument)
        except FAULTS as problem:
            self._found[name] = failed(self._asks[name], fault(problem))

    def _is_open(self, name: str) -> bool:
        """Whether it is one of ours, without an error yet."""
        return name in self._asks and not isinstance(self._found.get(name), Answer)

    def _fail_the_unfinished(self, why: str) -> None:
        self.spoilt = True
        for name, ask in self._asks.items():
            if self._is_open(name) and not is_finished(self._found.get(name, ())):
                self._found[name] = failed(ask, why)

    def _answer(self, name: str, ask: Ask) -> Answer:
        found = self._found.get(name)
        if isinstance(found, Answer):
            return found
        if not found:
            if name in self._aborted:  # before its first token
                return Answer(ask.id, (), finish_reason="abort")
            return failed(ask, "the engine says that it is done, but this was never answered")
        answer = from_completions(ask, found)
        was_cut = name in self._aborted and answer.error is None and answer.finish_reason is None
        return replace(answer, finish_reason="abort") if was_cut else answer


def from_completions(ask: Ask, completions: Any) -> Answer:
    """The one completion of a request as an Answer."""
    try:
        (one,) = completions
        fields = {
            "token_ids": [operator.index(token) for token in one.token_ids],
            "logprobs": numbers(getattr(one, "logprobs", None)),
            "prompt_logprobs": numbers(getattr(one, "prompt_logprobs", None)),
            "finish_reason": getattr(one, "finish_reason", None),
            "text": text if isinstance(text := getattr(one, "text", None), str) else None,
            "routes": whole_numbers(getattr(one, "routes", None)),
        }
    except FAULTS as problem:
        return failed(ask, f"no completion: {fault(problem)}")
    if fields["finish_reason"] == "error":
        return failed(ask, "the engine ended it with finish_reason error")
    if fields["finish_reason"] == "abort":
        fields["prompt_logprobs"] = None  # of as much of it as was computed
    return checked_answer(ask, fields)


def numbers(values: Any) -> list[float] | None:
    """Plain numbers, of NumPy's too."""
    return None if values is None else [float(value) for value in values]


def whole_numbers(routes: Any) -> list[list[list[int]]] | None:
    """Lists, of NumPy's arrays too."""
    if routes is None:
        return None
    return [[[operator.index(one) for one in experts] for experts in layers] for layers in routes]


def is_finished(completions: Iterable[Any]) -> bool:
    reasons = [getattr(one, "finish_reason", None) for one in completions]
    return bool(reasons) and None not in reasons


def fault(problem: BaseException) -> str:
    return shortened(f"{type(problem).__name__}: {problem}")
