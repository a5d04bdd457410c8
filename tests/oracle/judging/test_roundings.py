"""What engines round inputs and caches to, number by number against definitions written out in Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lfm2np.arithmetic.ieee import round_to_bfloat16
from lfm2np.errors import RequestError
from lfm2np.oracle.judging import formats
from lfm2np.oracle.judging.emulate import added_in_float16, emulated
from lfm2np.oracle.judging.formats import FORMATS, KEPT, Input, format_named, in_blocks_for, others

pytestmark = pytest.mark.slow

F32 = np.float32
ROWS = st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=70)
FLOAT8 = sorted(
    [0.0]
    + [mantissa / 8 * 2.0**-6 for mantissa in range(1, 8)]
    + [(1 + mantissa / 8) * 2.0**power for power in range(-6, 9) for mantissa in range(8)][:-1]
)  # 448 is the last: the code above it is NaN


def q8_0(block: Sequence[Any]) -> list[Any]:
    step = F32(max(map(abs, block))) / F32(127)
    codes = [round(float(value / step)) if step else 0 for value in block]
    return [F32(code) * F32(np.float16(step)) for code in codes]


def q8_k(block: Sequence[Any]) -> list[Any]:
    step = F32(max(map(abs, block))) / F32(127)
    return [F32(round(float(value / step))) * step if step else F32(0) for value in block]


def q4_0(block: Sequence[Any]) -> list[Any]:
    largest = next(value for value in block if abs(value) == max(map(abs, block)))
    step = largest / F32(-8)
    codes = [min(15, math.floor(float(F32(value / step + F32(8.5))))) if step else 8 for value in block]
    return [F32(code - 8) * F32(np.float16(step)) for code in codes]


def float8(block: Sequence[Any]) -> list[Any]:
    """The nearest of all its numbers; of two the one with the even code."""
    rounded = []
    for value in block:
        near = min(range(len(FLOAT8)), key=lambda code: (abs(FLOAT8[code] - abs(float(value))), code % 2))
        rounded.append(F32(math.copysign(FLOAT8[near], value)))
    return rounded


def float8_row(row: Sequence[Any]) -> list[Any]:
    scale = F32(max(map(abs, row))) / F32(448)
    return [
        value * scale if scale else F32(0) for value in float8([value / scale if scale else F32(0) for value in row])
    ]


@pytest.mark.parametrize(
    ("found", "size", "expected"),
    [
        (formats.q8_0, 32, q8_0),
        (formats.q8_k, 256, q8_k),
        (formats.q4_0, 32, q4_0),
        (formats.float8, 1, float8),
        (formats.int8_rows, 1000, q8_k),
        (formats.float8_rows, 1000, float8_row),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
@given(row=ROWS)
@example(row=[0.0] * 40)
@example(row=[-0.0, 0.0, 1e-45])
@example(row=[127.0, 0.5, 1.5, -2.5, 2.5])  # halves of a step
@example(row=[-8.0, 8.0, 448.0, 464.0, 465.0, 2.0**-10, 1.5 * 2.0**-9])
def test_each_number_is_what_the_definition_says(
    found: Callable[[Any], Any], size: int, expected: Callable[[Sequence[Any]], list[Any]], row: list[float]
) -> None:
    values = np.array(row, F32)
    by_hand = [value for start in range(0, len(row), size) for value in expected(list(values)[start : start + size])]
    assert np.array_equal(found(values), np.array(by_hand, F32))
    twice = found(np.stack([values, values[::-1]]))
    assert np.array_equal(twice[0], found(values)) and np.array_equal(twice[1], found(values[::-1].copy()))


@given(row=ROWS)
def test_an_asymmetric_row_has_255_steps_from_its_least_to_its_largest(row: list[float]) -> None:
    values = np.array(row, F32)
    least, largest = min(0.0, *row, 0.0), max(0.0, *row, 0.0)
    step = (F32(largest) - F32(least)) / F32(255)
    rounded = formats.int8_rows_asymmetric(values)
    assert np.all(np.abs(rounded - values) <= F32(1.01) * step + F32(1e-40))
    assert not step or len(np.unique(np.rint(rounded / step))) <= 256


def test_scales_of_the_checkpoint_saturate() -> None:
    values = np.array([0.0, 0.26, -0.24, 63.4, 70.0, -70.0], F32)
    assert formats.int8_static(values, 0.5).tolist() == [0.0, 0.5, -0.0, 63.5, 63.5, -64.0]
    assert formats.float8_scaled(values, F32(0.125)).tolist() == [0.0, 0.25, -0.234375, 56.0, 56.0, -56.0]
    both = np.array([[1.0, 448.0], [1.03, 2.0]], F32)
    assert formats.by_tensor(both, formats.float8_rows).tolist() == [[1.0, 448.0], [1.0, 2.0]]
    assert formats.by_group(both, 1, formats.int8_rows).tolist() == both.tolist()
    assert formats.int8_static(np.array([-3.0, 0.0, 200.0, 260.0], F32), 1.0, zero=-128).tolist() == [0, 0, 200, 255]


@given(st.lists(st.floats(-1e4, 1e4, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3), min_size=1, max_size=20))
@example([1.00390625, 1.01171875, -1.00390625, 1.00048828125, 1.00146484375])  # halfway between two
def test_bits_are_those_of_float16_and_of_bfloat16(row: list[float]) -> None:
    values = np.array(row, F32)
    assert np.array_equal(formats.rounded_to(11, values), values.astype(np.float16).astype(F32))
    assert np.array_equal(formats.rounded_to(8, values), round_to_bfloat16(values))


def test_values_are_added_in_float16_one_after_another() -> None:
    random = np.random.default_rng(0)
    weights = random.random((2, 2, 3, 6)).astype(F32)  # the last 3 of 6 positions
    weights *= np.tri(3, 6, 3, dtype=F32)
    order = np.array([4, 0, 5, 2, 1, 3])
    values = random.normal(size=(6, 2, 4)).astype(F32)
    expected = np.zeros((2, 2, 3, 4), F32)
    for group, head, query, axis in np.ndindex(expected.shape):
        total = F32(0)
        for position in order:
            term = weights[group, head, query, position] * values[position, group, axis]
            total = F32(np.float16(total + term))
        expected[group, head, query, axis] = total
    assert np.array_equal(added_in_float16(weights[..., order], values, order), expected)


@pytest.mark.rounding
def test_rows_of_a_product_have_the_inputs_of_their_own_tensor() -> None:
    """Two tensors of one product, of other types: as Q4_K_M has attn_v beside attn_q."""
    random = np.random.default_rng(0)
    weight, x = random.normal(size=(5, 64)).astype(F32), random.normal(size=(3, 64)).astype(F32)
    names = ("model.a.q_proj.weight", "model.a.k_proj.weight", "model.a.v_proj.weight")
    for draw in range(8):
        kinds = dict(zip(names, ("Q4_0", "Q8_0", "F16"), strict=True))
        rows = dict(zip(names, (2, 1, 2), strict=True))
        inputs = {name: Input(rows[name], in_blocks_for(kinds[name], draw)) for name in names}
        engine = emulated("q8", 0, draw, inputs)
        output = engine.linear(x, engine.prepare_matrix(weight, " + ".join(names)), np.arange(5, dtype=F32))
        rounded = [formats.q8_0(x)] * 3 + [formats.round_to_float16(x)] * 2
        expected = np.stack(
            [column.astype(np.float64) @ row for column, row in zip(rounded, weight, strict=True)], axis=1
        )
        assert np.allclose(output, expected + np.arange(5), rtol=0, atol=1e-4)
        assert not np.allclose(output, x @ weight.T + np.arange(5), rtol=0, atol=1e-3)


def test_a_format_may_name_that_of_the_cache() -> None:
    assert format_named("q8").kv == "float16"
    assert format_named("q8 kv:q4_0").kv == "q4_0"
    for name, words in (("q9", "format 'q9'"), ("q8 kv:q9", "keys and values 'q9'"), ("q8 kv:", "keys and values ''")):
        with pytest.raises(RequestError, match=words):
            format_named(name)


def test_quantised_weights_are_explained_by_no_scheme_for_unknown_ones() -> None:
    assert others("float32", False, False, is_quantised=False) == ["float16", "bfloat16", "int8", "int4"]
    assert others("float32", False, True, is_quantised=True) == ["float16", "bfloat16", "w8a8"]
    assert others("float16 kv:q8_0", True, False, is_quantised=True) == [
        "q8 kv:q8_0",
        "float32 kv:q8_0",
        "bfloat16 kv:q8_0",
    ]
    assert set(others("int8", True, True, is_quantised=True)) == set(FORMATS) - {"int8", "int4"}


@pytest.mark.rounding
@pytest.mark.parametrize("name", KEPT)
def test_keys_and_values_are_what_the_cache_holds(name: str) -> None:
    """One position attends to itself alone: the result is its value, as it is kept."""
    random = np.random.default_rng(0)
    queries, keys, values = (random.normal(size=(1, 2, 64)).astype(F32) for _ in range(3))
    for draw in range(8):
        engine = emulated(f"float32 kv:{name}", 0, draw)
        output = engine.attend_one(queries, [(keys, values)], None)
        if KEPT[name].may_turn and engine.fused:
            expected = formats.turned(KEPT[name].keep(formats.turned(values).reshape(1, 128)).reshape(1, 2, 64))
        else:
            expected = KEPT[name].keep(values.reshape(1, 128)).reshape(1, 2, 64)
        assert np.array_equal(output, expected)
        assert np.array_equal(engine.in_cache(values[..., :32], KEPT[name].keep), KEPT[name].keep(values[..., :32]))
