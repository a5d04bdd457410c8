"""What number a quantised weight is, against fractions: every format, every bit, every edge of its scales."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest
from block_values import VALUES
from blocks_drawn import blocks, random_rows
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.checkpoint.gguf.ggml_types import QUANTISED, BlockRows, values_of
from lfm2np.checkpoint.stored import StoredTensor, require_finite
from lfm2np.errors import CheckpointError

every_format = pytest.mark.parametrize("name", QUANTISED)


def row(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)[None]


def fractions(values: np.ndarray) -> list[Fraction]:
    assert values.dtype == np.float64
    return [Fraction(value) for value in values.reshape(-1).tolist()]


@pytest.mark.slow
@every_format
@given(data=st.data())
def test_a_weight_is_exactly_what_its_format_says(name: str, data: st.DataObject):
    content = data.draw(blocks(name))
    assert fractions(values_of(row(content), name)) == VALUES[name](content)
    assert BlockRows(name, row(content)).problem() is None


@every_format
def test_rows_of_several_blocks_follow_each_other(name: str):
    size, weights = QUANTISED[name].size, QUANTISED[name].weights
    rows = random_rows(name, (6, 3 * weights), 1)
    values = values_of(rows.reshape(2, 3, -1), name)
    assert values.shape == (2, 3, 3 * weights)
    expected = [VALUES[name](rows[i, size * j : size * (j + 1)].tobytes()) for i in range(6) for j in range(3)]
    assert fractions(values) == [value for block in expected for value in block]


@every_format
def test_a_scale_that_is_no_number_is_refused_by_tensor_block_and_row(name: str):
    """Also behind what is looked at together. MXFP4 has powers of two, of which 255 is none."""
    kind = QUANTISED[name]
    bad = [(at, *no_number) for at in kind.halves for no_number in ((0x7C00, "inf"), (0xFC00, "-inf"), (0x7E01, "nan"))]
    for at, bits, shown in bad or [(0, 255, "nan")]:
        rows = np.zeros((2**20 // kind.size + 3, 2 * kind.size), np.uint8)
        rows[-1, kind.size + at : kind.size + at + 2] = np.frombuffer(struct.pack("<H", bits), np.uint8)
        place = f"the scale {shown} in block 1 of row {len(rows) - 1}"
        with pytest.raises(CheckpointError, match=f"^x.gguf: w: {name} with {place}, expected "):
            require_finite(StoredTensor("w", name, BlockRows(name, rows), "x.gguf"))


@pytest.mark.parametrize(("byte", "told"), [(255, "nan"), (254, r"1.70\d+e\+38"), (253, r"8.5\d+e\+37")])
def test_a_power_of_two_beyond_float32_is_refused(byte: int, told: str):
    rows = random_rows("MXFP4", (2, 64), 4)
    rows[1, 17] = byte
    with pytest.raises(CheckpointError, match=f"^w: MXFP4 with the scale {told} in block 1 of row 1"):
        require_finite(StoredTensor("w", "MXFP4", BlockRows("MXFP4", rows)))
    rows[1, 17] = 252
    require_finite(StoredTensor("w", "MXFP4", BlockRows("MXFP4", rows)))
    assert np.isfinite(values_of(rows, "MXFP4").astype(np.float32)).all()
