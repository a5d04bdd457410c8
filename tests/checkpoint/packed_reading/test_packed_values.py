"""What number a weight of packed rows is, against fractions: every coding, every bit, every edge of its scales."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed_values import FORMATS, as_stored, drawn_bits, float4, float8, fractions, grouped, number, packed

from lfm2np.checkpoint.packed.matrix_parts import packed_dim
from lfm2np.checkpoint.packed.rows import BITS, FLOAT4, FLOAT8, FLOAT32_MAX, PackedRows, numbers
from lfm2np.checkpoint.stored import StoredTensor, require_finite, widen
from lfm2np.errors import CheckpointError

CODINGS = [*BITS, "int8", "float8", "float4"]
READ = {"float8": float8, "float4": float4, "int8": lambda code: code - 256 if code > 127 else code}


def drawn(seed: int, coding: str, dtype: str, with_bias: bool) -> tuple[PackedRows, list[list[Fraction]]]:
    """Five rows of three groups of 32, and what they are."""
    random, width = np.random.default_rng(seed), BITS.get(coding, 4 if coding == "float4" else 8)
    codes = random.integers(0, 2**width, (5, 96))
    if coding == "float8":
        codes[codes & 127 == 127] -= 1
    scales, biases = (drawn_bits(random, dtype, (5, 3), (-3, 2)) for _ in range(2))
    rows = PackedRows(
        coding,
        96,
        codes.astype("i1") if coding == "int8" else packed(codes.tolist(), width),
        as_stored(scales, dtype),
        dtype,
        biases=as_stored(biases, dtype) if with_bias else None,
    )
    expected = []
    for row_codes, scale, bias in zip(codes.tolist(), scales.tolist(), biases.tolist(), strict=True):
        factors = grouped([number(value, dtype) for value in scale], 96)
        added = grouped([number(bia, dtype) for bia in bias] if with_bias else [Fraction(0)] * 3, 96)
        expected.append([f * READ.get(coding, int)(c) + a for f, c, a in zip(factors, row_codes, added, strict=True)])
    return rows, expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_weight_is_exactly_what_its_codes_and_its_group_say(coding: str, dtype: str, with_bias: bool):
    rows, expected = drawn(1, coding, dtype, with_bias)
    assert rows.problem() is None
    assert fractions(widen(rows, "any")) == expected


@pytest.mark.slow
@pytest.mark.parametrize("width", BITS.values())
@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(1, 100))
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


@pytest.mark.slow
@pytest.mark.parametrize("coding", ["1 bits", "4 bits", "8 bits", "int8", "float8", "float4"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_edges_of_scales_are_exact_or_refused(dtype: str, coding: str):
    """Zero of either sign, subnormal and largest ones, with the least and the largest codes and each other."""
    width = BITS.get(coding, 4 if coding == "float4" else 8)
    top = 2**width - 1
    codes = [0, top, top >> 1, (top >> 1) + 1] * 8
    if coding == "float8":
        codes = [0, 0x7E, 0xFE, 0x80] * 8
    words = np.array([codes], "u1").view("i1") if coding == "int8" else packed([codes], width)
    for scale in EDGES[dtype]:
        for bias in (None, *EDGES[dtype]):
            parts = [np.array([[value]], FORMATS[dtype]) for value in (scale, bias or 0)]
            first, second = (as_stored(part, dtype) for part in parts)
            rows = PackedRows(coding, 32, words, first, dtype, biases=None if bias is None else second)
            added = Fraction(0) if bias is None else number(bias, dtype)
            expected = [READ.get(coding, int)(code) * number(scale, dtype) + added for code in codes]
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


def refusal(rows: PackedRows) -> str:
    with pytest.raises(CheckpointError) as caught:
        require_finite(StoredTensor("w", "four", rows, "x.safetensors"))
    return str(caught.value)


BAD_NUMBERS = [  # in what rows, which of their numbers is another, and what is said of it
    *(
        ("4 bits", "BF16", array, (3, 1), bits, f"the {what} {told} in group 1 of row 3, expected finite numbers that")
        for array, what in (("scales", "scale"), ("biases", "bias"))
        for bits, told in ((0x7F80, "inf"), (0xFF80, "-inf"), (0x7FC0, "nan"))
    ),
    ("float8", "F32", "codes", (4, 70), 0x7F, "the code nan in column 70 of row 4, expected"),
    ("float8", "F32", "codes", (4, 70), 0xFF, "the code nan in column 70 of row 4, expected"),
    ("float4", "F8_E8M0", "scales", (2, 2), 255, "the scale nan in group 2 of row 2, expected"),
]


@pytest.mark.parametrize(("coding", "dtype", "array", "place", "bits", "told"), BAD_NUMBERS)
def test_what_is_no_number_is_refused_by_its_place(
    coding: str, dtype: str, array: str, place: tuple[int, int], bits: int, told: str
):
    rows, _ = drawn(3, coding, dtype, dtype == "BF16")
    values = getattr(rows, array)
    (values.view("u1") if array == "codes" else values)[place] = bits
    assert refusal(rows).startswith(f"x.safetensors: w: four with {told}")


@pytest.mark.parametrize(
    ("scale", "bias", "told"),
    [
        (2.0**123, 0.0, None),
        (2.0**124, 0.0, "weights up to 3.402823669209385e+38"),
        (2.0**-52, 1.0, None),
        (2.0**-53, 1.0, "a scale too small beside the bias 1.0"),
    ],
)
def test_a_group_that_may_have_weights_beyond_float32_or_float64_is_refused(
    scale: float, bias: float, told: str | None
):
    """Also behind what is looked at together."""
    scales, biases = (np.array([[1.0]] * 39_999 + [[value]], "<f4") for value in (scale, bias))
    rows = PackedRows("4 bits", 32, packed([[0] * 32] * 40_000, 4), scales, "F32", biases=biases)
    if told is None:
        require_finite(StoredTensor("w", "four", rows))
    else:
        assert f"four with {told} in group 0 of row 39999, expected" in refusal(rows)


def test_rows_are_taken_as_those_of_an_array():
    plain, expected = drawn(6, "3 bits", "F16", True)
    zeros, order = np.arange(15, dtype="u1").reshape(5, 3) % 8, np.arange(96) // 32
    rows = replace(plain, zeros=zeros, group_of=order)
    whole = rows.widened()
    of_zeros = np.repeat(numbers(plain.scales, "F16") * zeros, 32, axis=1)
    assert np.array_equal(whole, plain.widened() - of_zeros) and fractions(plain.widened()) == expected
    assert np.array_equal(rows[1:3].widened(), whole[1:3]) and len(rows[1:3]) == 2
    assert np.array_equal(rows[np.array([4, 0, 4])].widened(), whole[[4, 0, 4]])
    assert rows.biases is not None
    arrays = (np.stack([array, array[::-1]]) for array in (rows.codes, rows.scales, rows.biases, zeros))
    stacked = replace(rows, **dict(zip(("codes", "scales", "biases", "zeros"), arrays, strict=True)))
    assert stacked.shape == (2, 5, 96) and np.array_equal(stacked[1].widened(), whole[::-1])
