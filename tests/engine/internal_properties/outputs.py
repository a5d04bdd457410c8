"""What the engine reports: whole outputs, metrics, times, defaults."""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, asdict, fields, replace
from typing import Any

from hypothesis import strategies as st

from internal_properties.internal import internal
from internal_properties.state_machines.compare import require
from internal_properties.state_machines.engine_books import (
    NOTHING,
    TICK,
    Book,
    Books,
    count_drafts,
    recount,
    require_request_metrics,
    sample_name,
    sample_names,
)
from lfm2np.engine.draft_model import ModelDrafter
from lfm2np.engine.drafters import NgramDrafter, ScriptedDrafter
from lfm2np.engine.engine import Engine
from lfm2np.engine.outputs import RequestOutput, RunMetrics, static_padding
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.sequential import answer_alone
from lfm2np.oracle.engines.records import Request as Asked
from lfm2np.suite.strategies.scenarios import Scenario, models, request, sampling_params, scenarios
from lfm2np.suite.strategies.talks import talks
from lfm2np.suite.strategies.tiny_models import TinyModel, loaded
from scheduler import replay

ENGINE_DEFAULTS = {
    "num_blocks": None,
    "num_window_blocks": None,
    "room_for": None,
    "block_size": 16,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "policy": "fcfs",
    "waiting_served_ratio": 0.3,
    "max_waiting_tokens": 20,
    "prefix_caching": True,
    "watermark": 0.01,
    "drafter": None,
    "num_speculative_tokens": 4,
    "seed": 0,
    "trace": None,
    "on_logits": None,
    "progress": None,
}


@internal(
    "engine-defaults-are-documented",
    "What an engine is made with unless it is told otherwise is what the documentation names.",
    7,
    lambda: st.just("all"),
)
def engine_defaults(example: str) -> None:
    """Sizes go by their names only; a request without parameters has those of SamplingParams and no priority; what an
    engine tells never changes."""
    parameters = {
        parameter.name: parameter
        for parameter in inspect.signature(Engine).parameters.values()
        if parameter.name not in ("model", "clock")
    }
    require({name: value.default for name, value in parameters.items()}, ENGINE_DEFAULTS, "defaults of", "Engine")
    require(
        {entry.kind for entry in parameters.values()},
        {inspect.Parameter.KEYWORD_ONLY},
        "kinds of parameters of",
        "Engine",
    )
    asked = inspect.signature(Engine.add_request).parameters
    defaults = {name: asked[name].default for name in ("params", "priority", "cache_salt")}
    require(defaults, {"params": None, "priority": 0, "cache_salt": ""}, "defaults of", "add_request")
    drafting = inspect.signature(ModelDrafter).parameters
    defaults = {name: drafting[name].default for name in ("sampling", "block_size")}
    require(defaults, {"sampling": "greedy", "block_size": 4}, "defaults of", "ModelDrafter")
    engine = Engine(loaded(TinyModel()))
    engine.add_request("a", (3, 4), SamplingParams(max_tokens=1, logprobs=1))
    (output,) = engine.step()
    (answer,) = output.outputs
    assert answer.logprobs is not None
    for told, name in ((output, "finished"), (answer, "text"), (output.metrics, "steps"), (answer.logprobs[0], "top")):
        try:
            setattr(told, name, None)
        except FrozenInstanceError:
            continue
        require(False, True, f"{type(told).__name__}.{name} is fixed:", "an output")


# --- whole outputs


@st.composite
def told_talks(draw: st.DrawFn) -> tuple[Scenario, tuple[str | None, ...], int]:
    """As `talks`, with any number of log-probabilities, prompts as text too, and a seed of the engine."""
    scenario = draw(talks())
    counts = st.sampled_from([None, 0, 2])
    requests = tuple(
        replace(asked, params=replace(asked.params, logprobs=draw(counts), prompt_logprobs=draw(counts)))
        for asked in scenario.requests
    )
    texts = tuple(draw(st.sampled_from([None, "count: 3 to 9", "é"])) for _ in requests)
    return replace(scenario, requests=requests), texts, draw(st.integers(0, 2))


