"""The checks: each tries one example on an engine, and raises a Violation where a property fails."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lfm2np.engine.sampling.choice import distribution
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.protocol import Factory, missing
from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.suite.properties.driver import (
    Outcome,
    cached_tokens,
    generate,
    generate_on,
    make,
    reference_logits,
    require_scores,
    require_truth,
    run,
)
from lfm2np.suite.properties.property import Violation
from lfm2np.suite.properties.rounding import format_of, require_rounded_scores
from lfm2np.suite.strategies.scenarios import Scenario
from lfm2np.suite.strategies.talks import trained, trained_model
from lfm2np.suite.strategies.tiny_models import TinyModel, loaded

DRAWS = 400  # of one token
FALSE_ALARM = 1e-9  # the most that the probability of a right engine's failure is, in each comparison of counts

# --- every answer against the reference


def equals_reference(factory: Factory, scenario: Scenario) -> None:
    require_truth(factory, scenario, generate(factory, scenario))


def every_schedule(factory: Factory, scenario: Scenario) -> None:
    require_truth(factory, scenario, run(make(factory, scenario.model, scenario.sizes), scenario))


def in_steps_where_it_can(factory: Factory, scenario: Scenario) -> None:
    """All at once by an engine that has no steps."""
    engine = make(factory, scenario.model, scenario.sizes)
    outcome = generate_on(engine, scenario.requests) if missing(engine, ("steps",)) else run(engine, scenario)
    require_truth(factory, scenario, outcome)


def after_prefix_hits(factory: Factory, scenario: Scenario) -> None:
    """The first request is served before the others come, which begin as it does; hits are counted, and under its own
    salt alone."""
    engine = make(factory, scenario.model, scenario.sizes)
    first, *others = scenario.requests
    outcome = generate_on(engine, [first])
    before = cached_tokens(engine)
    later = generate_on(engine, others).completions
    outcome.completions |= later
    require_truth(factory, scenario, outcome)
    hits = {name: answer.cached_tokens for name, (answer,) in later.items()}
    salts = Counter(request.cache_salt for request in scenario.requests)
    for other in others:
        if salts[other.cache_salt] == 1 and hits[other.request_id]:
            where, count = f"request {other.request_id}", hits[other.request_id]
            raise Violation(f"{where}: {count} tokens from the cache, of requests under another salt")
    after, counts = cached_tokens(engine), [count for count in hits.values() if count is not None]
    if after is not None and len(counts) == len(hits) and sum(counts) != after - (before or 0):
        raise Violation(f"cached_tokens: {counts} of the requests, {after - (before or 0)} in the engine's metrics()")


def with_drafts(factory: Factory, example: tuple[Scenario, list[bool], int]) -> None:
    """Prompt lookup, and drafts that are right or wrong at will; in a model that overflows the wrong ones do."""
    scenario, wrong, most = example
    vocab_size, overflows = scenario.model.vocab_size, getattr(scenario.model, "overflows", False)
    script = {}
    for name, answers in generate(factory, scenario).completions.items():
        for index, answer in enumerate(answers):
            ids = [
                token if not is_wrong else vocab_size - 1 if overflows else (token + 1) % vocab_size
                for token, is_wrong in zip(answer.ids, wrong * 9, strict=False)
            ]
            script[name if index == 0 else f"{name}#{index}"] = ids
    for drafter in (script, "ngram"):
        drafting = {"drafter": drafter, "num_speculative_tokens": most}
        engine = make(factory, scenario.model, {**scenario.sizes, **drafting})
        require_truth(factory, scenario, generate_on(engine, scenario.requests))
        if missing(engine, ("state",)) is None:
            require_all_free(engine)


def has_scores(factory: Factory, example: tuple[TinyModel, tuple[int, ...]]) -> None:
    model, ids = example
    scores = make(factory, model, {}).score(ids)
    if (number_format := format_of(factory)) is None:
        require_scores(model, reference_logits(model, ids[:-1]), ids, scores, "score")
    else:
        require_rounded_scores(number_format, model, ids, scores)


def has_one_bos(factory: Factory, text: str) -> None:
    """A prompt and a chat begin with the BOS token, once, and are the reference's tokens."""
    engine, model = make(factory, trained(), {}), trained_model()
    chat = [{"role": "user", "content": text}]
    for prompt, expected in ((text, model.prompt_ids(text)), (chat, model.tokenizer.encode_chat(chat))):
        ids, bos = list(engine.encode(prompt)), model.config.bos_token_id
        if ids[:1] != [bos] or ids.count(bos) != 1:
            raise Violation(f"{prompt!r}: {ids.count(bos)} BOS tokens in {ids}, expected one, at the beginning")
        if ids != list(expected):
            raise Violation(f"{prompt!r}: tokens {ids}, expected {list(expected)}")


# --- noise, whose ever it is


def draws_the_distribution(factory: Factory, scenario: Scenario) -> None:
    """One token of the first request, drawn under many seeds: each comes as often as its probability says."""
    request = scenario.requests[0]
    params = replace(request.params, n=1, max_tokens=1, min_tokens=min(1, request.params.min_tokens))
    many = [replace(request, request_id=str(seed), params=replace(params, seed=seed)) for seed in range(DRAWS)]
    outcome = generate(factory, scenario, many)
    counts = Counter(answer.ids[0] for (answer,) in outcome.completions.values())
    row = reference_logits(scenario.model, request.prompt_token_ids)[-1]
    eos = tuple(sorted(loaded(scenario.model).config.eos_token_ids))
    weights = distribution(row, params, request.prompt_token_ids, (), eos)
    for token, probability in enumerate((weights / weights.sum()).tolist()):
        if DRAWS * divergence(counts[token] / DRAWS, probability) > math.log(2 / FALSE_ALARM):
            raise Violation(f"token {token}: drawn {counts[token]} of {DRAWS} times, its probability is {probability}")


