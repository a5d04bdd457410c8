"""Runs a scenario on an engine, and says what the reference makes of each request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.engine.sampling.choice import choose, request_seed
from lfm2np.engine.sampling.logprobs import token_logprobs
from lfm2np.errors import NumericsError, RequestError
from lfm2np.oracle.engines.protocol import Factory, offers
from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.oracle.engines.stepping import is_finished
from lfm2np.suite.properties.endings import require_ending
from lfm2np.suite.properties.property import Violation
from lfm2np.suite.properties.rounding import format_of, require_explained, require_rounded_scores
from lfm2np.suite.strategies.scenarios import Scenario
from lfm2np.suite.strategies.tiny_models import AnyModel, TinyModel, checkpoint, loaded

WIDE = 8  # requests; batches above that many are counted


@dataclass
class Totals:
    """What was compared since the process began, and which of the situations that break engines were met."""

    runs: int = 0
    steps: int = 0
    tokens: int = 0
    hits: int = 0  # runs in which the engine took tokens from its prefix cache, as its metrics or answers report
    wide: int = 0  # steps in which more than WIDE requests got a token
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
    before = cached_tokens(engine) or 0
    lists = engine.generate(list(requests))
    if len(lists) != len(requests):
        raise Violation(f"{len(lists)} answers for {len(requests)} requests")
    outcome = Outcome({request.request_id: list(answer) for request, answer in zip(requests, lists, strict=True)})
    count(outcome, (cached_tokens(engine) or 0) > before)
    return outcome


def cached_tokens(engine: Any) -> int | None:
    """Those that it says it took from its prefix cache since it was made; None of an engine that does not say."""
    counters = engine.metrics() if offers(engine, "metrics") else {}
    return int(counters["cached_tokens"]) if "cached_tokens" in counters else None


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
    count(outcome, bool(cached_tokens(engine)))
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
    elif kind == "preempt" and offers(engine, "preempt"):
        with contextlib.suppress(RequestError):  # it does not run
            engine.preempt(name)
            TOTALS.preemptions += 1
    elif kind == "fork" and request.params.n == 1 and offers(engine, "fork"):
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
        raise Violation(f"{call} returned {answers!r}, expected the request's answers so far, a list of Answer")


def require_grown(name: str, before: Sequence[Answer], now: Sequence[Answer]) -> None:
    """Violation where a token or a piece of text that was shown is taken back, or an answer changes after its end."""
    for index, (old, new) in enumerate(zip(before, now, strict=False)):
        where = place_of(name, index)
        if new.ids[: len(old.ids)] != old.ids:
            raise Violation(f"{where}: tokens {old.ids} became {new.ids}: what was shown is taken back")
        if old.text is not None and new.text is not None and not new.text.startswith(old.text):
            raise Violation(f"{where}: text {old.text!r} became {new.text!r}: what was shown is taken back")
        counted = replace(old, cached_tokens=new.cached_tokens)  # of all samples: an engine may count at their end
        if old.finish_reason is not None and new != counted:
            raise Violation(f"{where}: had ended ({old.finish_reason}), and then changed")


def place_of(name: str, index: int) -> str:
    return f"request {name}, sample {index}" if index else f"request {name}"


def step_bound(scenario: Scenario) -> int:
    """More steps than any policy needs: each sample alone, token by token, computed again after each preemption."""
    work = sum((len(r.prompt_token_ids) + (r.params.max_tokens or 0)) * r.params.n for r in scenario.requests)
    disturbances = sum(op[0] not in ("add", "step") for op in scenario.ops)
    return len(scenario.ops) + (work + 20) * (4 + 2 * disturbances)


def count(outcome: Outcome, has_hits: bool) -> None:
    """`has_hits`: by the engine's metrics."""
    answers = [answer for answers in outcome.completions.values() for answer in answers]
    TOTALS.runs += 1
    TOTALS.steps += outcome.steps
    TOTALS.tokens += sum(len(answer.ids) for answer in answers)
    TOTALS.hits += has_hits or any(answer.cached_tokens for answer in answers)


