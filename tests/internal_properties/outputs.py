"""What the engine reports: whole outputs, metrics, times, defaults."""

from __future__ import annotations

import inspect
import io
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from typing import Any

from hypothesis import strategies as st

import scheduler
from internal_properties.internal import internal, require
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
from scheduler import Scheduler, SchedulerConfig, replay

TICK = 1.4e-6  # seconds from one look at the clock to the next: one that a trace rounds to 1e-6


def sample_names(request: Asked) -> list[str]:
    """As the scheduler, a trace, a drafter and `on_logits` have them."""
    return [sample_name(request.request_id, index) for index in range(request.params.n)]


def sample_name(name: str, index: int) -> str:
    return f"{name}#{index}" if index else name


@internal(
    "engine-defaults-are-documented",
    "What an engine is made with unless it is told otherwise is what the documentation names.",
    7,
    lambda: st.just("all"),
)
def engine_defaults(example: str) -> None:
    """Options go by their names only, sizes are SchedulerConfig's; what an engine tells never changes."""
    options = {each.name: each for each in inspect.signature(Engine).parameters.values() if each.name != "model"}
    sizes = {**asdict(SchedulerConfig(1)), "num_blocks": None, "num_window_blocks": None}
    more = {"num_speculative_tokens": 4, "seed": 0, "clock": time.perf_counter}
    for name, option in options.items():
        require(option.default, {**sizes, **more}.get(name), "default", name)
    require({option.kind for option in options.values()}, {inspect.Parameter.KEYWORD_ONLY}, "kinds", "Engine")
    for function, expected in (
        (Engine.add_request, {"params": None, "priority": 0, "cache_salt": ""}),
        (ModelDrafter, {"sampling": "greedy", "block_size": 4}),
    ):
        given = inspect.signature(function).parameters
        require({name: given[name].default for name in expected}, expected, "defaults of", function.__name__)
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


class Clock:
    """Goes on by one tick whenever it is looked at."""

    looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.looks * TICK


@dataclass
class Recount:
    """What a run must have counted: from its trace and that clock alone, and from the requests of the replay."""

    with_drafts: bool
    metrics: RunMetrics = field(default_factory=RunMetrics)
    looks: int = 0
    requests: dict[str, scheduler.Request] = field(default_factory=dict)  # by sample
    times: dict[str, dict[str, int]] = field(default_factory=dict)  # by request, at which look
    spans: dict[str, list[int]] = field(default_factory=dict)  # by sample, the looks of its first and its last token
    drafts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by request, those computed and accepted

    def count(self, lines: Sequence[str]) -> None:
        replay(lines, self._planned, is_whole=False)
        for line in map(json.loads, lines):
            if line["kind"] == "add":
                self.looks += 1
                self.times[line["request"]["request_id"]] = {"arrived": self.looks}
            if line["kind"] == "step":
                self._step(line)
        self.metrics.recomputed_tokens = sum(each.num_recomputed_tokens for each in self.requests.values())

    def _planned(self, replayed: Scheduler) -> None:
        self.requests |= replayed.requests
        self.metrics.most_running = max(self.metrics.most_running, len(replayed.running))
        self.metrics.prefix_hit_tokens = replayed.prefix_cache.statistics.hit_tokens

    def _step(self, line: Mapping[str, Any]) -> None:
        began, metrics, tokens = self.looks + 1, self.metrics, line["tokens"]
        self.looks += 4 if self.with_drafts else 2
        require(line["seconds"], round((self.looks - began) * TICK, 6), "seconds", "of the trace")
        metrics.seconds += (self.looks - began) * TICK
        metrics.draft_seconds += TICK * self.with_drafts
        lengths = [len(entry["token_ids"]) for entry in line["plan"]["scheduled"]]
        metrics.steps += bool(lengths)
        metrics.scheduled_tokens += sum(lengths)
        metrics.padding_avoided += sum(max(lengths) - length for length in lengths)
        metrics.sampled_tokens += sum(map(len, tokens.values()))
        metrics.steps_saved += sum(len(ids) - 1 for ids in tokens.values())
        metrics.preemptions += len(line["plan"]["preempted"])
        for entry in line["plan"]["scheduled"]:
            name = entry["request_id"]
            self.times[owner(name)].setdefault("scheduled", began)
            if entry["num_drafts"] and name in tokens:
                self._drafted(owner(name), entry["token_ids"][-entry["num_drafts"] :], tokens[name])
        for name in tokens:
            self.times[owner(name)].setdefault("first", self.looks)
            self.spans.setdefault(name, [self.looks, 0])[1] = self.looks

    def _drafted(self, name: str, drafts: list[int], tokens: list[int]) -> None:
        held = sum(tokens[: count + 1] == drafts[: count + 1] for count in range(min(len(drafts), len(tokens))))
        metrics, places = self.metrics, range(max(len(drafts), len(self.metrics.drafted_at)))
        metrics.drafted_rows += 1
        metrics.drafted_row_tokens += len(tokens)
        metrics.draft_tokens += len(drafts)
        metrics.accepted_tokens += held
        self.drafts += {(name, "drafts"): len(drafts), (name, "accepted"): held}
        for number, counts in ((len(drafts), metrics.drafted_at), (held, metrics.accepted_at)):
            counts += [0] * (len(places) - len(counts))
            counts[:] = [counts[place] + (place < number) for place in places]

    def require(self, output: RequestOutput) -> None:
        """Of a request that has ended."""
        name, times = output.request_id, self.times[output.request_id]
        samples = [each for key, each in self.requests.items() if owner(key) == name]
        longest = max(output.outputs, key=lambda sample: len(sample.token_ids))
        begin, end = self.spans.get(sample_name(name, longest.index), (0, 0))
        between = (end - begin) / (len(longest.token_ids) - 1) if len(longest.token_ids) > 1 else None
        waited, first = (times[what] - times["arrived"] if what in times else None for what in ("scheduled", "first"))
        expected = {
            "queue_time": waited and waited * TICK,
            "time_to_first_token": first and first * TICK,
            "time_per_output_token": None if between is None else between * TICK,
            "steps": sum(each.num_steps for each in samples),
            "blocks": max((each.most_blocks for each in samples), default=0),
            "cached_tokens": sum(each.num_cached_tokens for each in samples),
            "preemptions": sum(each.num_preemptions for each in samples),
            "recomputed_tokens": sum(each.num_recomputed_tokens for each in samples),
            "draft_tokens": self.drafts[name, "drafts"],
            "accepted_tokens": self.drafts[name, "accepted"],
            "draft_error": None,
        }
        require_counts(output.metrics, expected, name)


