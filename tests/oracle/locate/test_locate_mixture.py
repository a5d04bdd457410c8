"""`locate` on mixtures of experts: right engines have no finding, and a wrong choice is told in words. Faults of their
operations are in test_locate_faults.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from builders import BARE, MIXTURES, PLAIN, SCALED, SPARSE, mixture
from dumps import Recorded, checkpoint, dump_of, located, recorded_under, report_of, rows_of
from hypothesis import given
from hypothesis import strategies as st

import lfm2np
from lfm2np.arithmetic.ieee import FLOAT32
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.engine.loading import Model
from lfm2np.oracle.judging import emulate
from lfm2np.oracle.locate import choice
from lfm2np.oracle.locate.choice import NOBODY
from lfm2np.oracle.locate.locate import locate
from lfm2np.oracle.locate.spread import LIMIT, Measured
from lfm2np.oracle.recorders.lfm2np_recorder import record

pytestmark = [pytest.mark.rounding, pytest.mark.slow]

SCORES, CHOSEN, WEIGHTS, OUTPUTS = (
    f"{SPARSE}.{part}" for part in ("scores", "experts_chosen", "expert_weights", "expert_outputs")
)
FLOATS = ("float32", "float16", "bfloat16")
IDS = np.random.default_rng(0).integers(0, 64, 24).tolist()

# --- right engines


def without(recorded: Recorded, *ends: str) -> Recorded:
    return {name: value for name, value in recorded.items() if not name.endswith(ends)}


PARTS: dict[str, Callable[[Recorded], Recorded]] = {
    "all": lambda recorded: recorded,
    "as transformers shows": lambda recorded: without(recorded, ".feed_forward.scores", "outputs"),
    "no choice": lambda recorded: without(recorded, "chosen"),
    "router hidden": lambda recorded: without(recorded, "chosen", "_weights", "_outputs", ".scores", ".gate"),
    "blocks": lambda recorded: {name: value for name, value in recorded.items() if name.count(".") in (0, 2)},
}


@pytest.mark.parametrize("format_name", FLOATS)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_right_engine_of_any_format_stays_within_the_bounds(name: str, format_name: str) -> None:
    """Also where its rounding has moved tokens to other experts, and where that has to be guessed."""
    recorded = {draw: recorded_under(mixture(name), emulate.emulated(format_name, 1, draw)) for draw in (1, 6)}
    for (part, seen), draw in zip(PARTS.items(), itertools.cycle(recorded), strict=False):
        report = report_of(mixture(name), seen(recorded[draw]), format_name)
        assert report.findings == (), part
        assert max(check.error for check in report.checks) < 0.9, part
        assert part == "no choice" or not any(check.is_blunt for check in report.checks), part


@pytest.mark.parametrize(("run", "request_id"), [("in chunks", "a"), ("with neighbours", "a"), ("after a hit", "b")])
@pytest.mark.parametrize("numerics", ["exact", "float32"])
def test_an_engines_steps_are_right_whichever_requests_share_an_expert(
    run: str, request_id: str, numerics: str
) -> None:
    model = lfm2np.load(mixture(PLAIN), numerics)
    recorded = rows_of(model, run, request_id)
    report = located(model, recorded)
    assert report.findings == ()
    assert {name.rpartition(".")[2] for name in recorded} >= {"experts_chosen", "expert_outputs", "mixed"}
    assert "lm_head" not in recorded


class Changed:
    """An arithmetic with other methods for some."""

    def __init__(self, numerics: Any, **methods: Callable[..., Any]) -> None:
        self._numerics = numerics
        self.__dict__.update({name: partial(method, numerics) for name, method in methods.items()})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._numerics, name)


def test_an_engine_that_adds_nothing_to_the_sum_of_its_weights_is_right() -> None:
    """As vLLM; LFM2 adds 1e-6, which is 30 times what float32 may lose there."""

    def shares(numerics: Any, scores: Any, normalised: bool, factor: float) -> Any:
        return scores / scores.sum(-1, keepdims=True) * np.float32(factor)

    config, tensors = checkpoint(mixture(SCALED))
    model = Model(
        mixture(SCALED), config, Changed(FLOAT32, routing_weights=shares), prepare_weights(tensors, config, FLOAT32)
    )
    report = report_of(mixture(SCALED), record(model, IDS), "float32")
    assert report.findings == ()
    assert 0.2 < next(check.error for check in report.checks if check.name == WEIGHTS) < 0.7


# --- the choice


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([8, 1], "routed to expert 8, expected one of 0 to 7"),
        ([-1, 1], "routed to expert -1, expected one of 0 to 7"),
        ([1, 1], "routed to expert 1 twice"),
    ],
)
def test_ids_of_no_expert_and_of_one_twice_are_found(ids: list[int], words: str) -> None:
    """And hide nothing behind them."""
    recorded = {name: value.copy() for name, value in recorded_under(mixture(PLAIN), FLOAT32).items()}
    recorded[CHOSEN][3] = ids
    recorded["lm_head"][5, 5] += 1.0
    names = [finding.name for finding in report_of(mixture(PLAIN), recorded, "float32").findings]
    first = report_of(mixture(PLAIN), recorded, "float32").findings[0]
    assert names == [CHOSEN, "lm_head"]
    assert (first.choice, first.error) == (words, np.inf)


def test_a_near_tie_that_went_the_other_way_is_right_and_what_follows_is_judged_by_it() -> None:
    """Two experts with the same weights of the router: their scores are equal."""
    config, tensors = checkpoint(mixture(BARE))
    twins = dict(tensors)
    for layer in (1, 2):
        stored = tensors[f"model.layers.{layer}.feed_forward.gate.weight"]
        gate = stored.values.copy()
        gate[3] = gate[6]
        twins[stored.name] = replace(stored, values=gate)
    weights = prepare_weights(twins, config, FLOAT32)

    def other(numerics: Any, preferred: Any, count: int) -> Any:
        chosen = numerics.top_k(preferred, count)
        return np.where(chosen == 3, 6, chosen)

    for methods in ({}, {"top_k": other}):
        recorded = record(Model(mixture(BARE), config, Changed(FLOAT32, **methods), weights), IDS)
        assert (3 in recorded[CHOSEN], 6 in recorded[CHOSEN]) == ((False, True) if methods else (True, False))
        for part in PARTS.values():
            assert locate(twins, config, dump_of(part(recorded), "float32"), "float32").findings == ()


@pytest.mark.parametrize("part", ["all", "as transformers shows"])
def test_the_order_of_the_chosen_does_not_matter(part: str) -> None:
    recorded = {name: value.copy() for name, value in recorded_under(mixture(SCALED), FLOAT32).items()}
    turned = np.argsort(np.random.default_rng(3).random(recorded[CHOSEN].shape), axis=-1)
    recorded[CHOSEN] = np.take_along_axis(recorded[CHOSEN], turned, axis=-1)
    recorded[WEIGHTS] = np.take_along_axis(recorded[WEIGHTS], turned, axis=-1)
    outputs = recorded[OUTPUTS].reshape(24, 3, 32)
    recorded[OUTPUTS] = np.take_along_axis(outputs, turned[..., None], axis=1).reshape(24, -1)
    assert report_of(mixture(SCALED), PARTS[part](recorded), "float32").findings == ()


# --- chosen experts against what they are preferred by, and whose numbers are wrong, in words


NOISE = 0.01  # of each score
BOUND = LIMIT * NOISE * np.sqrt(2.0)


def scored(*rows: list[float]) -> Measured:
    return Measured(np.array(rows), np.full((len(rows), len(rows[0])), NOISE))


@pytest.mark.parametrize(("apart", "is_wrong"), [(0.99 * BOUND, False), (1.01 * BOUND, True)])
@pytest.mark.parametrize("order", [[1, 0], [0, 1]])
def test_what_is_farther_apart_than_four_times_the_noise_is_no_tie(
    apart: float, is_wrong: bool, order: list[int]
) -> None:
    judgement = choice.judged(np.array([[0, 3]])[:, order], scored([0.9, 0.5, 0.1, 0.5 - apart]))
    place = order.index(1)
    assert judgement.errors[0, place] == pytest.approx(apart / BOUND)
    assert (judgement.errors[0] > 1.0).tolist() == [is_wrong and row == place for row in range(2)]
    assert (judgement.instead[0, place], judgement.instead[0, 1 - place]) == (1, NOBODY)


@given(st.integers(0, 2**32 - 1), st.integers(1, 8))
def test_whatever_noise_chooses_is_right_and_was_in_doubt(seed: int, count: int) -> None:
    """Scores that are moved by up to their noise: no choice by them is wrong, nor one that it was thought sure of."""
    random = np.random.default_rng(seed)
    measured = Measured(random.integers(0, 12, (6, 8)) / 100.0, 0.02 * random.random((6, 8)))
    moved = measured.values + measured.spread * random.uniform(-1.0, 1.0, (6, 8))
    ids = np.argsort(-moved, axis=-1, kind="stable")[:, :count]
    assert choice.judged(random.permuted(ids, axis=1).astype(float), measured).errors.max() <= 1.0
    expected = choice.best(measured, count)
    assert not ((expected.values != ids) & (expected.spread == 0.0)).any()


@pytest.mark.parametrize(
    ("row", "is_open"),
    [([0.5, 0.5, 0.3, 0.1], True), ([0.9, 0.5, 0.5, 0.1], True), ([0.9, 0.8, 0.5, 0.5], False)],
)
def test_a_token_whose_experts_or_their_order_are_open_is_not_judged(row: list[float], is_open: bool) -> None:
    """The best two, or the second and the third; not those behind."""
    assert choice.best(scored(row, [0.9, 0.8, 0.5, 0.1]), 2).spread.any(axis=1).tolist() == [is_open, False]


WHOSE = np.array([[5, 1], [1, 2], [5, 0], [2, 0]])


@pytest.mark.parametrize(
    ("wrong", "by_place", "text"),
    [
        ([[1, 0], [0, 0], [1, 0], [0, 0]], True, "expert 5: all 2 rows that chose it"),
        ([[1, 0], [0, 0], [0, 0], [0, 0]], True, "expert 5: 1 of 2 rows that chose it"),
        ([[1, 1], [0, 0], [1, 0], [0, 0]], True, "experts 1, 5 of 8"),
        ([[1, 1], [1, 1], [1, 1], [1, 1]], True, ""),
        ([[1], [0], [1], [0]], False, "expert 5: all 2 rows that chose it"),
        ([[0], [0], [1], [0]], False, "expert 0: 1 of 2 rows that chose it"),
        ([[1], [1], [1], [1]], False, ""),
        ([[1], [0], [0], [1]], False, ""),
    ],
)
def test_whose_numbers_are_wrong_in_words(wrong: list[list[int]], by_place: bool, text: str) -> None:
    """Of each place, or of their sum."""
    assert choice.describe_whose(np.array(wrong, bool), WHOSE, 8, by_place) == text
