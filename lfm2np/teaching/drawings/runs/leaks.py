"""One ragged step, sound and with the isolation between requests broken in just this step: the real wrong numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.engine.engine import Engine
from lfm2np.engine.loading import Model
from lfm2np.engine.step import forward
from lfm2np.teaching.drawings.runs.recorded import Coming
from lfm2np.teaching.faults import inject
from scheduler import BatchPlan

SOUND = "sound"
CONVOLUTION, ATTENTION = "the convolution crosses requests", "attention crosses requests"
BROKEN = {CONVOLUTION: "convolution-crosses-requests", ATTENTION: "attention-crosses-requests"}


@dataclass(frozen=True)
class Share:
    """One request's rows of the step: the tokens at start to stop - 1; what is before start is cached."""

    name: str
    token_ids: tuple[int, ...]  # of all positions before stop
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Leak:
    """The step, and by what was broken and request the logits [rows, V] of its rows."""

    shares: tuple[Share, ...]
    taps: int
    logits: Mapping[str, Mapping[str, NDArray[Any]]]
    words: Mapping[int, str]

    def changed(self, what: str, name: str) -> list[bool]:
        """Which of a request's rows have other logits than in the sound step."""
        sound, broken = self.logits[SOUND][name], self.logits[what][name]
        return [bool(np.any(a != b)) for a, b in zip(sound, broken, strict=True)]


def leak(model: Model, coming: Sequence[Coming], step: int, words: Mapping[int, str], **sizes: Any) -> Leak:
    """Of these requests, on an engine of these sizes, the step of that number, counted from 0."""
    logits: dict[str, Mapping[str, NDArray[Any]]] = {}
    shares: tuple[Share, ...] = ()
    for what in (SOUND, *BROKEN):
        engine, plan = before_step(model, coming, step, **sizes)
        with inject(BROKEN[what]) if what in BROKEN else nullcontext():
            logits[what] = dict(forward(model.weights, model.config, model.numerics, engine.cache, plan).logits)
        ids = {name: request.token_ids for name, request in engine.scheduler.requests.items()}
        shares = tuple(
            Share(entry.request_id, tuple(ids[entry.request_id][: entry.stop]), entry.start, entry.stop)
            for entry in plan.scheduled
        )
    return Leak(shares, model.config.conv_L_cache, logits, words)


def before_step(model: Model, coming: Sequence[Coming], step: int, **sizes: Any) -> tuple[Engine, BatchPlan]:
    """An engine that has computed so many steps, and the plan of the next. All rows of a prompt get logits."""
    engine = Engine(model, prefix_caching=False, **sizes)
    for number in range(step + 1):
        for request in coming:
            if request.arrival == number:
                params = replace(request.params, n=1, prompt_logprobs=0)
                engine.add_request(request.request_id, request.prompt, params)
        if number < step:
            engine.step()
    return engine, engine.scheduler.schedule()
