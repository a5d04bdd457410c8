"""The noise model: what it says a format may do is what engines of that format do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threads import threads
from truths import truth_of

import lfm2np
from lfm2np.arithmetic.ieee import FLOAT32
from lfm2np.checkpoint.stored import widen
from lfm2np.engine.loading import Model
from lfm2np.errors import NumericsError
from lfm2np.oracle.judging.allowed import FLOAT32_UNITS, Allowed
from lfm2np.oracle.judging.emulate import ROTARY_UNITS, emulated, quantised
from lfm2np.oracle.judging.formats import FORMATS
from lfm2np.oracle.judging.noise import LEAST, Noise, allowed_by, noise_of, said_by, spread_of
from lfm2np.oracle.judging.truth import Spoken, Truth, spoken_truths
from lfm2np.oracle.judging.verdict import LIMIT, SPREAD, root_mean_square
from lfm2np.truth import reference, rope

pytestmark = [pytest.mark.rounding, pytest.mark.slow]

TORTURE = sorted((Path(__file__).parents[3] / "fixtures" / "torture").iterdir())
IDS = tuple(int(integer) for integer in np.random.default_rng(3).integers(8, 60, 40))


def ratios(model: Model, name: str, engine: Model) -> list[float]:
    """The differences of another arithmetic, in units of the noise, at every position and every eighth column."""
    truth = truth_of(model, IDS, {})
    (noise,) = noise_of(model, [truth], name)
    rows = reference.logits(engine.weights, engine.config, engine.numerics, IDS[:-1])
    errors = np.take_along_axis(engine.numerics.log_softmax(rows), truth.columns, axis=1) - truth.logprobs
    return np.ravel((errors / noise.scales(truth))[:, ::8]).tolist()


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("directory", [None, *TORTURE[:3]], ids=str)
def test_a_right_engine_is_about_as_far_off_as_its_format_says(directory: Path | None, name: str) -> None:
    errors = ratios(lfm2np.load(directory), name, lfm2np.load(directory, name))
    assert 0.1 < root_mean_square(errors) < 2.5  # by the kernels, 0.34 to 1.3
    assert max(map(abs, errors)) < LIMIT


def test_a_coarser_format_is_far_beyond_the_noise_of_a_finer_one(model: Model) -> None:
    assert root_mean_square(ratios(model, "float32", lfm2np.load(None, "bfloat16"))) > 100 * LIMIT


@pytest.mark.parametrize("name", [one for one in FORMATS if one != "w8a8"])  # of checkpoints that tell how
def test_engines_that_were_not_drawn_for_it_stay_within_the_noise(model: Model, name: str) -> None:
    truth = truth_of(model, IDS, {})
    (noise,) = noise_of(model, [truth], name)
    for draw in (8, 13):
        (other,) = noise_of(model, [truth], name, draws=(draw,))
        (errors,) = other.errors
        scaled = np.ravel((errors / noise.scales(truth))[:, ::8]).tolist()
        assert 0.3 < root_mean_square(scaled) < 2.0
        assert max(map(abs, scaled)) < LIMIT


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_noise_of_a_sequence_is_about_the_same_beside_others(model: Model, name: str) -> None:
    truths = spoken_truths(model, {Spoken(ids): {} for ids in (IDS[:9], IDS, IDS[5:30])})
    for truth, beside in zip(truths, noise_of(model, truths, name), strict=True):
        (alone,) = noise_of(model, [truth], name)
        assert beside.errors.shape == alone.errors.shape == (8, len(truth.token_ids) - 1, truth.columns.shape[1])
        ratio = beside.spread / alone.spread
        assert 0.6 < np.median(ratio) < 1.6  # of eight positions and more; by the kernels, 0.88 to 1.14
        assert (ratio > 0.2).all()
        assert (ratio < 5).all()


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9), st.sampled_from([1e4, 1e6]), st.integers(0, 7))
def test_frequencies_are_some_units_of_float32_off(positions: list[int], theta: float, draw: int) -> None:
    """Whatever the order of positions: those that several sequences share are computed once."""
    rows, engine = np.array(positions), emulated("float32", 0, draw)
    cos, sin = engine.rotary_table(rows, 16, rope.Rope(theta))
    wanted = rope.angles(rows, 16, rope.Rope(theta)).astype(np.float64) * (1.0 + engine.frequency_errors[:8])
    assert np.abs(cos - np.cos(wanted)).max() < 1e-9 and np.abs(sin - np.sin(wanted)).max() < 1e-9
    assert 0 < np.abs(engine.frequency_errors).max() <= ROTARY_UNITS * 2.0**-24


@given(st.integers(1, 90), st.integers(0, 1000))
def test_quantised_weights_are_off_by_less_than_a_step_of_their_group(inputs: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    weight = random.normal(size=(3, inputs)).astype(np.float32)
    form = FORMATS["int4"]
    rounded = quantised(weight, form, lambda block: np.random.default_rng([seed, block]))
    for start in range(0, inputs, form.group):
        group = weight[:, start : start + form.group]
        step = np.abs(group).max(axis=1, keepdims=True) / form.levels
        assert (np.abs(rounded[:, start : start + form.group] - group) <= step * 1.001).all()


@pytest.mark.parametrize(("count", "least"), [(2, 1), (3, 900)])
def test_no_bit_of_the_truth_depends_on_the_number_of_threads(
    monkeypatch, model: Model, count: int, least: int
) -> None:
    ids, wanted = tuple(range(3, 40)), {row: {7, 2 * row} for row in range(5, 36, 3)}
    alone = truth_of(model, ids, wanted)
    monkeypatch.setattr("lfm2np.oracle.judging.truth.LOGITS_AT_ONCE", 5 * model.config.vocab_size)
    with threads(count, least):
        truth = truth_of(model, ids, wanted)
    assert alone.known_rows.tolist() == sorted(wanted)
    for name in ("columns", "logprobs", "best", "squares", "largest"):
        assert getattr(truth, name).tobytes() == getattr(alone, name).tobytes(), name


def test_a_token_that_was_not_looked_at_is_no_number(model: Model) -> None:
    truth = truth_of(model, IDS[:4], {})
    with pytest.raises(KeyError):
        truth.at(0, next(token for token in range(model.config.vocab_size) if token not in truth.columns[0]))


def item_of(ids: Sequence[int]) -> dict[str, Any]:
    rows = np.arange(len(ids) - 1)
    return {"token_ids": list(ids), "rows": rows, "columns": np.zeros((len(rows), 1), np.int64), "routes": None}


def test_an_overflow_in_one_sequence_of_a_pass_is_no_noise(model: Model) -> None:
    """A token that only the second sequence has is beyond what float32 holds."""
    weights = lfm2np.load(None, "float32").weights
    values = widen(weights.embedding.values, weights.embedding.dtype)
    values[IDS[0]] = np.inf
    weights = replace(weights, embedding=replace(weights.embedding, values=values, dtype="F32"))
    items = [item_of([token_id for token_id in IDS if token_id != IDS[0]]), item_of(IDS)]
    said_by(model, weights, FLOAT32, items[:1])
    with pytest.raises(NumericsError, match="finite"):
        said_by(model, weights, FLOAT32, items)


def test_a_format_that_cannot_hold_the_numbers_is_named(model: Model) -> None:
    weights = replace(model.weights, final_norm=model.weights.final_norm * np.float32(1e38))
    with pytest.raises(NumericsError, match=r"overflow|finite"):
        said_by(model, weights, model.numerics, [item_of(IDS[:6])])


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.sampled_from([8, 11, 24]))
def test_what_is_allowed_is_what_the_formulas_say(seed: int, draws: int, bits: int) -> None:
    """All rows at once, against one number after the other."""
    random = np.random.default_rng(seed)
    p = random.dirichlet(np.full(6, 0.5), 3)
    logprobs, largest = np.log(p), random.uniform(0.1, 40.0, 3)
    errors = (random.normal(size=(draws, 3, 6)) * 2.0 ** -random.uniform(0, 20)).astype(np.float32)
    best, ids = np.argmax(p, axis=1), np.tile(np.arange(10, 16), (3, 1))
    truth = Truth(Spoken((1,) * 4), ids, logprobs, best + 10, (p * p).sum(1), largest, 6)
    noise = Noise(tuple(range(draws)), errors, spread_of(errors))
    for row, allowed in allowed_by(truth, noise, bits).items():
        first = int(best[row])
        exponent = math.floor(math.log2(largest[row])) + 1
        unit = 2.0 ** (exponent - bits) + FLOAT32_UNITS * 2.0 ** (exponent - 24)
        assert allowed.unit == unit and allowed.best == first + 10 and allowed.shift == 6 * 2.0**-25
        tau = float(noise.spread[row]) ** 2
        ratios = []
        for column in range(6):
            others = sum(p[row, other] ** 2 for other in range(6) if other != column)
            variance = sum(float(value) ** 2 for value in errors[:, row, column]) / draws
            scale = math.sqrt((variance + tau * ((1 - p[row, column]) ** 2 + others)) / 2)
            assert allowed.scales[column] == pytest.approx(max(LEAST, scale), rel=1e-6)
            apart = (errors[:, row, column].astype(float) - errors[:, row, first].astype(float)).tolist()
            gap_scale = max(LEAST, math.sqrt((sum(value * value for value in apart) / draws + 2 * tau) / 2))
            gap = float(logprobs[row, first] - logprobs[row, column])
            ratios.append(max(0.0, gap - unit) / gap_scale)
            assert allowed.leads[column] == pytest.approx(ratios[-1], rel=1e-6)
        chances = [0.5 * math.erfc(ratios[column] / (SPREAD * math.sqrt(2))) for column in range(6) if column != first]
        assert allowed.flip_chance == pytest.approx(min(1.0, sum(chances)), rel=1e-5, abs=1e-300)
        second = max((token_id for token_id in range(6) if token_id != first), key=lambda token_id: p[row, token_id])
        assert allowed.runner_up == pytest.approx(ratios[second], rel=1e-6)


def test_a_certain_token_has_a_scale_to_divide_by(model: Model) -> None:
    truth = truth_of(model, IDS[:4], {})
    (noise,) = noise_of(model, [truth], "float32", draws=(0,))
    certain = replace(truth, logprobs=np.zeros_like(truth.logprobs), squares=np.ones_like(truth.squares))
    silent = replace(noise, errors=np.zeros_like(noise.errors), spread=np.zeros_like(noise.spread))
    assert (silent.scales(certain) > 0.0).all()
    assert (silent.gap_scales(np.zeros(len(certain.best), np.int64)) > 0.0).all()


@pytest.mark.parametrize("token_id", [0, 5, 9])
def test_a_token_that_is_not_among_the_known_ones_has_no_column(token_id: int) -> None:
    """Before, between and behind them: another's bound would be taken for its own."""
    values = np.zeros(2)
    allowed = Allowed(3, np.array([3, 7]), values, values, values, 1.0, 0.0)
    assert (allowed.at(3), allowed.at(7)) == (0, 1)
    with pytest.raises(KeyError):
        allowed.at(token_id)
