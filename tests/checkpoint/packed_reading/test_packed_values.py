"""What number a weight of packed rows is, against fractions: every coding, every bit, every edge of its scales."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_values import FORMATS, as_stored, drawn_bits, float4, float8, fractions, grouped, number, packed

from lfm2np.checkpoint.packed.matrix_parts import packed_dim
from lfm2np.checkpoint.packed.rows import (
    BITS,
    FLOAT4,
    FLOAT8,
    FLOAT32_MAX,
    PackedRows,
    unpacked,
)
from lfm2np.checkpoint.stored import StoredTensor, require_finite, widen
from lfm2np.errors import CheckpointError

every_width = pytest.mark.parametrize("width", BITS.values())
seeds = st.integers(0, 2**32 - 1)


def drawn(
    seed: int, coding: str, dtype: str, with_bias: bool, exponents: tuple[int, int] = (-3, 2), size: int = 32
) -> tuple[PackedRows, list[list[Fraction]]]:
    """Five rows of three groups, and what they are."""
    random = np.random.default_rng(seed)
    width = BITS.get(coding, 4 if coding == "float4" else 8)
    codes = random.integers(0, 2**width, (5, 3 * size))
    if coding == "float8":
        codes[codes & 127 == 127] -= 1
    scales, biases = (drawn_bits(random, dtype, (5, 3), exponents) for _ in range(2))
    rows = PackedRows(
        coding,
        3 * size,
        codes.astype("i1") if coding == "int8" else packed(codes.tolist(), width),
        as_stored(scales, dtype),
        dtype,
        biases=as_stored(biases, dtype) if with_bias else None,
    )
    said = {"float8": float8, "float4": float4, "int8": lambda code: code - 256 if code > 127 else code}
    read = said.get(coding, int)
    expected = []
    for row_codes, scale, bias in zip(codes.tolist(), scales.tolist(), biases.tolist(), strict=True):
        factors = grouped([number(value, dtype) for value in scale], 3 * size)
        added = grouped([number(bia, dtype) for bia in bias] if with_bias else [Fraction(0)] * 3, 3 * size)
        expected.append([f * read(c) + a for f, c, a in zip(factors, row_codes, added, strict=True)])
    return rows, expected


CODINGS = [*BITS, "int8", "float8", "float4"]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_weight_is_exactly_what_its_codes_and_its_group_say(coding: str, dtype: str, with_bias: bool):
    rows, expected = drawn(1, coding, dtype, with_bias)
    assert rows.problem() is None
    assert fractions(widen(rows, "any")) == expected


@pytest.mark.parametrize("size", [32, 64, 128])
@every_width
def test_groups_of_every_size(width: int, size: int):
    rows, expected = drawn(2, f"{width} bits", "BF16", True, size=size)
    assert fractions(rows.widened()) == expected
    assert rows.shape == (5, 3 * size) == rows.widened().shape and len(rows) == 5


@every_width
def test_every_bit_has_its_place(width: int):
    """One bit at a time, over the border of every word."""
    for bit in range(32 * width):
        words = np.array([[(1 << bit) >> 32 * word & 0xFFFFFFFF for word in range(width)]], "<u4")
        expected = [0] * 32
        expected[bit // width] = 1 << bit % width
        assert unpacked(words, width).tolist() == [expected], bit


@every_width
@given(seed=seeds, columns=st.integers(1, 100))
def test_rows_that_end_within_a_word(width: int, seed: int, columns: int):
    """As compressed-tensors packs them; of widths that divide a word."""
    codes = np.random.default_rng(seed).integers(0, 2**width, (2, columns)).tolist()
    words = packed(codes, width)
    assert words.shape[1] == packed_dim((columns, ""), width, "")[0]
    if 32 % width == 0:
        rows = PackedRows(f"{width} bits", columns, words, np.ones((2, 1), "<f4"), "F32")
        assert fractions(rows.widened()) == codes


def test_float8_and_float4_are_what_their_definitions_say():
    assert [Fraction(value) for value in np.delete(FLOAT8, [127, 255]).tolist()] == [
        float8(byte) for byte in range(256) if byte & 127 != 127
    ]
    assert np.isnan(FLOAT8[[127, 255]]).all() and np.nanmax(FLOAT8) == 448.0
    assert [Fraction(value) for value in FLOAT4.tolist()] == [float4(code) for code in range(16)]
    assert np.signbit(FLOAT8[[0, 128]]).tolist() == np.signbit(FLOAT4[[0, 8]]).tolist() == [False, True]


EDGES = {
    "BF16": (0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x3F80, 0xC2FF, 0x7B00, 0x7F7F, 0xFF7F),
    "F16": (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xC3FF, 0x7BFF, 0xFBFF),
    "F32": (0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800001, 0xC2FFFFFF, 0x7B000000, 0x7F7FFFFF),
    "F8_E8M0": (0, 1, 127, 200, 240, 254),
    "F8_E4M3": (0x00, 0x80, 0x01, 0x87, 0x38, 0x7E, 0xFE),
}


@pytest.mark.parametrize("coding", ["1 bits", "4 bits", "8 bits", "int8", "float8", "float4"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_edges_of_scales_are_exact_or_refused(dtype: str, coding: str):
    """Zero of either sign, subnormal and largest ones, with the least and the largest codes and each other."""
    width = BITS.get(coding, 4 if coding == "float4" else 8)
    top = 2**width - 1
    codes = [0, top, top >> 1, (top >> 1) + 1] * 8
    if coding == "float8":
        codes = [0, 0x7E, 0xFE, 0x80] * 8
    said = {"float8": float8, "float4": float4, "int8": lambda code: code - 256 if code > 127 else code}
    words = np.array([codes], "u1").view("i1") if coding == "int8" else packed([codes], width)
    for scale in EDGES[dtype]:
        for bias in (None, *EDGES[dtype]):
            parts = [np.array([[value]], FORMATS[dtype]) for value in (scale, bias or 0)]
            first, second = (as_stored(part, dtype) for part in parts)
            rows = PackedRows(coding, 32, words, first, dtype, biases=None if bias is None else second)
            added = Fraction(0) if bias is None else number(bias, dtype)
            expected = [said.get(coding, int)(code) * number(scale, dtype) + added for code in codes]
            fits = all(abs(value) <= Fraction(FLOAT32_MAX) and is_float64(value) for value in expected)
            accepted = rows.problem() is None
            assert fits or not accepted, (scale, bias)
            assert accepted or not common(scale, bias, dtype), (scale, bias)
            if accepted:
                assert fractions(rows.widened()) == [expected]


def common(scale: int, bias: int | None, dtype: str) -> bool:
    """Numbers as a quantiser may write them: within 2**30 of each other, and far from float32's ends."""
    sizes = [abs(float(number(value, dtype))) for value in (scale, bias or 0)]
    return all(size == 0.0 or 2.0**-30 < size < 2.0**30 for size in sizes) and (dtype != "F32" or max(sizes) < 2.0)


