"""Golden vectors of a mixture of experts: made, verified, and fair to engines whose rounding chooses other experts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from test_vectors_answers import emulated_answers, played, verdict
from vector_sets import FIXTURES

from lfm2np.engine.loading import Model, load
from lfm2np.oracle import vectors_plain
from lfm2np.oracle.vectors.golden import make, verify
from lfm2np.oracle.vectors.set_files import document_text, read_set
from lfm2np.truth.weights import MixtureWeights

pytestmark = pytest.mark.rounding

SOME = ("short-2-text", "border-15", "border-16", "decode-32", "beside-3")  # and all beside it


@cache
def published() -> Model:
    return load(FIXTURES / "torture" / "moe_published")


@cache
def some() -> dict[str, Any]:
    return make(published(), only=SOME)


def without_bias(model: Model) -> Model:
    """An engine that forgets the bias by which experts are chosen."""
    layers = [
        replace(layer, feed_forward=replace(layer.feed_forward, bias=None))
        if isinstance(layer.feed_forward, MixtureWeights)
        else layer
        for layer in model.weights.layers
    ]
    return replace(model, weights=replace(model.weights, layers=tuple(layers)))


def test_a_set_is_written_and_verifies(tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text(document_text(some()))
    known = read_set(tmp_path / "set.json")
    assert verify(published(), known) == []
    assert verify(load(published().path, weights="streamed"), known) == []


def test_the_engine_run_as_the_schedules_say_answers_right() -> None:
    judged = vectors_plain.judge(some(), played(published(), some()), "float32")
    assert {judgement.verdict for judgement in judged} == {"EXACT"}


@pytest.mark.parametrize(("format_name", "draw"), [("float32", 4), ("bfloat16", 3), ("float16", 4)])
def test_right_engines_that_choose_their_own_experts_are_not_wrong(format_name: str, draw: int) -> None:
    answers = emulated_answers(published(), some(), format_name, draw)
    assert verdict(some(), answers, format_name) != 1


def test_an_engine_without_the_experts_bias_is_wrong_in_float32() -> None:
    answers = played(without_bias(published()), some())
    assert verdict(some(), answers, "float32") == 1
