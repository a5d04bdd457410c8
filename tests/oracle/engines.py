"""Engines for the tests: lfm2np's own, in the formats of ordinary engines, by the conformance protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lfm2np.arithmetic.ieee import Ieee, unchanged
from lfm2np.arithmetic.matrix import Matrix
from lfm2np.checkpoint.files import read_tensors
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.engine.loading import Model, load
from lfm2np.oracle.check import Checked, judged
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Answer, Pair, Request, Trace
from lfm2np.oracle.engines.target import Abilities, Played, Target
from lfm2np.oracle.judging.constants import SOFT_CAP, directions, with_scaled_queries
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.sending import send_all
from lfm2np.suite.adapters import Own

PLENTY = {"num_blocks": 400}


@cache
def loaded(model: str, form: str = "exact") -> Model:
    """Loaded once: a check starts an engine for every round of requests."""
    return load(Path(model), form)


def float32(model: str, sizes: dict[str, Any]) -> Own:
    return Own(loaded(model, "float32"), {**PLENTY, **sizes})


def bfloat16(model: str, sizes: dict[str, Any]) -> Own:
    return Own(loaded(model, "bfloat16"), {**PLENTY, **sizes})


def chunked(model: str, sizes: dict[str, Any]) -> Own:
    """In float32, with blocks and chunks small enough for short prompts to cross them."""
    return Own(loaded(model, "float32"), {**PLENTY, "block_size": 4, "max_num_batched_tokens": 24, **sizes})


def other_constant(model: str, sizes: dict[str, Any], form: str, **changed: Any) -> Own:
    """An engine that takes some numbers of the config for others."""
    right = loaded(model, form)
    return Own(replace(right, config=replace(right.config, **changed)), {**PLENTY, **sizes})


def small_eps(model: str, sizes: dict[str, Any]) -> Own:
    return other_constant(model, sizes, "float32", norm_eps=1e-6)


def large_theta(model: str, sizes: dict[str, Any]) -> Own:
    """By 3 %, in bfloat16: no token and no log-probability shows it by itself."""
    return other_constant(model, sizes, "bfloat16", rope_theta=1.03e6)


def changed_by(model: str, sizes: dict[str, Any], name: str) -> Own:
    """An engine in float32 of which a constant is as changed as the search for it tries."""
    right = loaded(model, "float32")
    direction = next(each for each in directions(right.config) if each.name == name)
    weights, config = direction.change(right.weights, right.config)
    numerics = right.numerics if direction.arithmetic is None else direction.arithmetic(right.numerics)
    return Own(replace(right, weights=weights, config=config, numerics=numerics), {**PLENTY, **sizes})


def scaled_attention(model: str, sizes: dict[str, Any]) -> Own:
    return changed_by(model, sizes, "the scale of attention")


def scaled_routing(model: str, sizes: dict[str, Any]) -> Own:
    return changed_by(model, sizes, "the scale of routing")


def small_attention(model: str, sizes: dict[str, Any]) -> Own:
    right = loaded(model, "float32")
    weights, config = with_scaled_queries(0.7)(right.weights, right.config)
    return Own(replace(right, weights=weights, config=config), {**PLENTY, **sizes})


def soft_capped(model: str, sizes: dict[str, Any]) -> Own:
    return changed_by(model, sizes, SOFT_CAP)


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


def coarse(rounded: Callable[[Any], Any], what: str, model: str, sizes: dict[str, Any]) -> Own:
    numerics = Coarse("float32", np.float32, 4, unchanged, rounded, what)
    return Own(replace(loaded(model, "float32"), numerics=numerics), {**PLENTY, **sizes})


def noisy(share: float, model: str, sizes: dict[str, Any]) -> Own:
    """In float32, all matrices off by random numbers of so much of their standard deviation."""
    right, random = loaded(model, "float32"), np.random.default_rng(5)

    class Noisy(Ieee):
        def prepare_matrix(self, weight: Any, what: str) -> Matrix:
            noise = random.normal(size=weight.shape) * np.std(weight) * share
            return super().prepare_matrix(np.asarray(weight + noise, np.float32), what)

    numerics = Noisy("float32", np.float32, 4, unchanged)
    weights = prepare_weights(read_tensors(right.path, right.config), right.config, numerics)
    return Own(replace(right, weights=weights), {**PLENTY, **sizes})


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


class Dying(Kept):
    """Interrupted at the trace after so many."""

    def __init__(self, engine: str, model: Model, traces: int) -> None:
        super().__init__(engine, model.path)
        self.traces, self.played = traces, 0

    def play(self, trace: Trace) -> Played:
        self.played += 1
        if self.played == self.traces + 1:
            raise KeyboardInterrupt
        return super().play(trace)


def answered(target: Target, requests: Sequence[Request]) -> list[Pair]:
    """Their answers, sent together."""
    trace = Trace(tuple(requests))
    return target.play(trace).pairs(trace)


def small_steps(model: str, sizes: dict[str, Any], form: str = "float64") -> Own:
    """In blocks of 8 tokens and steps of 32."""
    steps = {"block_size": 8, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    return Own(loaded(model, form), {**PLENTY, **steps, **sizes})


def exact_small_steps(model: str, sizes: dict[str, Any]) -> Own:
    return small_steps(model, sizes, "exact")


def few_window_blocks(model: str, sizes: dict[str, Any]) -> Own:
    """The same, with so few blocks for layers with a window that they are used again and again."""
    return small_steps(model, {"num_window_blocks": 7, **sizes})


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