def is_float64(value: Fraction) -> bool:
    try:
        return Fraction(float(value)) == value
    except OverflowError:
        return False


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@settings(max_examples=40)
@given(seed=seeds, low=st.integers(-60, 14), span=st.integers(1, 60))
def test_what_is_accepted_is_exact(dtype: str, seed: int, low: int, span: int):
    """Scales and biases of very different sizes: float64 holds the sum of some, and of float16 all."""
    ends = (max(low, -14), min(low + span, 15)) if dtype == "F16" else (low, low + span)
    rows, expected = drawn(seed, "8 bits", dtype, True, (ends[0], max(ends[1], ends[0] + 1)))
    accepted = rows.problem() is None
    assert accepted or (dtype != "F16" and span > (10 if dtype == "F32" else 20))
    if accepted:
        assert fractions(rows.widened()) == expected


def refusal(rows: PackedRows) -> str:
    with pytest.raises(CheckpointError) as caught:
        require_finite(StoredTensor("w", "four", rows, "x.safetensors"))
    return str(caught.value)


@pytest.mark.parametrize(("bits", "told"), [(0x7F80, "inf"), (0xFF80, "-inf"), (0x7FC0, "nan")])
def test_a_scale_or_a_bias_that_is_no_number_is_refused_by_group_and_row(bits: int, told: str):
    for what in ("scale", "bias"):
        rows, _ = drawn(3, "4 bits", "BF16", True)
        array = rows.scales if what == "scale" else rows.biases
        assert array is not None
        array[3, 1] = bits
        assert refusal(rows) == (
            f"x.safetensors: w: four with the {what} {told} in group 1 of row 3, expected finite numbers that float32 "
            "holds"
        )


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_code_that_is_no_number_is_refused_by_column_and_row(byte: int):
    rows, _ = drawn(4, "float8", "F32", False)
    rows.codes.view("u1")[4, 70] = byte
    assert "four with the code nan in column 70 of row 4, expected" in refusal(rows)


