"""Our engine as a side whose arithmetic notes how long each of its operations takes."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from lfm2np.bench.sides.engine_side import EngineSide
from lfm2np.engine.engine import Engine

PARTS = {  # what is shown, and the operations of an arithmetic that are it
    "linear": ("linear",),
    "attention": ("attend_ragged", "cache_entries"),
    "gate": ("swiglu",),
    "norms": ("rms_norm",),
    "convolution": ("convolve_ragged",),
    "other rows": ("embed", "add", "multiply", "rotate"),
}
ROUTING = {"routing": ("sigmoid", "prefer", "best", "shares", "mix")}  # of a mixture of experts
PART_OF = {operation: part for part, operations in (PARTS | ROUTING).items() for operation in operations}
REST = "rest"  # schedule, cache, sampling, output


class Timed:
    """An arithmetic that adds up the seconds of its operations by part."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        part = PART_OF.get(name)
        if part is None:
            return found

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = found(*arguments)
            self.seconds[part] += time.perf_counter() - began
            return result

        return timed


class ProfileSide(EngineSide):
    def load(self, directory: Path, threads: int) -> dict[str, str]:
        versions = super().load(directory, threads)
        self._timed = Timed(self._model.numerics)
        self._model = dataclasses.replace(self._model, numerics=self._timed)
        return versions

    def _time_step(self, engine: Engine) -> dict[str, float]:
        self._timed.seconds.clear()
        whole = super()._time_step(engine)["seconds"]
        names = PARTS if self._model.config.mixture is None else PARTS | ROUTING
        parts = {part: self._timed.seconds[part] for part in names}
        return {"seconds": whole, **parts, REST: whole - sum(parts.values())}
