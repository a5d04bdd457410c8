"""Sampling against a second implementation in Python's floats and fractions, which follows each engine literally.

`literal` below does one processor after another, in the order in which the engine has them, removes from below in
top_p as the engines do, and adds fractions. It shares nothing with lfm2np.engine.sampling.choice but `elementary.exp`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lfm2np.engine.sampling.choice import choose, distribution, draw, integer_weights, process, uniform
from lfm2np.engine.sampling.params import SamplingParams, bias_pairs, require_vocabulary
from lfm2np.errors import NumericsError, RequestError
from lfm2np.truth import elementary

EOS = (1,)
INF = math.inf
LARGE = 2.0**1000


def literal(
    row: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos: Sequence[int] = EOS
) -> dict[int, Fraction]:
    """Probabilities of the tokens that can be drawn."""
    values = [float(x) for x in row]
    for step in LITERAL_ORDER[params.profile]:
        if params.temperature == 0.0 and step in WARPERS:
            continue
        values = LITERAL[step](values, params, prompt, output, eos)
    if params.temperature == 0.0:
        return {values.index(max(values)): Fraction(1)}
    return fractions(literal_weights(values))


def literal_weights(values: list[float]) -> list[int]:
    below = [x - max(values) for x in values]
    return [round(float(elementary.exp(np.asarray([x]))[0]) * 2**45) for x in below]


def without(values: list[float], removed: set[int]) -> list[float]:
    return [-INF if i in removed else x for i, x in enumerate(values)]


def allow(values, params, prompt, output, eos):
    allowed = params.allowed_token_ids
    return values if allowed is None else without(values, set(range(len(values))) - set(allowed))


def ban(values, params, prompt, output, eos):
    return without(values, set(params.banned_token_ids))


def forbid_stopping(values, params, prompt, output, eos):
    return without(values, {*eos, *params.stop_token_ids}) if len(output) < params.min_tokens else values


def bias(values, params, prompt, output, eos):
    added = dict(bias_pairs(params))
    return [x + added.get(i, 0.0) for i, x in enumerate(values)]


def repeat(values, params, prompt, output, eos):
    penalty, seen = params.repetition_penalty, {*prompt, *output}
    changed = [(x / penalty if x > 0 else x * penalty) if i in seen else x for i, x in enumerate(values)]
    return [x if x == -INF and values[i] == -INF else min(max(x, -LARGE), LARGE) for i, x in enumerate(changed)]


def frequency(values, params, prompt, output, eos):
    return [x - params.frequency_penalty * output.count(i) for i, x in enumerate(values)]


def presence(values, params, prompt, output, eos):
    return [x - params.presence_penalty * (i in output) for i, x in enumerate(values)]


def temper(values, params, prompt, output, eos):
    largest = max(values)
    return [(x - largest) / params.temperature for x in values]


def top_k(values, params, prompt, output, eos):
    if params.top_k == 0 or params.top_k >= len(values):
        return values
    least = sorted(values, reverse=True)[params.top_k - 1]
    return without(values, {i for i, x in enumerate(values) if x < least})


def top_p(values, params, prompt, output, eos):
    if params.top_p == 1.0:
        return values
    weights = literal_weights(values)
    ascending = sorted(range(len(values)), key=lambda i: (weights[i], -i))
    removed, cumulative = set(), Fraction(0)
    for i in ascending[:-1]:
        cumulative += Fraction(weights[i], sum(weights))
        if cumulative <= 1 - Fraction(params.top_p):
            removed.add(i)
    return without(values, removed)


def min_p(values, params, prompt, output, eos):
    weights = literal_weights(values)
    return without(values, {i for i, w in enumerate(weights) if w < Fraction(params.min_p) * max(weights)})


LITERAL: dict[str, Any] = {
    "allowed": allow,
    "banned": ban,
    "min_tokens": forbid_stopping,
    "logit_bias": bias,
    "repetition": repeat,
    "frequency": frequency,
    "presence": presence,
    "temperature": temper,
    "min_p": min_p,
    "top_k": top_k,
    "top_p": top_p,
}
WARPERS = ("temperature", "min_p", "top_k", "top_p")
LITERAL_ORDER = {
    "vllm": (
        *("allowed", "banned", "min_tokens", "logit_bias", "repetition", "frequency", "presence"),
        *("temperature", "min_p", "top_k", "top_p"),
    ),
    "transformers": (
        *("logit_bias", "repetition", "frequency", "presence", "banned", "allowed", "min_tokens"),
        *("temperature", "top_k", "top_p", "min_p"),
    ),
}


def off_or(strategy: st.SearchStrategy[Any], off: Any) -> st.SearchStrategy[Any]:
    return st.just(off) | strategy


@st.composite
def requests(draw_: st.DrawFn) -> tuple[NDArray[np.float32], SamplingParams, list[int], list[int]]:
    """A row of at most nine logits, many of them equal, and parameters that leave a token to choose."""
    size = draw_(st.integers(1, 9))
    grid = st.integers(-4, 4).map(lambda x: x / 2)
    row = draw_(st.lists(grid | st.floats(-60, 60, width=32), min_size=size, max_size=size))
    ids = st.lists(st.integers(0, size - 1), max_size=6)
    fractions = st.sampled_from([0.125, 0.25, 0.5, 0.75]) | st.floats(0.0, 1.0, exclude_min=True)
    values: dict[str, Any] = {
        "temperature": draw_(st.sampled_from([1.0, 1.0, 0.5, 0.0]) | st.floats(1e-3, 1e3)),
        "top_k": draw_(st.integers(0, size + 1)),
        "top_p": draw_(off_or(fractions, 1.0)),
        "min_p": draw_(off_or(fractions, 0.0)),
        "repetition_penalty": draw_(off_or(st.floats(0.1, 10.0), 1.0)),
        "presence_penalty": draw_(off_or(st.floats(-2.0, 2.0), 0.0)),
        "frequency_penalty": draw_(off_or(st.floats(-2.0, 2.0), 0.0)),
        "logit_bias": draw_(st.none() | st.dictionaries(st.integers(0, size - 1), st.floats(-9, 9))),
        "min_tokens": draw_(st.integers(0, 4)),
        "banned_token_ids": draw_(off_or(ids, [])),
        "allowed_token_ids": draw_(st.none() | st.none() | ids),
        "stop_token_ids": draw_(off_or(ids, [])),
        "profile": draw_(st.sampled_from(["vllm", "transformers"])),
    }
    try:
        params = SamplingParams(**values)
        require_vocabulary(params, size, eos_of(size))
    except RequestError:
        params = SamplingParams(
            **values | {"banned_token_ids": [], "allowed_token_ids": None, "min_tokens": 0, "stop_token_ids": []}
        )
    return np.asarray(row, np.float32), params, draw_(ids), draw_(ids)


def eos_of(size: int) -> tuple[int, ...]:
    return EOS if size > 1 else ()


def only(row: Sequence[float], **values: Any) -> list[int]:
    """Ids that can be drawn."""
    weights = distribution(np.asarray(row, np.float32), SamplingParams(**values), [], [], ())
    return np.flatnonzero(weights).tolist()


def fractions(weights: Sequence[int]) -> dict[int, Fraction]:
    return {i: Fraction(weight, sum(weights)) for i, weight in enumerate(weights) if weight}


@given(requests())
def test_the_distribution_is_the_literal_one_as_exact_fractions(request_: Any):
    row, params, prompt, output = request_
    expected = literal(row.tolist(), params, prompt, output, eos_of(len(row)))
    assert fractions(distribution(row, params, prompt, output, eos_of(len(row))).tolist()) == expected
    assert sum(expected.values()) == 1


@example((np.zeros(1, np.float32), SamplingParams(temperature=0.0), [], []))
@given(requests())
def test_process_and_distribution_say_the_same(request_: Any):
    row, params, prompt, output = request_
    before = row.tobytes()
    processed = process(row, params, prompt, output, eos_of(len(row)))
    weights = distribution(row, params, prompt, output, eos_of(len(row)))
    assert weights.dtype == np.int64 and row.tobytes() == before
    assert processed.dtype == np.float64 or (params.temperature == 0.0 and processed is row)  # nothing was asked of it
    if params.temperature == 0.0:
        assert weights.tolist() == [int(i == np.argmax(processed)) for i in range(len(row))]
    else:
        assert np.array_equal(integer_weights(processed), weights)


@given(requests(), st.integers(0, 2**64 - 1), st.integers(0, 99))
def test_a_choice_is_the_draw_at_its_place_and_greedy_the_largest(request_: Any, seed: int, sample: int):
    row, params, prompt, output = request_
    expected = literal(row.tolist(), params, prompt, output, eos_of(len(row)))
    chosen = choose(row, params, prompt, output, eos_of(len(row)), seed, sample)
    noise, below = Fraction(uniform(seed, sample, len(prompt) + len(output)), 2**128), Fraction(0)
    for token_id, probability in expected.items():
        if token_id == chosen:
            assert below <= noise < below + probability
        below += probability
    assert chosen in expected


@given(requests())
def test_a_float64_row_is_taken_as_well(request_: Any):
    row, params, prompt, output = request_
    wide = row.astype(np.float64)
    processed = process(wide, params, prompt, output, eos_of(len(row)))
    assert np.array_equal(processed, process(row, params, prompt, output, eos_of(len(row))))
    assert np.array_equal(wide, row), "the caller's row is not touched"


def test_top_k_keeps_all_that_tie_with_the_kth():
    assert only([1, 3, 2, 2, 0], top_k=1) == [1]
    assert only([1, 3, 2, 2, 0], top_k=2) == [1, 2, 3]
    assert only([1, 3, 2, 2, 0], top_k=5) == only([1, 3, 2, 2, 0], top_k=0) == [0, 1, 2, 3, 4]


def test_top_p_is_compared_exactly_and_drops_the_higher_ids_of_equals_first():
    assert only([0, 0, 0, 0], top_p=0.5) == [0, 1]
    assert only([0, 0, 0, 0], top_p=math.nextafter(0.5, 1)) == [0, 1, 2]
    assert only([0, 0, 0, 0], top_p=5e-324) == [0]
    assert only([0, 5, 0, 5], top_p=0.01) == [1]
    assert only([0, 0, 0, 0], top_p=math.nextafter(1, 0)) == [0, 1, 2, 3]


def test_min_p_compares_with_the_likeliest_and_keeps_equality():
    assert only([2, 2, 1.999], min_p=1.0) == [0, 1]
    row = np.asarray([0.0, -1.0], np.float32)
    ratio = int(distribution(row, SamplingParams(), [], [], ())[1]) / 2**45
    assert only(row.tolist(), min_p=ratio) == [0, 1]
    assert only(row.tolist(), min_p=math.nextafter(ratio, 1)) == [0]


def test_the_profiles_differ_in_whether_min_p_comes_before_top_p():
    """log 5, log 3, log 1, log 1: min_p = 0.5 leaves 5 and 3 of ten; 5/8 >= 0.6 is enough, 5/10 is not."""
    row = np.log([5.0, 3.0, 1.0, 1.0]).tolist()
    assert only(row, min_p=0.5, top_p=0.6, profile="vllm") == [0]
    assert only(row, min_p=0.5, top_p=0.6, profile="transformers") == [0, 1]


def test_repetition_counts_once_and_pushes_down_on_both_sides_of_zero():
    row = np.asarray([2.0, -2.0, 0.0, 2.0, 0.5], np.float32)
    params = SamplingParams(temperature=0.0, repetition_penalty=4.0)
    assert process(row, params, [0, 0, 1, 4], [0, 2], ()).tolist() == [0.5, -8.0, 0.0, 2.0, 0.125]


def test_frequency_counts_and_presence_marks_the_output_only():
    row = np.zeros(4, np.float32)
    frequent = SamplingParams(temperature=0.0, frequency_penalty=0.5)
    present = SamplingParams(temperature=0.0, presence_penalty=0.5)
    assert process(row, frequent, [3, 3], [0, 0, 1], ()).tolist() == [-1.0, -0.5, 0.0, 0.0]
    assert process(row, present, [3, 3], [0, 0, 1], ()).tolist() == [-0.5, -0.5, 0.0, 0.0]


def test_min_tokens_masks_eos_and_stop_tokens_also_where_eos_is_ignored():
    row = np.zeros(4, np.float32)
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[2], ignore_eos=True)
    assert process(row, params, [0], [0], [1]).tolist() == [0.0, -INF, -INF, 0.0]
    assert process(row, params, [0], [0, 0], [1]).tolist() == [0.0] * 4


def test_a_bias_does_not_bring_back_what_is_banned():
    params = SamplingParams(logit_bias={0: 100.0}, banned_token_ids=[0], temperature=0.0)
    assert choose(np.zeros(3, np.float32), params, [0], [], (), 0, 0) == 1


def test_equal_logits_go_to_the_lowest_id_when_greedy():
    row, params = np.asarray([1, 2, 2, 0], np.float32), SamplingParams(temperature=0.0)
    assert choose(row, params, [0], [], (), 0, 0) == 1
    assert distribution(row, params, [0], [], ()).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("profile", ["vllm", "transformers"])
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e300, 1.7e308])
def test_extreme_temperatures_are_greedy_or_uniform(temperature: float, profile: str):
    params = SamplingParams(temperature=temperature, profile=profile)
    weights = distribution(np.asarray([-3e38, 1.0, 3e38, 3e38], np.float32), params, [0], [], ())
    assert weights.tolist() == [0, 0, 2**45, 2**45] if temperature < 1.0 else [2**45] * 4


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e300, 1.7e308])
def test_extreme_penalties_and_biases_give_no_nan(penalty: float):
    row = np.asarray([-3e38, -1.0, 0.0, 1.0, 3e38], np.float32)
    params = SamplingParams(repetition_penalty=penalty, logit_bias={0: -1.7e308, 4: 1.7e308}, frequency_penalty=2.0)
    assert not np.isnan(process(row, params, range(5), [0, 1, 1], ())).any()
    assert 2**45 <= distribution(row, params, range(5), [0, 1, 1], ()).sum() <= 5 * 2**45


@given(st.lists(st.floats(-50, 0), min_size=1, max_size=20))
def test_weights_are_the_exponential_in_units_of_the_grid(values: list[float]):
    weights = integer_weights(np.asarray([0.0, *values]))
    assert weights[0] == 2**45
    with mpmath.workprec(200):
        for value, weight in zip(values, weights[1:], strict=True):
            assert abs(mpmath.exp(value) * 2**45 - int(weight)) <= 0.5 + 2.0**-5


def test_the_largest_vocabulary_is_summed_without_overflow():
    row = np.zeros(2**17, np.float32)
    weights = distribution(row, SamplingParams(top_p=0.75), [0], [], ())
    assert int(weights.sum()) == 3 * 2**60 and np.flatnonzero(weights)[-1] == 3 * 2**15 - 1
    assert draw(distribution(row, SamplingParams(), [0], [], ()), 2**128 - 1) == 2**17 - 1


def test_a_row_without_a_choice_is_refused():
    params = SamplingParams(allowed_token_ids=[1], min_tokens=1)
    with pytest.raises(RequestError, match=r"^output token 0: "):
        choose(np.zeros(4, np.float32), params, [0], [], [1], 0, 0)
    with pytest.raises(RequestError, match=r"^processed logits: all -inf"):
        integer_weights(np.full(3, -INF))


@pytest.mark.parametrize("wrong", [math.nan, INF, -INF])
def test_logits_that_are_not_finite_are_refused(wrong: float):
    with pytest.raises(NumericsError, match=r"^logits: NaN or infinite"):
        process(np.asarray([0.0, wrong], np.float32), SamplingParams(), [0], [], ())


@pytest.mark.parametrize("row", [np.zeros((1, 4), np.float32), np.zeros(0, np.float32), np.zeros(4, np.int64)], ids=str)
def test_logits_of_another_shape_or_type_are_refused(row: Any):
    with pytest.raises(NumericsError, match=r"^logits: "):
        process(row, SamplingParams(), [0], [], ())


@pytest.mark.parametrize("wrong", [-1, 4])
@pytest.mark.parametrize("name", ["prompt_ids", "output_ids", "eos_token_ids"])
def test_an_id_outside_the_row_is_refused_and_never_counts_from_the_end(name: str, wrong: int):
    ids: dict[str, Any] = {"prompt_ids": [0], "output_ids": [], "eos_token_ids": []} | {name: [wrong]}
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, min_tokens=2)
    with pytest.raises(RequestError, match=rf"^{name} {wrong}: expected a token id, 0 to 3$"):
        process(np.zeros(4, np.float32), params, **ids)
