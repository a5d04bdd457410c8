"""Engines for the tests: lfm2np's own, in the formats of ordinary engines, by the conformance protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from lfm2np.conformance.adapters import Own
from lfm2np.loading import Model, load
from lfm2np.oracle.check import Checked, check
from lfm2np.oracle.targets.python_target import PythonTarget

PLENTY = {"num_blocks": 400}


def float32(model: str, sizes: dict[str, Any]) -> Own:
    return Own(load(Path(model), "float32"), {**PLENTY, **sizes})


def bfloat16(model: str, sizes: dict[str, Any]) -> Own:
    return Own(load(Path(model), "bfloat16"), {**PLENTY, **sizes})


def chunked(model: str, sizes: dict[str, Any]) -> Own:
    """In float32, with blocks and chunks small enough for short prompts to cross them."""
    return Own(load(Path(model), "float32"), {**PLENTY, "block_size": 4, "max_num_batched_tokens": 24, **sizes})


def other_constant(model: str, sizes: dict[str, Any], form: str, **changed: Any) -> Own:
    """An engine that takes some numbers of the config for others."""
    loaded = load(Path(model), form)
    return Own(replace(loaded, config=replace(loaded.config, **changed)), {**PLENTY, **sizes})


def small_eps(model: str, sizes: dict[str, Any]) -> Own:
    return other_constant(model, sizes, "float32", norm_eps=1e-6)


def large_theta(model: str, sizes: dict[str, Any]) -> Own:
    """By 3 %, in bfloat16: no token and no log-probability shows it by itself."""
    return other_constant(model, sizes, "bfloat16", rope_theta=1.03e6)


class Roomy(Own):
    """Reports that it computes 24 requests together."""

    sizes: ClassVar = {"max_num_seqs": 24}


def roomy(model: str, sizes: dict[str, Any]) -> Roomy:
    return Roomy(load(Path(model), "float32"), {**PLENTY, **Roomy.sizes, **sizes})


def small_steps(model: str, sizes: dict[str, Any]) -> Own:
    """Exact, in blocks of 8 tokens and steps of 32."""
    steps = {"block_size": 8, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    return Own(load(Path(model)), {**PLENTY, **steps, **sizes})


QUICK = ("short-prompts", "neighbours")  # cases


def checked(
    model: Model, engine: str, form: str = "float32", cases: Sequence[str] = QUICK, at_once: int = 4
) -> Checked:
    """A check of one of these."""
    target = PythonTarget(f"engines:{engine}", model.path)
    return check(model, target, form, at_once=at_once, cases=cases)
