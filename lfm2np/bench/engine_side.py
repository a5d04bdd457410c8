"""Our engine as a side: the time of whole steps, from the schedule to the output."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.bench.cells import PREFILL, Cell
from lfm2np.engine import Engine
from lfm2np.loading import Model, load
from lfm2np.model import Segment, StepResult, make_segments
from lfm2np.sampling_params import SamplingParams
from lfm2np.weights import AttentionWeights
from scheduler import BatchPlan

Array = NDArray[Any]
Entries = list[tuple[Array, ...]]  # per attention layer [t, ...]
BLOCK_SIZE = 16
WARM_UP = 1  # steps


class FillableEngine(Engine):
    """An engine that takes random keys, values and states in the place of the network's while it is filled.

    They go into the cache as computed ones do, through `commit`, so blocks, slots and checkpoints are what a real
    prefill of the prompts would leave; that of 64 prompts of 1,024 tokens would take minutes, and no step's time
    depends on the numbers. All requests get the same ones, each into its own blocks.
    """

    fill: Entries | None = None

    def _compute(self, plan: BatchPlan) -> StepResult:
        return super()._compute(plan) if self.fill is None else random_step(self.model, plan, self.fill)


def random_step(model: Model, plan: BatchPlan, entries: Entries) -> StepResult:
    """What a step would return that computed these entries: states of ones, and logits that choose token 0."""
    config = model.config
    convolutions = config.layer_types.count("conv")
    logits: dict[str, Array] = {}
    segments: list[Segment] = make_segments(plan)
    for one in segments:
        count = len(one.entry.token_ids)
        one.entries = [tuple(array[:count] for array in layer) for layer in entries]
        one.windows = [np.ones((config.conv_L_cache - 1 + count, config.hidden_size), np.float32)] * convolutions
        logits[one.entry.request_id] = np.zeros((one.entry.stop - one.entry.first_logits, config.vocab_size))
    return StepResult({name: rows for name, rows in logits.items() if len(rows)}, {}, segments)


def random_entries(model: Model, count: int) -> Entries:
    """Keys and values of `count` tokens, per attention layer, in the form in which the cache holds them."""
    rng = np.random.default_rng(0)
    numerics = model.numerics

    def normal() -> Array:
        shape = (count, model.config.num_key_value_heads, model.config.head_dim)
        return numerics.embed(rng.standard_normal(shape, dtype=np.float32))

    operators = [layer.operator for layer in model.weights.layers]
    return [
        numerics.cache_entries(normal(), normal(), operator.scale)
        for operator in operators
        if isinstance(operator, AttentionWeights)
    ]


def make_engine(model: Model, requests: int, longest: int) -> FillableEngine:
    """Room for so many requests of at most `longest` tokens, and for all of them in one step."""
    return FillableEngine(
        model,
        num_blocks=requests * -(-longest // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_seqs=requests,
        max_num_batched_tokens=requests * longest,
        watermark=0.0,
    )


def decoding_engine(model: Model, requests: int, context: int, steps: int, fill: Entries) -> FillableEngine:
    """An engine whose requests have `context` tokens in the cache and may run for that many steps."""
    engine = make_engine(model, requests, context + steps)
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
    for index in range(requests):
        engine.add_request(str(index), rng.integers(0, model.config.vocab_size, context).tolist(), params)
    engine.fill = fill
    engine.step()
    engine.fill = None
    return engine


class EngineSide:
    """Engine.step() with greedy sampling under one arithmetic."""

    def __init__(self, numerics: str) -> None:
        self._numerics = numerics

    def load(self, directory: Path, threads: int) -> dict[str, str]:
        self._model = load(directory, self._numerics)
        return {}

    def time(self, cell: Cell, steps: int) -> list[dict[str, float]]:
        """Seconds of each of `steps` steps, after one that is not counted."""
        seconds = self._prefill(cell, steps) if cell.kind == PREFILL else self._decode(cell, steps)
        return [{"seconds": one} for one in seconds[WARM_UP:]]

    def _prefill(self, cell: Cell, steps: int) -> list[float]:
        """Each prompt is another, so that no prefix is found in the cache."""
        engine = make_engine(self._model, 1, cell.context + 1)
        rng = np.random.default_rng(0)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        seconds = []
        for index in range(WARM_UP + steps):
            prompt = rng.integers(0, self._model.config.vocab_size, cell.context).tolist()
            engine.add_request(str(index), prompt, params)
            seconds.append(time_step(engine))
        return seconds

    def _decode(self, cell: Cell, steps: int) -> list[float]:
        fill = random_entries(self._model, cell.context)
        engine = decoding_engine(self._model, cell.requests, cell.context, WARM_UP + steps, fill)
        return [time_step(engine) for _ in range(WARM_UP + steps)]


def time_step(engine: Engine) -> float:
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began