def divergence(share: float, probability: float) -> float:
    """Kullback and Leibler's, of one event. n draws have such a share or one further off with at most
    2 exp(-n * divergence), by Chernoff's bound."""
    total = 0.0
    for a, b in ((share, probability), (1 - share, 1 - probability)):
        if a > 0.0:
            total += a * math.log(a / b) if b > 0.0 else math.inf
    return total


def noise_differs(factory: Factory, scenario: Scenario) -> None:
    """Samples, seeds, names and positions draw noise of their own; and so does each seed of the engine."""
    first = generate(factory, scenario)
    texts = drawn_texts(first)
    if len(set(texts)) < len(texts):
        raise Violation(f"two samples at temperature 1e6 are equal: {texts}")
    if any(len(set(ids)) < 3 for ids in texts):
        raise Violation(f"one token, again and again, at temperature 1e6: {texts}")
    if "seed" in scenario.sizes:
        if (again := drawn_texts(generate(factory, scenario))) != texts:
            raise Violation(f"with one seed of the engine {texts}, and then {again}")
        other = generate(factory, scenario, seed=scenario.sizes["seed"] + 1).completions
        for request in scenario.requests:
            name, is_seeded = request.request_id, request.params.seed is not None
            before, after = ([answer.ids for answer in each[name]] for each in (first.completions, other))
            if is_seeded and before != after:
                raise Violation(f"request {name} with its own seed: {before}, with another seed of the engine {after}")
            if not is_seeded and set(texts) & set(after):
                raise Violation(f"with two seeds of the engine the same tokens at temperature 1e6: {texts}, {after}")


def drawn_texts(outcome: Outcome) -> list[tuple[int, ...]]:
    return [answer.ids for answers in outcome.completions.values() for answer in answers]


# --- memory


def conservation(factory: Factory, scenario: Scenario) -> None:
    def check(engine: Any, outcome: Outcome) -> None:
        state = engine.state()
        for kind in ("blocks", "slots"):
            if not 0 <= state.get(f"free_{kind}", 0) <= state.get(f"num_{kind}", 0):
                raise Violation(f"{state[f'free_{kind}']} of {state[f'num_{kind}']} {kind} are free")

    engine = make(factory, scenario.model, scenario.sizes)
    run(engine, scenario, check)
    require_all_free(engine)


def require_all_free(engine: Any) -> None:
    state = engine.state()
    for kind in ("blocks", "slots"):
        if state.get(f"free_{kind}") != state.get(f"num_{kind}"):
            free, total = state[f"free_{kind}"], state[f"num_{kind}"]
            raise Violation(f"nothing is left to do, but only {free} of {total} {kind} are free")


def memory_is_right(factory: Factory, scenario: Scenario) -> None:
    engine = make(factory, scenario.model, {**scenario.sizes, "check": True, "drafter": "ngram"})
    run(engine, scenario, lambda engine, outcome: engine.verify())


# --- what can't be met


def refusals(factory: Factory, example: tuple[Scenario, int]) -> None:
    """A prompt beyond the context, an id outside the vocabulary, no prompt, a name in use: refused; no one notices."""
    scenario, kind = example
    engine = make(factory, scenario.model, scenario.sizes)
    for request in scenario.requests:
        engine.add(request)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    why, bad = [
        ("a prompt beyond the context", Request("bad", (3,) * (scenario.model.positions + 1), params)),
        ("an id outside the vocabulary", Request("bad", (3, scenario.model.vocab_size), params)),
        ("an id below 0", Request("bad", (3, -1), params)),
        ("no prompt", Request("bad", (), params)),
        ("a request_id in use", replace(scenario.requests[0], params=params)),
    ][kind]
    try:
        engine.add(bad)
    except (RequestError, ValueError):
        pass
    except Exception as problem:
        message = f"{type(problem).__name__}: {problem}"
        raise Violation(f"{why} raised {message}, expected RequestError or ValueError: {bad!r}") from problem
    else:
        raise Violation(f"{why} was taken, expected a refusal: {bad!r}")
    require_truth(factory, scenario, run(engine, replace(scenario, ops=())))


def overflow_stays_home(factory: Factory, example: tuple[Scenario, int, bool]) -> None:
    """A request whose numbers overflow ends in an error; the others are the reference's."""
    scenario, place, late = example
    poison, to_the_end = scenario.model.vocab_size - 1, replace(scenario, ops=())
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    if late:  # it overflows on the token that it generates
        params = replace(params, logit_bias={poison: 1e6})
    later_layers = getattr(scenario.model, "layers", "")[1:]
    told_later = "A" in later_layers or "S" in later_layers  # attention meets what an earlier position became
    bad = Request("bad", (3, 4) if late else (3, 4, poison, *((5, 3, 5) if told_later else ())), params)
    engine = make(factory, scenario.model, scenario.sizes)
    for request in (*scenario.requests[:place], bad, *scenario.requests[place:]):
        engine.add(request)
    outcome = run(engine, to_the_end)
    require_error(outcome.completions.pop("bad"), "an overflowing request")
    require_truth(factory, scenario, outcome)
    engine.add(replace(bad, request_id="again"))
    require_error(run(engine, to_the_end).completions["again"], "an overflowing request, asked again,")


def require_error(answers: Sequence[Answer], what: str) -> None:
    if [answer.finish_reason for answer in answers] != ["error"]:
        raise Violation(f"{what} ended for {answers[0].finish_reason}, expected error")
