"""Our matrices among the tensors of compressed-tensors.

Format pack-quantized: `weight_packed` (int32, codes from the lowest bit on, counted from -2**(bits-1)), `weight_shape`,
and with zero points `weight_zero_point`, packed along the rows; with actorder=group `weight_g_idx`, the group of each
column. The other formats: `weight` (int8 or float8 E4M3), with zero points `weight_zero_point` (int8). All of them
have `weight_scale`, of the whole, of each row, of groups of columns or of blocks, and where inputs are rounded by a
static scale (W8A8, FP8: nothing of that is computed here, the exact model rounds no inputs), `input_scale`.
Source: the package compressed-tensors, compressors/pack_quantized,
compressors/naive_quantized, quantization/lifecycle/forward.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.packed.matrix_parts import INTEGERS, Dims, Parts, packed_dim
from lfm2np.checkpoint.packed.rows import PackedRows, numbers, unpacked
from lfm2np.checkpoint.packed.settings import Args, CompressedSettings, Scheme
from lfm2np.checkpoint.stored import DTYPES, Array, StoredTensor
from lfm2np.truth.layers import Dim


def class_of(module: str) -> str:
    """In transformers, as targets name it."""
    return "Embedding" if module.endswith(".embed_tokens") else "Linear"


def read_matrix(parts: Parts, dims: Dims, settings: CompressedSettings) -> StoredTensor | None:
    """None of a module that is not quantised. CheckpointError names the file, the tensor and the key."""
    if len(dims) != 2:
        return None
    names, kind = parts.names, class_of(parts.name)
    scheme = settings.of(names, kind)
    if scheme is None:
        for part in ("weight_packed", "weight_scale"):
            if part in parts:
                why = "ignore names it" if settings.is_ignored(names, kind) else "no target matches it"
                raise parts[part].wrong(f"expected none, as {why} (config.json)")
        return None
    # Routers and experts are of class Linear in some versions of transformers, and not in others.
    may_be_plain = parts.name.endswith(".feed_forward.gate") or ".experts." in parts.name
    return None if may_be_plain and "weight_scale" not in parts else _matrix(parts, dims, scheme)


def _matrix(parts: Parts, dims: Dims, scheme: Scheme) -> StoredTensor:
    form, (rows, columns) = scheme.weights, dims
    is_packed = scheme.format == "pack-quantized"
    if is_packed:
        words = packed_dim(columns, form.bits, f"{form.key}.num_bits")
        stored = parts.take("weight_packed", f"format={scheme.format}", ("I32",), (rows, words))
        told = parts.take("weight_shape", "format=pack-quantized", INTEGERS, ((2, "dimensions of a matrix"),))
        if (shape := tuple(told.array.tolist())) != (rows[0], columns[0]):
            raise told.wrong(f"{shape}, expected {(rows[0], columns[0])} from {rows[1]} and {columns[1]}")
    else:
        stored = parts.take("weight", f"{form.key}.type", ("F8_E4M3",) if form.is_float else ("I8",), dims)
    grouped = _scale_dims(parts, dims, form)
    scales = parts.take("weight_scale", f"{form.key}.strategy", DTYPES, grouped)
    packed = PackedRows(
        f"{form.bits} bits" if is_packed else "float8" if form.is_float else "int8",
        columns[0],
        stored.array,
        _by_row(scales.array, rows[0], form),
        scales.dtype,
        zeros=_zeros(parts, rows, grouped, form, is_packed),
        group_of=_groups(parts, columns, form),
    )
    if scheme.inputs is not None:
        rounding_of_inputs(parts, scheme.inputs)
    kind = "float8" if form.is_float else f"int{form.bits}"
    size = {"group": f"g{form.group_size}", "block": f"block{form.block[0]}x{form.block[1]}"}
    dtype = f"{kind}-{size.get(form.strategy, form.strategy)}{'' if form.symmetric else '-zero'}"
    return replace(stored, name=parts.called("weight"), dtype=dtype, values=packed)


def _scale_dims(parts: Parts, dims: Dims, form: Args) -> tuple[Dim, ...]:
    rows, (columns, origin) = dims
    strategy = f"{form.key}.strategy={form.strategy}"
    if form.strategy == "tensor":
        return ((1, strategy),)
    if form.strategy == "channel":
        return (rows, (1, strategy))
    if form.strategy == "block":
        key, (high, wide) = f"{form.key}.block_structure", form.block
        return (-(-rows[0] // high), f"{rows[1]}/{key}"), (-(-columns // wide), f"{origin}/{key}")
    if columns % form.group_size:
        expected = f"a multiple of {form.key}.group_size={form.group_size} (config.json)"
        raise parts.wrong("weight", f"{origin}={columns}, expected {expected}")
    return rows, (columns // form.group_size, f"{origin}/{form.key}.group_size")


def _by_row(values: Array, rows: int, form: Args) -> Array:
    """What a tensor, a row, a group or a block shares, for each row: [rows, groups]."""
    if form.strategy == "tensor":
        return np.broadcast_to(values.reshape(1, 1), (rows, 1))
    return values[np.arange(rows) // form.block[0]] if form.strategy == "block" else values


def _zeros(parts: Parts, rows: Dim, grouped: tuple[Dim, ...], form: Args, is_packed: bool) -> NDArray[np.integer] | int:
    """Of each group, counted as codes are: packed ones from 0 on."""
    key = f"{form.key}.symmetric=false"
    if form.symmetric:
        return 2 ** (form.bits - 1) if is_packed else 0
    if not is_packed:
        stored = parts.take("weight_zero_point", key, ("I8",), grouped)
        return np.asarray(_by_row(stored.array, rows[0], form), np.int8)
    words = packed_dim(rows, form.bits, f"{form.key}.num_bits")
    stored = parts.take("weight_zero_point", key, ("I32",), (words, grouped[1]))
    return unpacked(stored.array.T, form.bits)[:, : rows[0]].T


def _groups(parts: Parts, columns: Dim, form: Args) -> NDArray[np.int64] | None:
    if form.strategy == "block":
        return np.arange(columns[0], dtype=np.int64) // form.block[1]
    if not form.has_order:
        return None
    return parts.groups_of_columns("weight_g_idx", f"{form.key}.actorder", columns, columns[0] // form.group_size - 1)


@dataclass(frozen=True)
class InputRounding:
    """Of one product's inputs: each is  scale * (code - zero)  with the nearest code.

    kind        "int8" (codes -128 to 127) or "float8" (E4M3, to 448)
    of          what shares a scale: "tensor" (all inputs of a step), "token" (a row), or "group" of columns in a row
    group_size  columns of a group; 0 of the other two
    scale       the static one; None where it is dynamic: of the largest input, or of the least and the largest if
                not symmetric, by a rule of the engine
    zero        with a static scale; 0 if symmetric
    symmetric   whether the zero is 0
    """

    kind: str
    of: str
    group_size: int
    scale: float | None
    zero: int
    symmetric: bool


def rounding_of_inputs(parts: Parts, inputs: Args) -> InputRounding:
    """Of one product; its static scale and zero are in the file."""
    scale, zero = None, 0
    if not inputs.dynamic:
        one = ((1, f"{inputs.key}.strategy=tensor"),)
        stored = parts.take("input_scale", f"{inputs.key}.dynamic=false", DTYPES, one)
        scale = float(numbers(stored.array.reshape(-1), stored.dtype)[0])
        if not 0.0 < scale < float("inf"):
            raise stored.wrong(f"{scale}, expected a positive number")
        if not inputs.symmetric:
            stored = parts.take("input_zero_point", f"{inputs.key}.symmetric=false", ("I8",), one)
            zero = int(stored.array.reshape(-1)[0])
    kind = f"{inputs.type}{inputs.bits}"
    return InputRounding(kind, inputs.strategy, inputs.group_size, scale, zero, inputs.symmetric)
