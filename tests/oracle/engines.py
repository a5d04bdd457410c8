"""Engines for the tests: lfm2np's own, in the formats of ordinary engines, by the conformance protocol."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from lfm2np.engine.loading import Model, load
from lfm2np.oracle.check import Checked, judged, request_all
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.oracle.engines.target import Target
from lfm2np.oracle.judging.scored import Known
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


class Kept(PythonTarget):
    """A right engine, which computes the same requests together once a session. Not for where a fault is injected."""

    known: ClassVar[dict[str, list[Answer]]] = {}

    def _together(self, requests: Sequence[Request], aborted: Collection[str], *more: Any) -> list[Answer]:
        key = repr((self._name, self._model, self._sizes, self._options, requests, sorted(aborted)))
        if key not in self.known:
            self.known[key] = super()._together(requests, aborted, *more)
        return list(self.known[key])


class Roomy(Own):
    """Reports that it computes 24 requests together."""

    sizes: ClassVar = {"max_num_seqs": 24}


def roomy(model: str, sizes: dict[str, Any]) -> Roomy:
    return Roomy(loaded(model, "float32"), {**PLENTY, **Roomy.sizes, **sizes})


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
    asked = request_all(model, target, at_once, cases=cases)
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
