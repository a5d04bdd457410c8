"""One run of the page: the real engine on the learner's requests, with a fault and without it.

The engine runs as it is; what is added is a bound on its steps, and that whatever a fault makes it raise is an answer.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.drafters import NgramDrafter
from lfm2np.engine.engine import Engine, OnLogits
from lfm2np.engine.outputs import RequestOutput
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.teaching.drawings.runs.derive import prefix_hit_tokens
from lfm2np.teaching.drawings.runs.leaks import Leak, leak
from lfm2np.teaching.drawings.runs.other_policies import passes
from lfm2np.teaching.drawings.runs.recorded import Coming, DetailedTrace
from lfm2np.teaching.drawings.runs.recorded_run import Run, read_run
from lfm2np.teaching.faults import inject
from lfm2np.teaching.lab.models import Models, all_token_ids
from lfm2np.teaching.lab.settings import NAMES, Settings
from lfm2np.values import plain

MOST_STEPS = 150  # of a run; beyond it a page would be tens of megabytes
# By request, in the order in which its tokens came: a position, and the SHA-256 of the whole row of logits.
Logits = dict[str, list[tuple[int, str]]]


@dataclass(frozen=True)
class Computed:
    """What one engine did. Without a run where no request got a token: there is nothing to draw."""

    run: Run | None
    tokens: Mapping[str, tuple[int, ...]]  # by request, as it was answered: not all that came, under some faults
    logits: Logits
    stopped: str  # one sentence, where it did not end by itself; "": it did


@dataclass(frozen=True)
class Changed:
    """Whether a fault changed a request's tokens, and its logits.

    Logits are whole rows as the engine told them (`on_logits`), by SHA-256, and compared as far as both runs have
    them: the recorded numbers of lm_head are only the first few.
    """

    tokens: bool
    logits: bool
    cut: bool = False  # the run was stopped, and what it said so far is right


@dataclass(frozen=True)
class Counts:
    """Of a run. `wasted` are the cells that rectangles would add to its own steps, of which `idle` computed nothing."""

    steps: int
    rows: int
    preemptions: int
    prefix_hit_tokens: int
    wasted: int
    idle: int


@dataclass(frozen=True, eq=False)
class Outcome:
    settings: Settings
    run: Run | None  # with its fault
    sound: Run | None  # without it, where there is one
    changed: Mapping[str, Changed]  # by request; empty without a fault
    leaking: Leak | None
    counts: Counts | None
    stopped: str  # of the run
    tokens: Mapping[str, tuple[int, ...]]  # by request, of the run


def compute(settings: Settings, models: Models, is_drawn: bool = True) -> Outcome:
    """Runs it, and once more without the fault. Not drawn: without numbers of operations and without a leaking step."""
    computed = run_engine(settings, models, with_detail=is_drawn)
    sound = run_engine(replace(settings, fault=""), models) if settings.fault else computed
    changed = {}
    if settings.fault:
        for name in NAMES[: len(settings.requests)]:
            said, right = computed.tokens.get(name, ()), sound.tokens.get(name, ())
            drawn = zip(computed.logits.get(name, ()), sound.logits.get(name, ()), strict=False)
            other_logits = any(a != b for a, b in drawn)
            cut = bool(computed.stopped) and said != right and said == right[: len(said)] and not other_logits
            changed[name] = Changed(said != right and not cut, other_logits, cut)
    return Outcome(
        settings=settings,
        run=computed.run,
        sound=sound.run if settings.fault else None,
        changed=changed,
        leaking=leaking_step(settings, models) if is_drawn else None,
        counts=counts_of(computed.run) if computed.run else None,
        stopped=computed.stopped,
        tokens=computed.tokens,
    )


# --- the engine


def noted_in(logits: Logits) -> OnLogits:
    """What an engine calls with each row of logits, which goes into `logits`."""

    def note(name: str, position: int, row: Any, token: int) -> None:
        logits.setdefault(name, []).append((position, hashlib.sha256(row.tobytes()).hexdigest()))

    return note


def run_engine(settings: Settings, models: Models, with_detail: bool = False) -> Computed:
    """Until all requests have ended, the steps are too many, or the engine raises, which it does under faults only."""
    of, file = models.by_name[settings.model], io.StringIO()
    logits: Logits = {}
    detailed = DetailedTrace(of.model, of.words) if with_detail else None
    model = detailed.model if detailed else of.model
    tokens: dict[str, tuple[int, ...]] = {}
    stopped = ""
    with inject(settings.fault) if settings.fault else nullcontext(), np.errstate(all="ignore"):
        try:
            engine = make_engine(settings, models, model, trace=file, on_logits=noted_in(logits))
            step = partial(detailed.step, engine) if detailed else engine.step
            for outputs in take_steps(engine, coming_of(settings, models), step):
                tokens |= {output.request_id: tuple(output.outputs[0].token_ids) for output in outputs}
            if engine.has_unfinished:
                stopped = f"The run was stopped after {MOST_STEPS} steps, before all requests had ended."
        except Exception as problem:  # a fault may raise anything
            if not settings.fault:
                raise
            stopped = f"With this fault the engine ended with {type(problem).__name__}: {one_line(problem)}."
    lines = file.getvalue().splitlines()
    has_tokens = any(json.loads(line).get("tokens") for line in lines)
    run = replace(read_run(lines, is_whole=False), texts=of.texts) if has_tokens else None
    return Computed(run, tokens, logits, stopped)


def make_engine(settings: Settings, models: Models, model: LoadedModel, **more: Any) -> Engine:
    if settings.drafts:
        more |= {"drafter": NgramDrafter(), "num_speculative_tokens": settings.drafts}
    return Engine(model, **sizes_of(settings, models), prefix_caching=settings.prefix_caching, **more)


def sizes_of(settings: Settings, models: Models) -> dict[str, Any]:
    """Those of the engine; the budget is all that could ever be asked of one step where prompts are not to be cut."""
    budget = settings.budget
    if not settings.chunked:
        prompts = sum(map(len, all_token_ids(settings, models).values()))
        budget = prompts + sum(asked.max_tokens + settings.drafts for asked in settings.requests)
    return {
        "block_size": settings.block_size,
        "num_blocks": settings.num_blocks,
        "max_num_batched_tokens": budget,
        "max_num_seqs": settings.slots,
        "policy": settings.policy,
        "watermark": 0.0,
    }


def coming_of(settings: Settings, models: Models) -> list[Coming]:
    """Greedy, until the end token or `max_tokens`."""
    return [
        Coming(name, ids, SamplingParams(temperature=0.0, max_tokens=asked.max_tokens), asked.arrival)
        for asked, (name, ids) in zip(settings.requests, all_token_ids(settings, models).items(), strict=True)
    ]


def take_steps(
    engine: Engine, coming: Sequence[Coming], step: Callable[[], list[RequestOutput]]
) -> Iterator[list[RequestOutput]]:
    """What comes out of each step, as in `recorded`; of so many steps at most, before which all requests have come."""
    left = list(coming)
    for number in range(MOST_STEPS):
        for request in [request for request in left if request.arrival <= number]:
            left.remove(request)
            engine.add_request(request.request_id, request.prompt, request.params)
        yield step()
        if not left and not engine.has_unfinished:
            return


def one_line(problem: BaseException) -> str:
    """Its message, shortened; its last full stop is the sentence's."""
    return plain(" ".join(str(problem).split())[:120].rstrip(".") or "no message")


def leaking_step(settings: Settings, models: Models) -> Leak | None:
    """The first step in which a request begins behind another one; None where there is none.

    Of these requests without drafts, prefix cache and fault: then only the order of the rows could bring them together.
    """
    of, coming, file = models.by_name[settings.model], coming_of(settings, models), io.StringIO()
    bare = replace(settings, drafts=0, prefix_caching=False, fault="")
    engine = make_engine(bare, models, of.model, trace=file)
    for _ in take_steps(engine, coming, engine.step):
        plan = json.loads(file.getvalue().splitlines()[-1])["plan"]
        if any(entry["start"] == 0 for entry in plan["scheduled"][1:]):
            return leak(of.model, coming, engine.scheduler.step - 1, of.texts, **sizes_of(settings, models))
    return None


# --- what is counted


def counts_of(run: Run) -> Counts:
    return Counts(
        steps=len(run.steps),
        rows=sum(step.num_tokens for step in run.steps),
        preemptions=sum(len(step.preempted) for step in run.steps),
        prefix_hit_tokens=prefix_hit_tokens(run),
        wasted=sum(each.padding for each in passes(run)),
        idle=sum(not step.entries for step in run.steps),
    )
