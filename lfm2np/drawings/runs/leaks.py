"""One ragged step, sound and with the isolation between requests broken in just this step: the real wrong numbers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.engine.engine import Engine
from lfm2np.faults import inject
from lfm2np.loading import Model
from lfm2np.network.step import forward
from lfm2np.sampling.params import SamplingParams
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


def leak(model: Model, prompts: Mapping[str, str], budget: int, words: Mapping[int, str]) -> Leak:
    """All but the last prompt begin in a first step of `budget` tokens; the last comes with the second, which is shown.

    It has a decode, the rest of a prompt, and a whole prompt.
    """
    found: dict[str, Mapping[str, NDArray[Any]]] = {}
    shares: tuple[Share, ...] = ()
    for what in (SOUND, *BROKEN):
        engine, plan = second_step(model, prompts, budget)
        with inject(BROKEN[what]) if what in BROKEN else nullcontext():
            found[what] = dict(forward(model.weights, model.config, model.numerics, engine.cache, plan).logits)
        shares = tuple(
            Share(
                entry.request_id,
                tuple(engine.scheduler.requests[entry.request_id].token_ids[: entry.stop]),
                entry.start,
                entry.stop,
            )
            for entry in plan.scheduled
        )
    return Leak(shares, model.config.conv_L_cache, found, words)


def second_step(model: Model, prompts: Mapping[str, str], budget: int) -> tuple[Engine, BatchPlan]:
    engine = Engine(model, num_blocks=64, prefix_caching=False, max_num_batched_tokens=budget)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    *early, late = prompts
    for name in early:
        engine.add_request(name, prompts[name], params)
    engine.step()
    engine.add_request(late, prompts[late], params)
    return engine, engine.scheduler.schedule()
