"""Our matrices among the tensors of AutoGPTQ and AutoAWQ: `qweight`, `qzeros`, `scales`, of gptq also `g_idx`.

Both hold matrices turned around, inputs first. gptq packs codes along the inputs and zeros along the outputs, each from
the lowest bit on; in checkpoint_format gptq a zero is stored less one, in gptq_v2 as it is. awq's gemm packs both along
the outputs, eight in the order 0, 2, 4, 6, 1, 3, 5, 7. A weight is scale * (code - zero) in both.

Readers of checkpoint_format gptq disagree on the largest stored zero (15 of 4 bits is 16, or 0 again), and on `sym`,
where some read no zeros but take the middle: files in which that makes a difference are refused.
Source: AutoGPTQ, nn_modules/qlinear; GPTQModel, utils/model.py; AutoAWQ, utils/packing_utils.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.packed.matrix_parts import INTEGERS, Dims, Parts, packed_dim
from lfm2np.checkpoint.packed.rows import PackedRows, unpacked
from lfm2np.checkpoint.packed.settings import AutoSettings
from lfm2np.checkpoint.stored import DTYPES, StoredTensor
from lfm2np.errors import CheckpointError
from lfm2np.truth.layers import Dim
from lfm2np.values import show_json

AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # of eight outputs in their order, where each stands


def read_matrix(parts: Parts, dims: Dims, settings: AutoSettings) -> StoredTensor | None:
    """None of a module that is not quantised. CheckpointError names the file, the tensor and the key."""
    if "qweight" not in parts or len(dims) != 2:
        return None
    if skipped := next((part for part in settings.skipped if any(part in name for name in parts.names)), None):
        raise parts.wrong(
            "qweight", f"expected none from modules_to_not_convert, which has {show_json(skipped)} (config.json)"
        )
    if "weight" in parts:
        both = f"{parts.called('weight')} stands beside {parts.called('qweight')}"
        raise CheckpointError(f"{parts.source}: {both}, expected one of them")
    (rows, row_origin), (columns, origin), bits = *dims, settings.bits
    size = settings.group_size or columns
    if columns % size:
        expected = f"a multiple of group_size={size} (config.json)"
        raise parts.wrong("qweight", f"rows of {origin}={columns} numbers, expected {expected}")
    is_gptq = settings.method == "gptq"
    if not is_gptq and (rows % 8 or columns % 8):
        sizes = f"{row_origin}={rows}, {origin}={columns}"
        raise parts.wrong("qweight", f"{sizes}, expected multiples of 8 from version=gemm")
    groups, words = (columns // size, f"{origin}/group_size"), packed_dim(dims[0], bits, "bits")
    stored_dims = (packed_dim(dims[1], bits, "bits"), dims[0]) if is_gptq else (dims[1], words)
    weight = parts.take("qweight", "quant_method", ("I32",), stored_dims)
    zeros = parts.take("qzeros", "quant_method", ("I32",), (groups, words))
    scales = parts.take("scales", "quant_method", tuple(DTYPES), (groups, dims[0]))
    packed = PackedRows(
        f"{bits} bits",
        columns,
        weight.array.T if is_gptq else _awq_rows(weight),
        scales.array.T,
        scales.dtype,
        zeros=_gptq_zeros(zeros, rows, settings) if is_gptq else _awq_order(zeros),
        group_of=_gptq_groups(parts, dims[1], size, settings) if is_gptq else None,
    )
    form = f"{settings.method}-{bits}bit-{f'g{settings.group_size}' if settings.group_size else 'channel'}"
    return replace(weight, name=parts.called("weight"), dtype=form, values=packed)


def _gptq_zeros(stored: StoredTensor, rows: int, settings: AutoSettings) -> NDArray[np.integer]:
    """[rows, groups]"""
    stored_codes = unpacked(stored.array, settings.bits)[:, :rows]
    top, middle = 2**settings.bits - 1, 2 ** (settings.bits - 1)
    if settings.zero_offset and np.any(stored_codes == top):
        means = f"{top + 1} to some readers and 0 to others"
        raise stored.wrong(f"a zero of {top} in checkpoint_format gptq, which is {means}")
    zeros = stored_codes.T.astype(np.int16) + np.int16(settings.zero_offset)
    if settings.symmetric and np.any(zeros != middle):
        other = int(zeros[zeros != middle][0])
        raise stored.wrong(f"a zero of {other}, expected {middle} from sym=true (config.json)")
    return zeros


def _gptq_groups(parts: Parts, columns: Dim, size: int, settings: AutoSettings) -> NDArray[np.int64] | None:
    """The group of each column: those of g_idx, which files without desc_act may leave out."""
    key, expected = "desc_act=true", np.arange(columns[0], dtype=np.int64) // size
    if settings.has_order:
        return parts.groups_of_columns("g_idx", key, columns, int(expected[-1]))
    if "g_idx" in parts:
        stored = parts.take("g_idx", key, INTEGERS, (columns,))
        if not np.array_equal(stored.array.astype(np.int64), expected):
            why = f"group_size={size} of each group in turn from desc_act=false (config.json)"
            raise stored.wrong(f"columns in another order, expected {why}")
    return None


def _awq_rows(stored: StoredTensor) -> NDArray[np.uint8]:
    """Codes packed anew, rows first, two in a byte: a slice of rows would else begin within words."""
    codes = np.ascontiguousarray(_awq_order(stored))  # [rows, columns]
    return codes[:, ::2] | codes[:, 1::2] << np.uint8(4)


def _awq_order(stored: StoredTensor) -> NDArray[np.uint8]:
    """[n, outputs/8] packed -> [outputs, n]"""
    codes = unpacked(stored.array, 4)
    return codes.reshape(len(codes), -1, 8)[:, :, AWQ_PLACES].reshape(len(codes), -1).T
