"""Our engine as a side: the time of whole steps, from the schedule to the output."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from lfm2np.arithmetic import Numerics
from lfm2np.arithmetic.products.fastest import TRIES
from lfm2np.commands.bench.sides.cells import PREFILL, Cell
from lfm2np.commands.bench.sides.filled_engines import (
    answer_prompts,
    decoding_engine,
    greedy,
    make_engine,
    random_entries,
    random_prompt,
)
from lfm2np.commands.bench.sides.peak_memory import forget_peak, peak_bytes, resident_bytes
from lfm2np.engine.cache import bytes_per_block
from lfm2np.engine.engine import Engine
from lfm2np.engine.loading import Model, load
from lfm2np.truth.weights import MixtureWeights

STEP_TOKENS = 2048  # the engine's own default


class Chosen:
    """An arithmetic that counts how many experts of each sparse layer a step touches."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.counts: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def top_k(self, preferred: Any, count: int) -> Any:
        chosen = self._inner.top_k(preferred, count)
        self.counts.append(len(np.unique(chosen)))
        return chosen


def prepare_experts(model: Model) -> None:
    """All of them, so that no step that is timed has to."""
    for layer in model.weights.layers:
        if isinstance(layer.feed_forward, MixtureWeights):
            assert model.config.mixture is not None
            for expert in range(model.config.mixture.num_experts):
                layer.feed_forward.expert(expert)


class EngineSide:
    """Engine.step() with greedy sampling under one arithmetic."""

    def __init__(self, numerics: str, weights: str = "resident") -> None:
        self._numerics, self._weights = numerics, weights
        self._chosen: Chosen | None = None  # of a mixture of experts

    def load(self, directory: Path, threads: int) -> dict[str, str]:
        self._model = load(directory, self._numerics, weights=self._weights)
        if self._weights == "resident":
            prepare_experts(self._model)
        return {}

    def time(self, cell: Cell, steps: int) -> list[dict[str, float]]:
        """Seconds of each of `steps` steps, after some that are not counted."""
        ready = self._prefilling if cell.kind == PREFILL else self._decoding
        if self._model.config.sparse_layers and self._chosen is None:
            self._chosen = Chosen(self._model.numerics)
            self._model = replace(self._model, numerics=cast(Numerics, self._chosen))
        # Until all is as it stays: in exact a decode's head, one product a step, is tried in each way first.
        is_tried = self._numerics == "exact" and self._weights == "resident" and cell.kind != PREFILL
        warm_up = 2 * TRIES if is_tried else 1
        return [self._time_step(engine) for engine in ready(cell, warm_up + steps)][warm_up:]

    def _prefilling(self, cell: Cell, steps: int) -> Iterator[Engine]:
        """An engine before each step. Each prompt is another, so that no prefix is found in the cache."""
        engine = make_engine(self._model, 1, cell.context + 1)
        for index in range(steps):
            engine.add_request(str(index), random_prompt(self._model, cell.context, index), greedy(1))
            yield engine

    def _decoding(self, cell: Cell, steps: int) -> Iterator[Engine]:
        fill = random_entries(self._model, cell.context)
        yield from itertools.repeat(decoding_engine(self._model, cell.requests, cell.context, steps, fill), steps)

    def _time_step(self, engine: Engine) -> dict[str, float]:
        if self._chosen is not None:
            self._chosen.counts.clear()
        began = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - began
        if self._chosen is None:
            return {"seconds": seconds}
        return {"seconds": seconds, "experts": sum(self._chosen.counts) / len(self._chosen.counts)}

    def answer(self, way: str, longest: int) -> dict[str, float]:
        """Seconds to answer five prompts: see engines.answer_prompts."""
        return {"seconds": answer_prompts(self._model, way, longest)}

    def prefill_memory(self, length: int) -> dict[str, int]:
        """The most memory of reading a prompt, STEP_TOKENS a step, beyond what was held before, and its cache's."""
        engine = make_engine(self._model, 1, length + 1, STEP_TOKENS)  # its arrays are mapped when they are written
        blocks = -(-length // engine.cache.block_size)
        sizes = engine.scheduler.config
        cached = blocks * bytes_per_block(self._model.config, self._model.numerics, sizes)
        engine.add_request("0", random_prompt(self._model, length, 0), greedy(1))
        forget_peak()
        before = resident_bytes()
        while engine.has_unfinished:
            engine.step()
        return {"bytes": peak_bytes() - before, "cache_bytes": cached}
