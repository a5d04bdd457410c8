"""Engines for the tests: lfm2np's own, in the formats of ordinary engines, by the conformance protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from faults import Edit, Fault

from lfm2np.arithmetic.ieee import Ieee, unchanged
from lfm2np.arithmetic.matrix import Matrix
from lfm2np.checkpoint.files import read_tensors
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.engine.loading import Model, load
from lfm2np.oracle.check import Checked, judged
from lfm2np.oracle.engines.protocol import Factory
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Answer, Pair, Request, Trace
from lfm2np.oracle.engines.target import Abilities, Played, Target
from lfm2np.oracle.judging.constants import SOFT_CAP, Change, directions, with_scaled_queries
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.sending import send_all
from lfm2np.oracle.workloads import Writer, rounds
from lfm2np.suite.adapters import Own

PLENTY = {"num_blocks": 400}


@cache
def loaded(model: str, form: str = "exact") -> Model:
    """Loaded once: a check starts an engine for every round of requests."""
    return load(Path(model), form)


def planted(where: str, old: str, new: str) -> Fault:
    """A fault that is in no catalogue."""
    return Fault(new, "E", new, (), (Edit(where, old, new),))


def own(form: str, **steps: int) -> Factory:
    """Our engine in a format, with these sizes where no others are asked for."""
    return lambda model, sizes: Own(loaded(model, form), {**PLENTY, **steps, **sizes})


SMALL_STEPS = {"block_size": 8, "max_num_batched_tokens": 32, "max_num_seqs": 4}
float32, bfloat16 = own("float32"), own("bfloat16")
chunked = own("float32", block_size=4, max_num_batched_tokens=24)  # so that short prompts cross blocks and chunks
small_steps = own("float64", **SMALL_STEPS)
few_window_blocks = own("float64", **SMALL_STEPS, num_window_blocks=7)  # which are used again and again


def other_model(form: str, change: Callable[[Model], dict[str, Any]]) -> Factory:
    """An engine of which some fields of the loaded model are others."""

    def make(model: str, sizes: dict[str, Any]) -> Own:
        right = loaded(model, form)
        return Own(replace(right, **change(right)), {**PLENTY, **sizes})

    return make


def changed_by(name: str, much: Change | None = None) -> Factory:
    """In float32; a constant is as changed as the search for it tries, or this much."""

    def change(right: Model) -> dict[str, Any]:
        direction = next(each for each in directions(right.config) if each.name == name)
        weights, config = (much or direction.change)(right.weights, right.config)
        numerics = right.numerics if direction.arithmetic is None else direction.arithmetic(right.numerics)
        return {"weights": weights, "config": config, "numerics": numerics}

    return other_model("float32", change)


small_eps = other_model("float32", lambda right: {"config": replace(right.config, norm_eps=1e-6)})
# By 3 %, in bfloat16: no token and no log-probability shows it by itself.
large_theta = other_model("bfloat16", lambda right: {"config": replace(right.config, rope_theta=1.03e6)})
scaled_attention, scaled_routing = changed_by("the scale of attention"), changed_by("the scale of routing")
small_attention, soft_capped = changed_by("the scale of attention", with_scaled_queries(0.7)), changed_by(SOFT_CAP)


@dataclass(frozen=True)
class Coarse(Ieee):
    """float32, of which one thing is rounded: the inputs of products, or their outputs, or the residual stream."""

    rounded: Callable[[Any], Any] = unchanged
    what: str = "outputs"

    def linear(self, x: Any, matrix: Matrix, bias: Any = None) -> Any:
        products = super().linear(self.rounded(x) if self.what == "inputs" else x, matrix, bias)
        return self.rounded(products) if self.what == "outputs" else products

    def add(self, x: Any, y: Any) -> Any:
        return self.rounded(x + y) if self.what == "residual" else x + y


def coarse(rounded: Callable[[Any], Any], what: str) -> Factory:
    numerics = Coarse("float32", np.float32, 4, unchanged, rounded, what)
    return other_model("float32", lambda right: {"numerics": numerics})


def noisy(share: float) -> Factory:
    """In float32, all matrices off by random numbers of so much of their standard deviation."""

    def change(right: Model) -> dict[str, Any]:
        random = np.random.default_rng(5)

        class Noisy(Ieee):
            def prepare_matrix(self, weight: Any, what: str) -> Matrix:
                noise = random.normal(size=weight.shape) * np.std(weight) * share
                return super().prepare_matrix(np.asarray(weight + noise, np.float32), what)

        numerics = Noisy("float32", np.float32, 4, unchanged)
        return {"weights": prepare_weights(read_tensors(right.path, right.config), right.config, numerics)}

    return other_model("float32", change)


class Kept(PythonTarget):
    """A right engine, which computes the same requests together once a session. Not for where a fault is injected."""

    known: ClassVar[dict[str, Played]] = {}

    def _played(self, trace: Trace, abilities: Abilities) -> Played:
        key = repr((self._name, self._model, self._sizes, self._accepted, abilities.at_once, trace))
        if key not in self.known:
            self.known[key] = super()._played(trace, abilities)
        return self.known[key]


class Changed(Kept):
    """Our own engine in float32, of whose answers something is left out or changed."""

    def __init__(self, model: Model, change: Callable[[Request, Answer], Answer], at_once: int = 4) -> None:
        super().__init__("engines:float32", model.path, at_once=at_once)
        self.change = change

    def play(self, trace: Trace) -> Played:
        played = super().play(trace)
        answers = tuple(
            tuple(self.change(request, answer) for answer in some)
            for request, some in zip(trace.requests, played.answers, strict=True)
        )
        return replace(played, answers=answers)


def answered(target: Target, requests: Sequence[Request]) -> list[Pair]:
    """Their answers, sent together."""
    trace = Trace(tuple(requests))
    return target.play(trace).pairs(trace)


def told(model: Model, engine: str, cases: Sequence[str] = ("short-prompts",)) -> list[Pair]:
    """What a right engine says of all requests of some cases, one after another."""
    target = Kept(engine, model.path)
    target.probe()
    requests = [request for trace in rounds(Writer(model.config, None, 1), cases) for request in trace.requests]
    return [pair for request in requests for pair in answered(target, [request])]


QUICK = ("short-prompts", "neighbours")  # cases


@cache
def known_of(model: Model) -> Known:
    """What any check of this model scored. An injected fault may not be of what scores."""
    return Known()


def checked_target(
    model: Model, target: Target, form: str = "float32", cases: Sequence[str] = QUICK, at_once: int | None = 4
) -> Checked:
    """`check` without repeats and without a transcript, which scores nothing a second time."""
    asked = send_all(model, target, at_once, cases=cases)
    return judged(model, asked.abilities, form, asked.pairs, asked.not_put, known=known_of(model))


def checked(
    model: Model, engine: str, form: str = "float32", cases: Sequence[str] = QUICK, at_once: int = 4
) -> Checked:
    """A check of one of these."""
    return checked_target(model, PythonTarget(f"engines:{engine}", model.path), form, cases, at_once)


@cache
def checked_right(model: Model, form: str) -> Checked:
    """A check of the right engine of a format."""
    return checked_target(model, Kept(f"engines:{form}", model.path), form)
