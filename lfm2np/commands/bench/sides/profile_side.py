"""Our engine as a side whose arithmetic notes how long each of its operations takes, and what of that one core does.

Of a step, all cores compute products (BLAS's threads or ours), attention.over_spans what attention does for each
request by itself (products, mostly), and pieces.over_pieces what is large enough; the rest is serial.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lfm2np.arithmetic import attention, exact, ieee, pieces, routing
from lfm2np.commands.bench.sides.engine_side import EngineSide
from lfm2np.engine.engine import Engine

PARTS = {  # what is shown, and the operations of an arithmetic that are it
    "linear": ("linear",),
    "attention": ("attend_ragged", "cache_entries"),
    "gate": ("swiglu",),
    "norms": ("rms_norm",),
    "convolution": ("convolve_ragged",),
    "other rows": ("embed", "add", "multiply", "rotate"),
}
ROUTING = {
    "routing": ("sigmoid", "add_expert_bias", "top_k", "routing_weights", "combine_experts")
}  # of a mixture of experts
PART_OF = {operation: part for part, operations in (PARTS | ROUTING).items() for operation in operations}
REST = "rest"  # schedule, cache, sampling, output
PRODUCTS, BY_REQUEST, PIECES, SERIAL = SPREAD = ("products", "attention by request", "pieces", "serial")
FUNCTIONS: dict[str, tuple[tuple[ModuleType, str], ...]] = {  # where each is called by that name
    PRODUCTS: ((exact, "without_tiles"), (exact, "by_tiles"), (ieee, "product")),
    BY_REQUEST: tuple((module, "over_spans") for module in (attention, exact, ieee)),
    PIECES: tuple((module, "over_pieces") for module in (exact, ieee, routing, pieces)),
}


class Timed:
    """An arithmetic that adds up the seconds of its operations by part."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._inner, name)
        part = PART_OF.get(name)
        if part is None:
            return operation

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = operation(*arguments)
            self.seconds[part] += time.perf_counter() - began
            return result

        return timed


def timed_function(function: Callable[..., Any], part: str, seconds: dict[str, float]) -> Callable[..., Any]:
    """The function, which adds its seconds to those of the part; of pieces only if there are several threads' worth."""

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        result = function(*arguments)
        if part != PIECES or pieces.worth_threads(*arguments[1:3]) > 1:
            seconds[part] += time.perf_counter() - began
        return result

    return timed


class ProfileSide(EngineSide):
    def load(self, directory: Path, threads: int) -> dict[str, str]:
        versions = super().load(directory, threads)
        self._timed = Timed(self._model.numerics)
        self._model = dataclasses.replace(self._model, numerics=self._timed)
        self._spread: defaultdict[str, float] = defaultdict(float)
        self._functions = [
            (module, name, timed_function(getattr(module, name), part, self._spread))
            for part, places in FUNCTIONS.items()
            for module, name in places
        ]
        return versions

    def _time_step(self, engine: Engine) -> dict[str, float]:
        self._timed.seconds.clear()
        self._spread.clear()
        originals = [(module, name, getattr(module, name)) for module, name, _ in self._functions]
        try:
            for module, name, timed in self._functions:
                setattr(module, name, timed)
            whole = super()._time_step(engine)["seconds"]
        finally:
            for module, name, original in originals:
                setattr(module, name, original)
        names = PARTS if self._model.config.mixture is None else PARTS | ROUTING
        parts = {part: self._timed.seconds[part] for part in names}
        spread = {part: self._spread[part] for part in FUNCTIONS}
        serial = whole - sum(spread.values())
        return {"seconds": whole, **parts, REST: whole - sum(parts.values()), **spread, SERIAL: serial}