@internal(
    "outputs-are-those-alone",
    "All that an output says, log-probabilities, text and reasons, the request says alone and without a cache.",
    2,
    told_talks,
    weight=0.5,
)
def outputs_are_those_alone(example: tuple[Scenario, tuple[str | None, ...], int]) -> None:
    """Every output of a request, all its fields, is one that the request has alone, without a cache; so is the last."""
    scenario, texts, seed = example
    model = loaded(scenario.model)
    rows: dict[str, list[tuple[int, int]]] = {}
    layers: list[tuple[int, int]] = []
    engine = engine_of(
        scenario,
        seed=seed,
        progress=lambda done, total: layers.append((done, total)),
        on_logits=lambda name, position, row, token: rows.setdefault(name, []).append((position, token)),
    )
    expected: dict[str, list[RequestOutput]] = {}
    for one, text in zip(scenario.requests, texts, strict=True):
        prompt = one.prompt_token_ids if text is None else text
        engine.add_request(one.request_id, prompt, one.params)
        alone = answer_alone(model, one.request_id, model.prompt_ids(prompt), one.params, seed)
        expected[one.request_id] = [replace(output, prompt=text) for output in alone]
    last: dict[str, RequestOutput] = {}
    for output in engine.stream():
        name, bare = output.request_id, replace(output, metrics=None)
        require(name in last and last[name].finished, False, "told after its end:", name)
        require(output.metrics is not None, output.finished, "has metrics:", name)
        for mine in bare.outputs:
            require(mine in answers_of(expected[name], mine.index), True, "is as alone:", str(mine))
            total = None if mine.logprobs is None else sum(logprob.logprob for logprob in mine.logprobs)
            require(mine.cumulative_logprob, total, "sum of log-probabilities", name)
        last[name] = bare
    total = len(model.weights.layers)
    passes = len(layers) // total  # one a step, unless a step is several of them
    require(layers, [(done, total) for done in range(1, total + 1)] * passes, "layers told", "the run")
    for name, outputs in expected.items():
        require(last[name], outputs[-1], "last output of", name)
        for mine in outputs[-1].outputs:
            first = len(outputs[-1].prompt_token_ids) - 1
            places = list(enumerate(mine.token_ids, start=first))
            require(
                rows[sample_name(name, mine.index)], places, "positions and tokens that logits were shown for", name
            )


def answers_of(outputs: list[RequestOutput], index: int) -> Iterator[Any]:
    """What a sample was so far: before its first token, and after each."""
    for output in outputs:
        if index < len(output.outputs):
            yield output.outputs[index]
    first = next(output.outputs[index] for output in outputs if index < len(output.outputs))
    empty = None if first.logprobs is None else ()
    yield replace(first, text="", token_ids=(), logprobs=empty, finish_reason=None, stop_reason=None)


# --- counters and the clock


@internal(
    "runs-are-counted",
    "What metrics say of a run and of each request, times included, is what the trace and the clock say.",
    4,
    lambda: st.tuples(
        st.one_of(scenarios(sampling_params(), kinds=("abort",)), talks(("abort",))),
        st.lists(st.booleans(), max_size=3),
    ),
    bugs=("vLLM 45238",),
)
def run_is_counted(example: tuple[Scenario, list[bool]]) -> None:
    """All that metrics say, from the trace, the clock and the scheduler's requests alone; right drafts are accepted."""
    scenario, wrong = example
    books, trace = Books(), io.StringIO()
    with_drafts = bool(wrong)
    for output in engine_with_all(scenario).stream():
        for sample in output.outputs:
            books.truth[sample_name(output.request_id, sample.index)] = sample.token_ids
    script = {
        name: [(token + off) % scenario.model.vocab_size for token, off in zip(ids, wrong * 18, strict=False)]
        for name, ids in books.truth.items()
    }
    drafter = ScriptedDrafter(script) if with_drafts else None
    engine = engine_of(scenario, clock=books.clock, trace=trace, drafter=drafter)
    require(asdict(engine.metrics), NOTHING, "metrics of an engine", "that was just made")
    require((engine.metrics.tokens_per_step, engine.metrics.mean_accepted_length), (0.0, 1.0), "means", "of no step")
    outputs: dict[str, RequestOutput] = {}
    for kind, *whom in scenario.ops:
        request = scenario.requests[whom[0]] if whom else None
        if request is None:
            counted_step(engine, trace, books, outputs, with_drafts)
        elif kind == "add":
            add_counted(engine, books, request)
        elif request.request_id in books.books and not outputs_end(outputs, request.request_id):
            outputs[request.request_id] = engine.abort(request.request_id)
            recount(books, request.request_id)
    while engine.has_unfinished:
        counted_step(engine, trace, books, outputs, with_drafts)
    for each in fields(RunMetrics):
        mine, expected = getattr(engine.metrics, each.name), getattr(books.metrics, each.name)
        near = isinstance(mine, float) and abs(mine - expected) < TICK / 10
        require(mine, mine if near else expected, f"metrics: {each.name}", "of the run")
    counted = books.metrics
    mean = counted.scheduled_tokens / max(1, counted.steps)  # all requests may be aborted before the first
    require(engine.metrics.tokens_per_step, mean, "tokens a step", "of the run")
    mean = counted.drafted_row_tokens / counted.drafted_rows if counted.drafted_rows else 1.0
    require(engine.metrics.mean_accepted_length, mean, "tokens a row with drafts", "of the run")
    for name, output in outputs.items():
        require_request_metrics(output, books.books[name])
    replay(trace.getvalue().splitlines(), is_whole=False)


