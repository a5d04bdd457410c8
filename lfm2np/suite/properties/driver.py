"""Runs a scenario on an engine, and says what the reference makes of each request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.engine.sampling.choice import choose, request_seed
from lfm2np.engine.sampling.logprobs import token_logprobs
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.protocol import Factory
from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.suite.draining import Violation as Violation
from lfm2np.suite.draining import drain as drain
from lfm2np.suite.properties.endings import require_ending, stop_ids
from lfm2np.suite.properties.rounding import format_of, require_explained
from lfm2np.suite.strategies.scenarios import Scenario
from lfm2np.suite.strategies.tiny_models import AnyModel, TinyModel, checkpoint, loaded

WIDE = 8  # requests; batches above that many are counted


@dataclass
class Totals:
    """What was compared since the process began, and which of the situations that break engines were met."""

    runs: int = 0
    steps: int = 0
    tokens: int = 0
    hits: int = 0  # runs in which the engine took tokens from its prefix cache, by its own metrics
    shared: int = 0  # requests that begin with full blocks which the same engine has computed for an earlier one
    wide: int = 0  # steps in which more than WIDE requests got a token
    crowds: int = 0  # runs with more than WIDE requests at once
    preemptions: int = 0
    forks: int = 0
    aborts: int = 0


TOTALS = Totals()


@dataclass
class Outcome:
    """Of one run. A fork is listed with its parent and how many tokens it took over."""

    completions: dict[str, list[Answer]] = field(default_factory=dict)
    forks: dict[str, tuple[Request, int, int]] = field(default_factory=dict)  # id -> parent, seed, tokens taken over
    aborted: set[str] = field(default_factory=set)
    steps: int = 0


def make(factory: Factory, model: AnyModel, sizes: Mapping[str, Any]) -> Any:
    return factory(str(checkpoint(model)), dict(sizes))


def generate(factory: Factory, scenario: Scenario, requests: Sequence[Request] | None = None, **sizes: Any) -> Outcome:
    """All requests at once, on a fresh engine."""
    chosen = scenario.requests if requests is None else requests
    return generate_on(make(factory, scenario.model, {**scenario.sizes, **sizes}), chosen)


def generate_on(engine: Any, requests: Sequence[Request]) -> Outcome:
    """All requests at once, on an engine that may have served others."""
    before = cached_tokens(engine)
    lists = engine.generate(list(requests))
    if len(lists) != len(requests):
        raise Violation(f"{len(lists)} answers for {len(requests)} requests")
    outcome = Outcome({request.request_id: list(answer) for request, answer in zip(requests, lists, strict=True)})
    TOTALS.crowds += len(requests) > WIDE
    TOTALS.hits += cached_tokens(engine) > before
    count(outcome)
    return outcome


def cached_tokens(engine: Any) -> int:
    """Those that it says it took from its prefix cache since it was made; 0 of an engine that does not say."""
    return int(engine.metrics().get("cached_tokens", 0)) if hasattr(engine, "metrics") else 0


def run(engine: Any, scenario: Scenario, after_step: Any = None) -> Outcome:
    """The scenario's operations, then steps to the end; Violation without progress.

    Operations on a request that has ended, or does not run, are left out.
    """
    outcome, alive = Outcome(), set[str]()
    most = step_bound(scenario)

    def step() -> None:
        outcome.steps += 1
        if outcome.steps > most:
            raise Violation(f"no progress: {sorted(alive)} not finished after {most} steps")
        changed = engine.step()
        TOTALS.wide += len(changed) > WIDE
        for name, answers in changed.items():
            require_grown(name, outcome.completions.get(name, ()), answers)
            outcome.completions[name] = answers
        ended = {name for name in alive if is_finished(outcome.completions.get(name, ()))}
        alive.difference_update(ended)
        if after_step:
            after_step(engine, outcome)

    for kind, *whom in scenario.ops:
        request = scenario.requests[whom[0]] if whom else None
        if kind == "step":
            step()
        elif request is not None and kind == "add":
            engine.add(request)
            alive.add(request.request_id)
        elif request is not None and request.request_id in alive:
            disturb(engine, kind, request, whom, outcome, alive)
    while engine.has_unfinished:
        step()
    if alive:
        raise Violation(f"{sorted(alive)}: the engine says that it is done, but these never ended")
    TOTALS.hits += cached_tokens(engine) > 0
    TOTALS.crowds += len(outcome.completions) > WIDE
    count(outcome)
    return outcome


def disturb(engine: Any, kind: str, request: Request, whom: Sequence[Any], outcome: Outcome, alive: set[str]) -> None:
    """One operation on a running request; what the engine has no method for, or refuses at this moment, is left out."""
    name = request.request_id
    if kind == "abort":
        answers = engine.abort(name)
        require_completions(f"abort({name!r})", answers)
        TOTALS.aborts += 1
        require_grown(name, outcome.completions.get(name, ()), answers)
        outcome.completions[name] = answers
        outcome.aborted.add(name)
        alive.discard(name)
    elif kind == "preempt" and hasattr(engine, "preempt"):
        with contextlib.suppress(RequestError):  # it does not run
            engine.preempt(name)
            TOTALS.preemptions += 1
    elif kind == "fork" and request.params.n == 1 and hasattr(engine, "fork"):
        taken = len(outcome.completions[name][0].ids) if name in outcome.completions else 0
        new_id = f"{name}'{len(outcome.forks)}"
        try:
            engine.fork(name, new_id, whom[1])
        except RequestError:
            return
        TOTALS.forks += 1
        outcome.forks[new_id] = (request, whom[1], taken)
        alive.add(new_id)


def require_completions(call: str, answers: Any) -> None:
    """Violation, which says what the protocol asks for, where a call gave something else."""
    if not isinstance(answers, Sequence) or not all(hasattr(answer, "token_ids") for answer in answers):
        raise Violation(f"{call} returned {answers!r}, expected the request's completions so far, a list of Completion")


def require_grown(name: str, before: Sequence[Answer], now: Sequence[Answer]) -> None:
    """Violation where a token or a piece of text that was shown is taken back, or an answer changes after its end."""
    for index, (old, new) in enumerate(zip(before, now, strict=False)):
        where = place_of(name, index)
        if new.ids[: len(old.ids)] != old.ids:
            raise Violation(f"{where}: tokens {old.ids} became {new.ids}: what was shown is taken back")
        if old.text is not None and new.text is not None and not new.text.startswith(old.text):
            raise Violation(f"{where}: text {old.text!r} became {new.text!r}: what was shown is taken back")
        if old.finish_reason is not None and new != old:
            raise Violation(f"{where}: had ended ({old.finish_reason}), and then changed")


def place_of(name: str, index: int) -> str:
    return f"request {name}, sample {index}" if index else f"request {name}"


def step_bound(scenario: Scenario) -> int:
    """More steps than any policy needs: each sample alone, token by token, computed again after each preemption."""
    work = sum((len(r.prompt_token_ids) + (r.params.max_tokens or 0)) * r.params.n for r in scenario.requests)
    disturbances = sum(op[0] not in ("add", "step") for op in scenario.ops)
    return len(scenario.ops) + (work + 20) * (4 + 2 * disturbances)


def is_finished(completions: Iterable[Answer]) -> bool:
    reasons = [completion.finish_reason for completion in completions]
    return bool(reasons) and None not in reasons


def count(outcome: Outcome) -> None:
    TOTALS.runs += 1
    TOTALS.steps += outcome.steps
    TOTALS.tokens += sum(len(completion.ids) for answer in outcome.completions.values() for completion in answer)


# --- the truth


def reference_logits(model: AnyModel, token_ids: tuple[int, ...]) -> NDArray[np.float32]:
    """reference.py over a whole sequence: row t is the same whatever follows, so one pass judges every token.

    In integers, unless the model is too large: LoadedModel.truth_of.
    """
    return of_drawn(model, token_ids) if isinstance(model, TinyModel) else of_given(model, token_ids)


def computed_logits(model: AnyModel, token_ids: tuple[int, ...]) -> NDArray[np.float32]:
    logits = loaded(model).truth_of(len(token_ids)).logits(token_ids)
    logits.flags.writeable = False
    return logits


of_drawn = lru_cache(maxsize=20_000)(computed_logits)  # kilobytes each
of_given = lru_cache(maxsize=16)(computed_logits)  # up to 20 MB for 100 tokens of a vocabulary of 65,536


@dataclass(frozen=True)
class Sample:
    """One answer of a run, and what it answers; `seeds` by output position."""

    where: str
    request: Request
    answer: Answer
    seeds: Sequence[int]
    index: int = 0
    aborted: bool = False


def samples(scenario: Scenario, outcome: Outcome) -> Iterator[Sample]:
    """All of a run, forks included. Violation where there are too few of a request."""
    for request in scenario.requests:
        name = request.request_id
        answers = outcome.completions.get(name, [])
        if name in outcome.aborted and not answers:
            continue
        if len(answers) != request.params.n:
            raise Violation(f"request {name}: {len(answers)} samples, expected {request.params.n}")
        seed = request_seed(request.params, 0, name)
        for index, answer in enumerate(answers):
            yield Sample(
                place_of(name, index), request, answer, [seed] * len(answer.ids), index, name in outcome.aborted
            )
    for name, (parent, seed, taken) in outcome.forks.items():
        (answer,) = outcome.completions.get(name, [Answer()])
        parents_seed = request_seed(parent.params, 0, parent.request_id)
        seeds = [parents_seed if position < taken else seed for position in range(len(answer.ids))]
        yield Sample(f"fork {name}", parent, answer, seeds)


def require_truth(factory: Factory, scenario: Scenario, outcome: Outcome) -> None:
    """Violation at the first sample, token or bit that differs from each request alone through reference.py."""
    number_format, every = format_of(factory), list(samples(scenario, outcome))
    for sample in every:
        require_ending(scenario.model, sample.where, sample.request, sample.answer, sample.aborted)
        if number_format is None:
            require_sample(scenario.model, sample)
    if number_format is not None:
        said = [(sample.where, sample.request.prompt_token_ids, sample.answer) for sample in every]
        require_explained(number_format, scenario.model, said)


def require_sample(model: AnyModel, sample: Sample) -> None:
    where, request, answer = sample.where, sample.request, sample.answer
    config, params = loaded(model).config, request.params
    prompt, ids, eos = request.prompt_token_ids, list(answer.ids), tuple(sorted(config.eos_token_ids))
    rows = reference_logits(model, (*prompt, *ids[:-1]))
    for position, token in enumerate(ids):
        place = f"{where}, output token {position}"
        row = rows[len(prompt) - 1 + position]
        if answer.logits is not None and answer.logits[position] != row.tobytes():
            shown = np.frombuffer(answer.logits[position], row.dtype)
            far = float(np.abs(shown - row).max()) if shown.shape == row.shape else float("nan")
            raise Violation(f"{place}: logits differ from the reference, by up to {far:.3g}")
        expected = choose(row, params, prompt, ids[:position], eos, sample.seeds[position], sample.index)
        if token != expected:
            raise Violation(f"{place}: {token}, the reference has {expected}")
    require_logprobs(model, request, answer, rows, where)


def require_logprobs(model: AnyModel, request: Request, answer: Answer, rows: NDArray[np.float32], where: str) -> None:
    """Those that the engine gave: of its own tokens, and of the prompt."""
    numerics, prompt = loaded(model).truth_of(len(rows)).numerics, request.prompt_token_ids

    def require(what: str, logprob: float, row: NDArray[np.float32], token: int) -> None:
        expected = token_logprobs(numerics, row, token, 0).logprob
        if logprob != expected:
            raise Violation(f"{where}, {what}: log-probability {logprob}, expected {expected}")

    if answer.logprobs is not None:
        if len(answer.logprobs) != len(answer.ids):
            raise Violation(f"{where}: {len(answer.logprobs)} log-probabilities for {len(answer.ids)} tokens")
        for position, (token, logprob) in enumerate(zip(answer.ids, answer.logprobs, strict=True)):
            require(f"output token {position}", logprob, rows[len(prompt) - 1 + position], token)
    if answer.prompt_logprobs is not None and answer.finish_reason in ("stop", "length"):
        if len(answer.prompt_logprobs) != len(prompt) - 1:
            raise Violation(f"{where}: {len(answer.prompt_logprobs)} prompt log-probabilities of {len(prompt) - 1}")
        for position, logprob in enumerate(answer.prompt_logprobs, start=1):
            require(f"prompt token {position}", logprob, rows[position - 1], prompt[position])


def require_equal(
    factory: Factory, scenario: Scenario, first: Outcome, second: Outcome, how: str, names: Iterable[str] | None = None
) -> None:
    """Violation at the first request whose answers differ between two runs of one engine, the first of which is plain.

    Of an engine that rounds: at the first answer of the second run that breaks off without a token that ends it, or
    that its number format does not explain.
    """
    number_format, said = format_of(factory), []
    requests = {request.request_id: request for request in scenario.requests}
    requests |= {name: parent for name, (parent, _, _) in first.forks.items()}
    for name in first.completions if names is None else names:
        before, after = first.completions[name], second.completions[name]
        stops = stop_ids(scenario.model, requests[name])
        for index, (a, b) in enumerate(zip(before, after, strict=True)):
            where = place_of(name, index)
            if number_format is None and a != b:
                raise Violation(f"{where}: {first_difference(a, b)} {how}")
            if len(b.ids) < len(a.ids) and not stops.intersection(b.ids[-1:]):
                raise Violation(f"{where}: {len(a.ids)} tokens, but {len(b.ids)} {how}")
            said.append((where, requests[name].prompt_token_ids, b))
    if number_format is not None:
        require_explained(number_format, scenario.model, said, how)


def first_difference(a: Answer, b: Answer) -> str:
    for position, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)):
        if a.logits is not None and b.logits is not None and a.logits[position] != b.logits[position]:
            return f"output token {position}: other logits"
        if x != y:
            return f"output token {position}: {x}, but {y}"
    if a.ids != b.ids:
        return f"{len(a.ids)} tokens, but {len(b.ids)}"
    if a.finish_reason != b.finish_reason:
        return f"it ends for {a.finish_reason}, but for {b.finish_reason}"
    if (a.text, a.stop_reason) != (b.text, b.stop_reason):
        return f"text {a.text!r} and stop reason {a.stop_reason!r}, but {b.text!r} and {b.stop_reason!r}"
    return "other log-probabilities"
