"""The checks of whole runs: each tries one example on an engine, and raises a Violation where a property fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.protocol import Factory, missing, told
from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.suite.properties.accounting import require_ledger
from lfm2np.suite.properties.driver import (
    TOTALS,
    Outcome,
    Violation,
    drain,
    generate,
    generate_on,
    make,
    require_equal,
    require_truth,
    run,
)
from lfm2np.suite.strategies.lengths import Lengths
from lfm2np.suite.strategies.scenarios import Scenario
from lfm2np.suite.strategies.tiny_models import AnyModel
from scheduler import TraceError, replay

# --- one engine against the reference


def equals_reference(factory: Factory, scenario: Scenario) -> None:
    require_truth(factory, scenario, generate(factory, scenario))


def run_steps(factory: Factory, scenario: Scenario) -> Outcome:
    return run(make(factory, scenario.model, scenario.sizes), scenario)


def every_schedule(factory: Factory, scenario: Scenario) -> None:
    require_truth(factory, scenario, run_steps(factory, scenario))


def after_prefix_hits(factory: Factory, scenario: Scenario) -> None:
    """The first request is served before the others come, which begin as it does."""
    engine = make(factory, scenario.model, scenario.sizes)
    first, *others = scenario.requests
    outcome = generate_on(engine, [first])
    outcome.completions |= generate_on(engine, others).completions
    size = scenario.sizes.get("block_size", told(engine).get("block_size", Lengths.block_size))
    block = first.prompt_token_ids[:size]
    TOTALS.shared += sum(len(block) == size and other.prompt_token_ids[:size] == block for other in others)
    require_truth(factory, scenario, outcome)


def in_wide_batches(factory: Factory, scenario: Scenario) -> None:
    """Step by step where the engine can, so that the batches can be counted."""
    engine = make(factory, scenario.model, scenario.sizes)
    outcome = generate_on(engine, scenario.requests) if missing(engine, ("steps",)) else run(engine, scenario)
    require_truth(factory, scenario, outcome)


# --- one engine against itself


def batched_is_sequential(factory: Factory, scenario: Scenario) -> None:
    together = generate(factory, scenario)
    for request in scenario.requests:
        alone = generate(factory, scenario, [request])
        require_equal(factory, scenario, alone, together, "in the batch", [request.request_id])


def chunked_is_whole(factory: Factory, scenario: Scenario) -> None:
    small = generate(factory, scenario)
    large = generate(factory, scenario, max_num_batched_tokens=1000)
    require_equal(factory, scenario, large, small, f"with {scenario.sizes['max_num_batched_tokens']} tokens a step")


def other_order(factory: Factory, example: tuple[Scenario, list[int], tuple[Any, ...]]) -> None:
    scenario, order, ops = example
    first = run_steps(factory, scenario)
    shuffled = replace(scenario, requests=tuple(scenario.requests[i] for i in order), ops=ops)
    second = run_steps(factory, shuffled)
    require_equal(factory, scenario, first, second, "in another order of arrival")


def neighbours(factory: Factory, example: tuple[Scenario, tuple[Request, ...]]) -> None:
    scenario, others = example
    subject = scenario.requests[0]
    before, *after = renamed(others, "2")
    first = generate(factory, scenario)
    second = generate(factory, scenario, [before, subject, *after])
    require_equal(factory, scenario, first, second, "beside other requests", [subject.request_id])


def renamed(requests: Sequence[Request], suffix: str) -> list[Request]:
    return [replace(request, request_id=f"{request.request_id}{suffix}") for request in requests]


def other_sizes(factory: Factory, example: tuple[Scenario, dict[str, Any]]) -> None:
    scenario, wishes = example
    first, second = generate(factory, scenario), generate(factory, scenario, **wishes)
    require_equal(factory, scenario, first, second, f"with sizes {wishes}")


def preempted(factory: Factory, scenario: Scenario) -> None:
    undisturbed, disturbed = run_steps(factory, without(scenario, "preempt")), run_steps(factory, scenario)
    require_equal(factory, scenario, undisturbed, disturbed, "when it is preempted")


def without(scenario: Scenario, kind: str) -> Scenario:
    return replace(scenario, ops=tuple(op for op in scenario.ops if op[0] != kind))


def cold_is_warm(factory: Factory, scenario: Scenario) -> None:
    """The cache switched off; then one engine that serves the same requests three times."""
    requests = seeded(scenario.requests)
    off = generate(factory, scenario, requests, prefix_caching=False)
    engine = make(factory, scenario.model, {**scenario.sizes, "prefix_caching": True})
    for temperature in ("cold", "warm", "hot"):
        answers = generate_on(engine, renamed(requests, f"-{temperature}")).completions.values()
        outcome = Outcome({request.request_id: answer for request, answer in zip(requests, answers, strict=True)})
        require_equal(factory, scenario, off, outcome, f"with a {temperature} prefix cache")


def seeded(requests: Sequence[Request]) -> list[Request]:
    """Each with a seed of its own, so that its name does not matter."""
    return [replace(request, params=replace(request.params, seed=request.params.seed or 0)) for request in requests]


def aborts(factory: Factory, scenario: Scenario) -> None:
    undisturbed, disturbed = run_steps(factory, without(scenario, "abort")), run_steps(factory, scenario)
    rest = [request.request_id for request in scenario.requests if request.request_id not in disturbed.aborted]
    require_equal(factory, scenario, undisturbed, disturbed, "when others are aborted", rest)
    whole, cut = Outcome(), Outcome()
    for name in disturbed.aborted:
        pairs = list(zip(undisturbed.completions[name], disturbed.completions.get(name, []), strict=False))
        cut.completions[name] = [after for _, after in pairs]
        whole.completions[name] = [replace(after, token_ids=before.ids[: len(after.ids)]) for before, after in pairs]
    require_equal(factory, scenario, whole, cut, "before it was aborted")


def speculative(factory: Factory, example: tuple[Scenario, list[bool], int]) -> None:
    """Prompt lookup, and drafts that are right or wrong at will, against none."""
    scenario, wrong, most = example
    plain = generate(factory, scenario)
    script = {}
    for name, answers in plain.completions.items():
        for index, answer in enumerate(answers):
            ids = [(t + w) % scenario.model.vocab_size for t, w in zip(answer.ids, wrong * 9, strict=False)]
            script[name if index == 0 else f"{name}#{index}"] = ids
    for drafter in (script, "ngram"):
        other = generate(factory, scenario, drafter=drafter, num_speculative_tokens=most)
        require_equal(factory, scenario, plain, other, "with drafts" if drafter is script else "with prompt lookup")


def own_seed(factory: Factory, scenario: Scenario) -> None:
    """Other names, another seed of the engine, the request twice in one batch: with a seed of its own, nothing."""
    requests = seeded(scenario.requests)
    first = generate(factory, scenario, requests, seed=1)
    second = generate(factory, scenario, [*renamed(requests, "2"), *requests], seed=2)
    require_equal(factory, scenario, first, second, "with another seed of the engine")
    copies = Outcome({r.request_id: second.completions[f"{r.request_id}2"] for r in requests})
    require_equal(factory, scenario, first, copies, "under another name")


def seeds_differ(factory: Factory, model: AnyModel) -> None:
    """The control of the property before: samples, seeds, names and positions draw noise of their own."""
    params = SamplingParams(temperature=1e6, n=2, max_tokens=12, ignore_eos=True)
    seeds = {"a": 1, "b": 2, "c": None, "d": None}
    requests = tuple(Request(name, (3, 4), replace(params, seed=seed)) for name, seed in seeds.items())
    outcome = generate(factory, Scenario(model, requests))
    texts = [answer.ids for answers in outcome.completions.values() for answer in answers]
    if len(set(texts)) < len(texts):
        raise Violation(f"two samples at temperature 1e6 are equal: {texts}")
    if any(len(set(ids)) < 3 for ids in texts):
        raise Violation(f"one token, again and again, at temperature 1e6: {texts}")


def engine_seed_counts(factory: Factory, model: AnyModel) -> None:
    """Requests without a seed draw other noise under another seed of the engine, and the same under the same."""
    params = SamplingParams(temperature=1e6, max_tokens=12, ignore_eos=True)
    scenario = Scenario(model, (Request("a", (3, 4), params),))
    first, again, other = (generate(factory, scenario, seed=seed).completions["a"][0].ids for seed in (1, 1, 2))
    if first != again:
        raise Violation(f"with seed 1 of the engine {first}, and then {again}")
    if first == other:
        raise Violation(f"with seeds 1 and 2 of the engine the same tokens at temperature 1e6: {first}")


# --- memory, work and progress


def conservation(factory: Factory, scenario: Scenario) -> None:
    def check(engine: Any, outcome: Outcome) -> None:
        state = engine.state()
        for kind in ("blocks", "slots"):
            if not 0 <= state.get(f"free_{kind}", 0) <= state.get(f"num_{kind}", 0):
                raise Violation(f"{state[f'free_{kind}']} of {state[f'num_{kind}']} {kind} are free")

    engine = make(factory, scenario.model, scenario.sizes)
    run(engine, scenario, check)
    state = engine.state()
    for kind in ("blocks", "slots"):
        if state.get(f"free_{kind}") != state.get(f"num_{kind}"):
            free, total = state[f"free_{kind}"], state[f"num_{kind}"]
            raise Violation(f"nothing is left to do, but only {free} of {total} {kind} are free")


def memory_is_right(factory: Factory, scenario: Scenario) -> None:
    engine = make(factory, scenario.model, {**scenario.sizes, "check": True, "drafter": "ngram"})
    run(engine, scenario, lambda engine, outcome: engine.verify())


def progress(factory: Factory, scenario: Scenario) -> None:
    run_steps(factory, scenario)


def work_adds_up(factory: Factory, scenario: Scenario) -> None:
    engine = make(factory, scenario.model, scenario.sizes)
    outcome = run(engine, scenario)
    require_ledger(scenario, engine.trace(), engine.metrics(), outcome)


def replays(factory: Factory, scenario: Scenario) -> None:
    engine = make(factory, scenario.model, scenario.sizes)
    outcome = run(engine, scenario)
    try:
        replayed = replay(engine.trace(), is_whole=False)
    except TraceError as error:
        raise Violation(f"the trace does not replay: {error}") from None
    for name, answers in outcome.completions.items():
        if name not in outcome.forks and name not in outcome.aborted:
            for index, answer in enumerate(answers):
                sample = name if index == 0 else f"{name}#{index}"
                outputs = replayed.outputs.get(sample)
                if tuple(outputs or ()) != answer.ids:
                    raise Violation(f"request {sample}: {answer.ids}, the replay has {outputs}")


# --- what can't be met


def overflowing_drafts(factory: Factory, example: tuple[Scenario, int]) -> None:
    """A draft that overflows where the truth does not changes nothing: it is computed again without."""
    scenario, right = example
    poison = scenario.model.vocab_size - 1
    plain = generate(factory, scenario)
    script = {name: [*answers[0].ids[:right], *[poison] * 20] for name, answers in plain.completions.items() if answers}
    other = generate(factory, scenario, drafter=script, num_speculative_tokens=3)
    require_equal(factory, scenario, plain, other, "with drafts")


def refusals(factory: Factory, example: tuple[Scenario, int]) -> None:
    """A prompt beyond the context, an id outside the vocabulary, no prompt, a name in use: refused; no one notices."""
    scenario, kind = example
    alone = generate(factory, scenario)
    engine = make(factory, scenario.model, scenario.sizes)
    for request in scenario.requests:
        engine.add(request)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    bad = [
        Request("bad", (3,) * (scenario.model.positions + 1), params),
        Request("bad", (3, scenario.model.vocab_size), params),
        Request("bad", (3, -1), params),
        Request("bad", (), params),
        replace(scenario.requests[0], params=params),
    ][kind]
    try:
        engine.add(bad)
    except (RequestError, ValueError):
        pass
    except Exception as problem:
        message = f"{type(problem).__name__}: {problem}"
        raise Violation(f"{bad!r} raised {message}, expected RequestError or ValueError") from problem
    else:
        raise Violation(f"{bad!r} was taken, expected a refusal")
    require_equal(factory, scenario, alone, Outcome(drain(engine)), "after another was refused")


def overflow_stays_home(factory: Factory, example: tuple[Scenario, int, bool]) -> None:
    """A request whose numbers overflow ends in an error; the others are as without it."""
    scenario, place, late = example
    poison = scenario.model.vocab_size - 1
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    if late:  # it overflows on the token that it generates
        params = replace(params, logit_bias={poison: 1e6})
    later_layers = getattr(scenario.model, "layers", "")[1:]
    told_later = "A" in later_layers or "S" in later_layers  # attention meets what an earlier position became
    bad = Request("bad", (3, 4) if late else (3, 4, poison, *((5, 3, 5) if told_later else ())), params)
    engine = make(factory, scenario.model, scenario.sizes)
    alone = generate(factory, scenario)
    for request in (*scenario.requests[:place], bad, *scenario.requests[place:]):
        engine.add(request)
    completions = drain(engine)
    require_error(completions.pop("bad"), "an overflowing request")
    require_equal(factory, scenario, alone, Outcome(completions), "beside a request that overflows", completions)
    engine.add(replace(bad, request_id="again"))
    require_error(drain(engine)["again"], "an overflowing request, asked again,")


def require_error(answers: Sequence[Answer], what: str) -> None:
    if [answer.finish_reason for answer in answers] != ["error"]:
        raise Violation(f"{what} ended for {answers[0].finish_reason}, expected error")