def owner(sample: str) -> str:
    return sample.partition("#")[0]


def require_counts(metrics: Any, expected: Mapping[str, Any], who: str) -> None:
    require([each.name for each in fields(metrics)], list(expected), "metrics", who)
    for name, count in expected.items():
        said = getattr(metrics, name)
        near = isinstance(said, float) and isinstance(count, float) and abs(said - count) < TICK / 100
        require(said, said if near else count, f"metrics: {name}", who)


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
    """With drafts that are right and wrong in turn."""
    scenario, wrong = example
    script = {}
    plain = engine_of(scenario, drafter=None)
    for asked in scenario.requests:
        add(plain, asked)
    for output in plain.stream():
        for sample in output.outputs:
            told = zip(sample.token_ids, wrong * 18, strict=False)
            script[sample_name(output.request_id, sample.index)] = [
                (token + off) % scenario.model.vocab_size for token, off in told
            ]
    clock, trace = Clock(), io.StringIO()
    engine = engine_of(scenario, clock=clock, trace=trace, drafter=ScriptedDrafter(script) if wrong else None)
    require_counts(engine.metrics, asdict(Recount(False).metrics), "an engine that was just made")
    require((engine.metrics.tokens_per_step, engine.metrics.mean_accepted_length), (0.0, 1.0), "means", "of no step")
    outputs: dict[str, RequestOutput] = {}

    def step() -> None:
        changed = {output.request_id: output for output in engine.step()}
        line = json.loads([each for each in trace.getvalue().splitlines() if '"kind":"step"' in each][-1])
        require(set(changed), set(map(owner, line["tokens"])), "are told after a step:", "requests")
        outputs.update(changed)

    for kind, *whom in scenario.ops:
        if kind == "step":
            step()
        elif kind == "add":
            add(engine, scenario.requests[whom[0]])
        elif engine.knows(name := scenario.requests[whom[0]].request_id):
            outputs[name] = engine.abort(name)
    while engine.has_unfinished:
        step()
    recount = Recount(bool(wrong))
    recount.count(trace.getvalue().splitlines())
    require(clock.looks, recount.looks, "looks at the clock", "in the run")
    counted = recount.metrics
    require_counts(engine.metrics, asdict(counted), "of the run")
    mean = counted.scheduled_tokens / max(1, counted.steps)  # all requests may be aborted before the first
    require(engine.metrics.tokens_per_step, mean, "tokens a step", "of the run")
    mean = counted.drafted_row_tokens / counted.drafted_rows if counted.drafted_rows else 1.0
    require(engine.metrics.mean_accepted_length, mean, "tokens a row with drafts", "of the run")
    for output in outputs.values():
        recount.require(output)


def add(engine: Engine, request: Asked) -> None:
    engine.add_request(
        request.request_id, request.prompt_token_ids, request.params, request.priority, request.cache_salt
    )


def engine_of(scenario: Scenario, **options: Any) -> Engine:
    sizes = {name: size for name, size in scenario.sizes.items() if name != "drafter"}
    drafter = NgramDrafter() if scenario.sizes.get("drafter") else None
    return Engine(loaded(scenario.model), **{"drafter": drafter, **sizes, **options})


@internal(
    "padding-is-counted",
    "What request-level batching wastes is the cells that no token is in.",
    4,
    lambda: st.tuples(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=7), st.integers(1, 3)),
    weight=2.0,
)
def padding(example: tuple[list[tuple[int, int]], int]) -> None:
    lengths, size = example
    batches = [lengths[first : first + size] for first in range(0, len(lengths), size)]
    cells = sum(len(batch) * sum(map(max, zip(*batch, strict=True))) for batch in batches)
    require(static_padding(lengths, size), cells - sum(map(sum, lengths)), "cells wasted by batches of", str(lengths))


@internal(
    "overflowing-drafts-are-told",
    "A request whose draft overflows is computed again without it, and told why it gets no more.",
    7,
    models,
    weight=0.5,
)
def overflowing_drafts_are_told(tiny: TinyModel) -> None:
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