def test_a_power_of_two_that_is_none_is_refused():
    rows, _ = drawn(5, "float4", "F8_E8M0", False)
    rows.scales[2, 2] = 255
    assert "four with the scale nan in group 2 of row 2, expected" in refusal(rows)


@pytest.mark.parametrize(
    ("scale", "bias", "told"),
    [
        (2.0**123, 0.0, None),
        (2.0**124, 0.0, "weights up to 3.402823669209385e+38"),
        (2.0**-44, 1.0, None),
        (2.0**-60, 1.0, "a scale too small beside the bias 1.0"),
    ],
)
def test_a_group_that_may_have_weights_beyond_float32_or_float64_is_refused(
    scale: float, bias: float, told: str | None
):
    scales, biases = (np.array([[1.0], [value]], "<f4") for value in (scale, bias))
    rows = PackedRows("4 bits", 32, packed([[0] * 32] * 2, 4), scales, "F32", biases=biases)
    if told is None:
        require_finite(StoredTensor("w", "four", rows))
    else:
        assert f"four with {told} in group 0 of row 1, expected" in refusal(rows)


def test_a_bad_group_is_found_wherever_it_stands():
    """Also behind what is looked at together."""
    scales = np.ones((40_000, 1), "<f4")
    scales[-1] = np.nan
    rows = PackedRows("4 bits", 32, np.zeros((40_000, 4), "<u4"), scales, "F32")
    assert rows.problem() == "the scale nan in group 0 of row 39999"


def test_rows_are_taken_as_those_of_an_array():
    rows, _ = drawn(6, "3 bits", "F16", True)
    whole = rows.widened()
    assert np.array_equal(rows[1:3].widened(), whole[1:3]) and len(rows[1:3]) == 2
    assert np.array_equal(rows[np.array([4, 0, 4])].widened(), whole[[4, 0, 4]])
    stacked = PackedRows(
        rows.coding, rows.columns, *(np.stack([array, array[::-1]]) for array in (rows.codes, rows.scales)), rows.dtype
    )
    assert stacked.shape == (2, 5, 96)
    flat = PackedRows(rows.coding, rows.columns, rows.codes, rows.scales, rows.dtype).widened()
    assert np.array_equal(stacked[1].widened(), flat[::-1])


def test_zeros_are_taken_off_and_columns_find_their_groups():
    codes = np.random.default_rng(7).integers(0, 16, (3, 32))
    scales, zeros = np.array([[1.0, 0.5], [3.0, 7.0], [0.1, -1.0]], "<f4"), np.array([[0, 15], [8, 9], [3, 1]], "u1")
    order = np.array([0, 1] * 16)
    rows = PackedRows("4 bits", 32, packed(codes.tolist(), 4), scales, "F32", zeros, group_of=order)
    expected = [
        [
            Fraction(float(scales[row, column % 2])) * (int(codes[row, column]) - int(zeros[row, column % 2]))
            for column in range(32)
        ]
        for row in range(3)
    ]
    assert fractions(rows.widened()) == expected
    assert fractions(rows[1:].widened()) == expected[1:]
    centred = PackedRows("4 bits", 32, packed(codes.tolist(), 4), np.ones((3, 1), "<f4"), "F32", 8)
    assert np.array_equal(centred.widened(), codes - 8.0)