def engine_with_all(scenario: Scenario) -> Engine:
    """Without drafts, and asked for everything."""
    engine = engine_of(scenario, drafter=None)
    for asked in scenario.requests:
        engine.add_request(asked.request_id, asked.prompt_token_ids, asked.params, asked.priority, asked.cache_salt)
    return engine


def engine_of(scenario: Scenario, **options: Any) -> Engine:
    sizes = {name: size for name, size in scenario.sizes.items() if name != "drafter"}
    drafter = NgramDrafter() if scenario.sizes.get("drafter") else None
    return Engine(loaded(scenario.model), **{"drafter": drafter, **sizes, **options})


def outputs_end(outputs: dict[str, RequestOutput], name: str) -> bool:
    return name in outputs and outputs[name].finished


def add_counted(engine: Engine, books: Books, request: Asked) -> None:
    name = request.request_id
    engine.add_request(name, request.prompt_token_ids, request.params, request.priority, request.cache_salt)
    known = engine.scheduler.requests
    samples = sample_names(request)
    books.books[name] = Book([known[sample] for sample in samples if sample in known], books.clock.looks)
    books.owner |= dict.fromkeys(samples, name)


def counted_step(
    engine: Engine, trace: io.StringIO, books: Books, outputs: dict[str, RequestOutput], with_drafts: bool
) -> None:
    """One step, and what its line of the trace comes to."""
    began, looks = books.clock.looks + 1, 4 if with_drafts else 2
    running = 0
    schedule = engine.scheduler.schedule

    def scheduled() -> Any:
        nonlocal running
        plan = schedule()
        running = len(engine.scheduler.running)
        return plan

    engine.scheduler.schedule = scheduled  # type: ignore[method-assign]
    changed = {output.request_id: output for output in engine.step()}
    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    require(books.clock.looks, began + looks - 1, "looks at the clock", "in a step")
    line = json.loads([each for each in trace.getvalue().splitlines() if '"kind":"step"' in each][-1])
    require(line["seconds"], round((looks - 1) * TICK, 6), "seconds", "of the trace")
    metrics = books.metrics
    metrics.seconds += (looks - 1) * TICK
    metrics.draft_seconds += TICK if with_drafts else 0.0
    metrics.most_running = max(metrics.most_running, running)
    entries, tokens = line["plan"]["scheduled"], line["tokens"]
    lengths = [len(entry["token_ids"]) for entry in entries]
    metrics.steps += 1 if lengths else 0
    metrics.scheduled_tokens += sum(lengths)
    metrics.padding_avoided += sum(max(lengths) - length for length in lengths) if lengths else 0
    metrics.sampled_tokens += sum(len(ids) for ids in tokens.values())
    metrics.steps_saved += sum(len(ids) - 1 for ids in tokens.values())
    for entry in entries:
        book = books.books[books.owner[entry["request_id"]]]
        book.first_scheduled = book.first_scheduled or began
        if entry["num_drafts"] and entry["request_id"] in tokens:
            name = entry["request_id"]
            rest = books.truth[name][books.said.get(name, 0) :]
            count_drafts(metrics, book, entry["token_ids"][-entry["num_drafts"] :], rest, len(tokens[name]))
    for name in tokens:
        books.said[name] = books.said.get(name, 0) + len(tokens[name])
        book = books.books[books.owner[name]]
        book.first_token = book.first_token or books.clock.looks
        book.last_token = books.clock.looks
    require(set(changed), {books.owner[name] for name in tokens}, "are told after a step:", "requests")
    outputs |= changed
    metrics.preemptions += len(line["plan"]["preempted"])
    metrics.prefix_hit_tokens = engine.scheduler.prefix_cache.statistics.hit_tokens
    for name, output in changed.items():
        if output.finished:
            recount(books, name)


