"""Attention in exact arithmetic: its three sums against Python's integers, its independence of order and of chunks."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operands import (
    KINDS,
    LONGEST_CONTEXT,
    adversarial,
    integer_dot,
    kinds,
    seeds,
)

from lfm2np.arithmetic import exact, exact_attention, grids
from lfm2np.arithmetic.ieee import FLOAT64
from lfm2np.arithmetic.matrix import AttentionScale
from lfm2np.truth import integers


def no_scale(groups: int, head_dim: int) -> AttentionScale:
    return AttentionScale(np.zeros(head_dim, np.int32), np.zeros((groups, head_dim), np.int32))


def test_attention_over_the_longest_context_ignores_the_order_of_its_past():
    """The newest position sees all others, so permuting keys and values together must not change a bit."""
    rng = np.random.default_rng(7)
    keys = rng.normal(size=(LONGEST_CONTEXT, 1, 8)).astype(np.float32)
    values = adversarial(rng, (LONGEST_CONTEXT, 1, 8), "wide")
    query = (3 * rng.normal(size=(1, 2, 8))).astype(np.float32)
    order = rng.permutation(LONGEST_CONTEXT)
    straight = exact.attend(query, keys, values, no_scale(1, 8))
    assert straight.tobytes() == exact.attend(query, keys[order], values[order], no_scale(1, 8)).tobytes()
    assert straight.tobytes() == integers.attend(query, keys, values, no_scale(1, 8)).tobytes()
    assert np.isfinite(straight).all()


@given(seeds, kinds, kinds, st.sampled_from([1, 2, 6, 10, 64, 80, 128, 256]))
def test_attention_scores_equal_python_integers_on_the_same_grid(seed, q_kind, k_kind, head_dim):
    rng = np.random.default_rng(seed)
    queries, keys = adversarial(rng, (2, 2, head_dim), q_kind), adversarial(rng, (3, 1, head_dim), k_kind)
    scale = AttentionScale(rng.integers(-9, 9, head_dim).astype(np.int32), np.zeros((1, head_dim), np.int32))
    grid_queries, grid_keys = exact_attention.on_grid(queries, -scale.keys), exact_attention.on_grid(keys, scale.keys)
    scores = grid_queries.transpose(1, 0, 2) @ grid_keys.transpose(1, 2, 0)  # [H, T, C]
    for head in range(2):
        for t in range(2):
            for c in range(3):
                truth = integer_dot(grid_queries[t, head], grid_keys[c, 0])
                assert Fraction(float(scores[head, t, c])) == truth


@pytest.mark.parametrize(("kind", "sharpness"), [*zip(KINDS, itertools.cycle([0.0, 1.0, 30.0]), strict=False)])
def test_weighted_values_over_the_longest_context_equal_python_integers(kind: str, sharpness: float):
    """Both products, for flat and for peaked attention; and their terms, in absolute value, stay below 2**53."""
    rng = np.random.default_rng(13)
    values = adversarial(rng, (grids.TERMS, 1, 2), kind)
    units, exponents = exact_attention.value_units(values, no_scale(1, 2))
    assert np.abs(units).max() <= 2**24
    scores = sharpness * rng.normal(size=(1, grids.TERMS))
    both = np.empty((1, 2, grids.TERMS))
    weights = exact_attention.elementary.exp(scores - scores.max())
    exact_attention.share_units(weights * grids.power_of_two(exponents.T), both)
    high, low = both[0]
    assert np.abs(both).max() <= 2**28  # so that no product exceeds 64 bits
    for shares in (high, low):
        for channel in range(2):
            terms = (shares.ravel().astype(np.int64) * units[:, 0, channel].astype(np.int64)).tolist()
            assert sum(map(abs, terms)) < 2**53
            assert Fraction(float((shares @ units[:, 0])[channel])) == sum(terms)
    assert sum(int(share) for share in high.ravel()) <= 2**28 + grids.TERMS


@pytest.mark.rounding
def test_the_scale_of_an_attention_layer_changes_nothing_but_rounding():
    rng = np.random.default_rng(11)
    q_norm = (rng.normal(size=8) * np.exp2(rng.integers(-6, 6, 8))).astype(np.float32)
    k_norm = (rng.normal(size=8) * np.exp2(rng.integers(-6, 6, 8))).astype(np.float32)
    v_proj = (rng.normal(size=(16, 5)) * np.exp2(rng.integers(-8, 8, (16, 1)))).astype(np.float32)
    v_proj[3] = 0.0
    scale = integers.attention_scale(q_norm, k_norm, v_proj)
    assert (scale.keys[:4] == scale.keys[4:]).all(), "a rotated pair shares its scale"
    queries, keys = (rng.normal(size=(9, g, 8)).astype(np.float32) for g in (4, 2))
    values = (rng.normal(size=(9, 5)) @ v_proj.T).reshape(9, 2, 8).astype(np.float32)
    truth = FLOAT64.attend(*(a.astype(np.float64) for a in (queries, keys, values)), scale)
    error = np.abs(exact.attend(queries, keys, values, scale) - truth)
    assert (error <= 2.0**-20 * np.abs(values).max(axis=0).repeat(2, axis=0)).all()


def flat(rng: np.random.Generator, context: int) -> list[np.ndarray]:
    """Queries of zero: every position weighs the same."""
    return [np.zeros((2, 1, 64)), rng.normal(size=(context, 1, 64)), 1.0 + 0.1 * rng.normal(size=(context, 1, 64))]


def plain(rng: np.random.Generator, context: int) -> list[np.ndarray]:
    return [rng.normal(size=(n, 1, 64)) for n in (2, context, context)]


def hidden_giant(rng: np.random.Generator, context: int) -> list[np.ndarray]:
    """Position 0 has values 2**14 times larger and a weight of e**-240 or less."""
    queries, keys, values = plain(rng, context)
    queries[..., 0] = np.abs(queries[..., 0]) + 4.0
    keys[0], values[0] = 0.0, values[0] * 2.0**14
    keys[0, 0, 0] = -480.0
    return [queries, keys, values]


@pytest.mark.rounding
@pytest.mark.parametrize("context", [256, 32_003])
@pytest.mark.parametrize("operands", [flat, plain, hidden_giant])
def test_attention_is_within_eight_units_of_float64_at_any_length(operands, context: int):
    """Units of float32, 2**-24, of the result's size; Haswell's kernels in float32: 1.3 to 36.

    Pinned: shares once were 28 bits below the largest value: off by 1.7e-4, and by 8.6e-2 beside a giant.
    """
    three = [x.astype(np.float32) for x in operands(np.random.default_rng(context), context)]
    truth = FLOAT64.attend(*(x.astype(np.float64) for x in three), no_scale(1, 64))
    error = exact.attend(*three, no_scale(1, 64)) - truth
    assert np.sqrt(np.mean(error**2) / np.mean(truth**2)) <= 8 * 2.0**-24  # measured: 0.4 to 6.1
