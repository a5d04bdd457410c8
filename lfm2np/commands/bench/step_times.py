"""Seconds of our engine's own steps, of all sizes: what a cost model is fitted to (lfm2np/commands/simulate/fit.py).

Requests are drawn in episodes: so many at once, of about such a length. When one ends, the next comes, so steps hold
prompts, parts of prompts, decodes, and both. Episodes come in a random order, so that any part of the run holds steps
of all sizes, and a fit sees what the machine does meanwhile. A step's time is that of a whole turn of the loop, as a
server has it: new requests are added, a step is planned, computed and sampled, and its outputs are made.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.commands.simulate.cost import StepShape, shape_of
from lfm2np.engine.engine import Engine
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import RequestError
from lfm2np.values import Progress
from scheduler import BatchPlan, FinishReason, Request, TraceWriter

MOST_STEPS = 16  # of an episode
MOST_OUTPUT = 16  # tokens of a request


class ShapeRecorder(TraceWriter):
    """In the place of an engine's trace: keeps the shapes of its steps, and writes nothing."""

    def __init__(self) -> None:
        self.shapes: list[StepShape] = []

    def step(self, plan: BatchPlan, *_: object) -> None:
        self.shapes.append(shape_of(plan))

    def add(self, request: Request, forks: Sequence[Request]) -> None: ...
    def finish(self, request_id: str, reason: FinishReason) -> None: ...
    def fork(self, parent_id: str, child: Request) -> None: ...
    def preempt(self, request_id: str) -> None: ...
    def abandon(self, plan: BatchPlan, drafts: Mapping[str, Sequence[int]]) -> None: ...
    def end(self) -> None: ...


def recorded(engine: Engine) -> list[StepShape]:
    """The list to which the engine will add the shape of each step."""
    recorder = ShapeRecorder()
    engine.trace = recorder
    return recorder.shapes


@dataclass(frozen=True)
class Episode:
    """At most `together` requests at once, with prompts of 1 to `longest` tokens."""

    together: int
    longest: int


def episodes(draw: random.Random, most_together: int, longest: int) -> Iterator[Episode]:
    """Of all sizes; a server under load runs as many requests as it may, one at night runs one or two."""
    while True:
        together = draw.choice((log_uniform(draw, most_together), draw.randint(1, most_together)))
        yield Episode(together, log_uniform(draw, longest))


def log_uniform(draw: random.Random, most: int) -> int:
    """From 1 to `most`, each power of two as likely as another."""
    return min(most, int((most + 1) ** draw.random()))


def measure(
    model: LoadedModel,
    seconds: float,
    longest: int,
    seed: int = 0,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> list[tuple[StepShape, float]]:
    """Steps of about that many seconds in all, in the order in which they ran.

    longest   most prompt tokens of a request
    progress  called with (seconds so far, seconds in all)
    options   of Engine; half of the episodes run with a quarter of max_num_batched_tokens
    errors    RequestError for a prompt that is longer than the model's context
    """
    room = model.config.max_position_embeddings - MOST_OUTPUT
    if not 1 <= longest <= room:
        raise RequestError(f"prompts of up to {longest} tokens: expected 1 to {room}")
    draw = random.Random(seed)
    large = Engine(model, **options)
    budget = large.scheduler.config.max_num_batched_tokens
    small = Engine(model, **{**options, "max_num_batched_tokens": max(1, budget // 4)})
    drawn = episodes(draw, large.scheduler.config.max_num_seqs, longest)
    names = map(str, itertools.count())
    measured: list[tuple[StepShape, float]] = []
    began, spent = clock(), 0.0
    run_episode(large, next(drawn), draw, names, began + seconds, clock)  # warms up, and counts as time only
    while (spent := clock() - began) < seconds:
        engine = draw.choice((large, small))
        measured += run_episode(engine, next(drawn), draw, names, began + seconds, clock)
        if progress:
            progress(min(int(spent), int(seconds)), int(seconds))
    return measured


def run_episode(
    engine: Engine,
    episode: Episode,
    draw: random.Random,
    names: Iterator[str],
    deadline: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[StepShape, float]]:
    """Its steps; nothing of it is left in the engine but cached blocks."""
    shapes, times = recorded(engine), list[float]()
    alive: set[str] = set()
    while len(times) < MOST_STEPS and (not times or clock() < deadline):
        count, size = episode.together - len(alive), engine.model.config.vocab_size
        new = {next(names): drawn_request(draw, episode.longest, size) for _ in range(count)}
        alive |= new.keys()
        began = clock()
        for name, request in new.items():
            engine.add_request(name, *request)
        for output in engine.step():
            if output.finished:
                alive.discard(output.request_id)
        times.append(clock() - began)
    for name in alive:
        engine.abort(name)
    return list(zip(shapes, times, strict=True))


def drawn_request(draw: random.Random, longest: int, vocab_size: int) -> tuple[list[int], SamplingParams]:
    """A random prompt, and greedy decoding of a random number of tokens."""
    prompt = [draw.randrange(vocab_size) for _ in range(draw.randint(1, longest))]
    return prompt, SamplingParams(temperature=0.0, max_tokens=log_uniform(draw, MOST_OUTPUT), ignore_eos=True)