@internal(
    "padding-is-counted",
    "What request-level batching wastes is the cells that no token is in.",
    4,
    lambda: st.tuples(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=7), st.integers(1, 3)),
    weight=2.0,
)
def padding(example: tuple[list[tuple[int, int]], int]) -> None:
    """Request-level batching, cell by cell: a member is there from its first row to the last of its batch."""
    lengths, size = example
    wasted = 0
    for first in range(0, len(lengths), size):
        batch = lengths[first : first + size]
        prompt, output = max(left for left, _ in batch), max(right for _, right in batch)
        cells = [(member, cell) for member in range(len(batch)) for cell in range(prompt + output)]
        used = sum(prompt + output for prompt, output in batch)
        wasted += len(cells) - used
    require(static_padding(lengths, size), wasted, "cells wasted by request-level batching of", str(lengths))


@internal(
    "overflowing-drafts-are-told",
    "A request whose draft overflows is computed again without it, and told why it gets no more.",
    7,
    models,
    weight=0.5,
)
def overflowing_drafts_are_told(tiny: TinyModel) -> None:
    """A request whose draft overflows is computed again without, told why, and not drafted for again."""
    model = loaded(replace(tiny, overflows=True, tied=False))
    poison = tiny.vocab_size - 1
    engine = Engine(model, drafter=ScriptedDrafter({"a": [poison] * 9}))
    for name in ("a", "b"):
        engine.add_request(name, (3, 4), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    outputs = {output.request_id: output for output in engine.stream()}
    told, other = outputs["a"].metrics, outputs["b"].metrics
    assert told is not None
    assert other is not None
    require(
        (told.draft_error is not None, other.draft_error), (True, None), "are told why there are no drafts:", "a, b"
    )
    require(engine.metrics.draft_failures, 1, "drafts that failed", "of the run")
    require(outputs["a"].outputs[0].token_ids, outputs["b"].outputs[0].token_ids, "tokens", "with drafts that overflow")


@internal(
    "warm-prompts-are-taken",
    "A prompt that was computed before comes from the cache, all full blocks, as far as no logits are wanted.",
    4,
    lambda: st.tuples(scenarios(), request("a", sampling_params(), None)),
)
def warm_prompts(example: tuple[Scenario, Asked]) -> None:
    """The second time, all full blocks before the first position whose logits are wanted come from the cache."""
    scenario, request = example
    engine = engine_of(scenario, prefix_caching=True, num_blocks=200)
    size = engine.scheduler.config.block_size
    wanted = 0 if request.params.prompt_logprobs is not None else len(request.prompt_token_ids) - 1
    for name, expected in (("first", 0), ("second", wanted // size * size)):
        engine.add_request(name, request.prompt_token_ids, replace(request.params, n=1))
        (*_, last) = engine.stream()
        assert last.metrics is not None
        require(last.metrics.cached_tokens, expected, "tokens from the cache", name)
    engine = engine_of(scenario, prefix_caching=True, num_blocks=200, max_num_seqs=1)
    params = SamplingParams(n=2, max_tokens=2, ignore_eos=True, prompt_logprobs=request.params.prompt_logprobs)
    engine.add_request("several", request.prompt_token_ids, params)
    (*_, last) = engine.stream()
    assert last.metrics is not None
    expected = len(request.prompt_token_ids) // size * size  # it waits for the slot with its first token
    require(last.metrics.cached_tokens, expected, "tokens of the second sample from the cache", "several")