# --- the truth


def reference_logits(model: AnyModel, token_ids: tuple[int, ...]) -> NDArray[np.float32]:
    """reference.py over a whole sequence: row t is the same whatever follows, so one pass judges every token.

    In integers, unless the model is too large: LoadedModel.truth_of.
    """
    return of_drawn(model, token_ids) if isinstance(model, TinyModel) else of_trained(model, token_ids)


def computed_logits(model: AnyModel, token_ids: tuple[int, ...]) -> NDArray[np.float32]:
    logits = loaded(model).truth_of(len(token_ids)).logits(token_ids)
    logits.flags.writeable = False
    return logits


of_drawn = lru_cache(maxsize=20_000)(computed_logits)  # kilobytes each
of_trained = lru_cache(maxsize=256)(computed_logits)


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
    """Violation at the first sample, token or bit that differs from each request alone through reference.py.

    Of tokens that any noise may have drawn, only where they end, and what their log-probabilities are.
    """
    number_format, every = format_of(factory), list(samples(scenario, outcome))
    for sample in every:
        if not ends_by_overflow(scenario.model, sample):
            require_ending(scenario.model, sample.where, sample.request, sample.answer, sample.aborted)
        if scenario.any_noise:
            require_raw_logprobs(factory, scenario.model, sample)
        elif number_format is None:
            require_sample(scenario.model, sample)
    if number_format is not None and not scenario.any_noise:
        said = [(sample.where, sample.request.prompt_token_ids, sample.answer) for sample in every]
        require_explained(number_format, scenario.model, said)


def ends_by_overflow(model: AnyModel, sample: Sample) -> bool:
    """Whether it ends in an error, as it must: the numbers of exact arithmetic overflow on its tokens."""
    if sample.answer.finish_reason != "error":
        return False
    try:
        loaded(model).logits((*sample.request.prompt_token_ids, *sample.answer.ids))
    except NumericsError:
        return True
    return False


def require_raw_logprobs(factory: Factory, model: AnyModel, sample: Sample) -> None:
    """Those asked for are given, and are those before temperature, penalties, biases and filters."""
    where, request, answer, number_format = sample.where, sample.request, sample.answer, format_of(factory)
    params, is_first = request.params, sample.index == 0  # which has those of the prompt
    is_silent = answer.prompt_logprobs is None and params.prompt_logprobs is not None and is_first
    if is_silent or (answer.logprobs is None and params.logprobs is not None):
        raise Violation(f"{where}: no log-probabilities, which it was asked for")
    ids = (*request.prompt_token_ids, *answer.ids)
    if number_format is None:
        require_logprobs(model, request, answer, reference_logits(model, ids[:-1]), where)
    elif answer.logprobs is not None and answer.prompt_logprobs is not None:
        require_rounded_scores(number_format, model, ids, (*answer.prompt_logprobs, *answer.logprobs))


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
    prompt = request.prompt_token_ids
    if answer.logprobs is not None:
        require_scores(model, rows, (*prompt, *answer.ids), answer.logprobs, where, len(prompt))
    if answer.prompt_logprobs is not None and answer.finish_reason in ("stop", "length"):
        require_scores(model, rows, prompt, answer.prompt_logprobs, where)


def require_scores(
    model: AnyModel, rows: NDArray[Any], ids: tuple[int, ...], scores: Sequence[float], where: str, first: int = 1
) -> None:
    """Violation unless these are the log-probabilities of all tokens from position `first` on, by logits [T, V]."""
    if len(scores) != len(ids) - first:
        raise Violation(f"{where}: {len(scores)} log-probabilities, expected {len(ids) - first}")
    numerics = loaded(model).truth_of(len(rows)).numerics
    for position, score in enumerate(scores, start=first):
        expected = token_logprobs(numerics, rows[position - 1], ids[position], 0).logprob
        if score != expected:
            raise Violation(f"{where}, token {position + 1}: log-probability {score}, expected {expected}")
