"""Our matrices among the tensors of compressed-tensors.

Format pack-quantized: `weight_packed` (int32, codes from the lowest bit on, counted from -2**(bits-1)), `weight_shape`,
and with zero points `weight_zero_point`, packed along the rows; with actorder=group `weight_g_idx`, the group of each
column. The other formats: `weight` (int8 or float8 E4M3), with zero points `weight_zero_point` (int8). All of them
have `weight_scale`, of the whole, of each row, of groups of columns or of blocks, and where inputs are rounded by a
scale that is told, `input_scale`. Source: the package compressed-tensors, compressors/pack_quantized,
compressors/naive_quantized, quantization/lifecycle/forward.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.layout import origins_of
from lfm2np.checkpoint.packed.matrix_parts import INTEGERS, Dims, Parts, groups_of_columns, packed_dim
from lfm2np.checkpoint.packed.rows import PackedRows, numbers, unpacked
from lfm2np.checkpoint.packed.settings import Args, CompressedSettings, Scheme
from lfm2np.checkpoint.stored import DTYPES, Array, StoredTensor
from lfm2np.truth.layers import Dim


def read_matrix(parts: Parts, dims: Dims, settings: CompressedSettings) -> StoredTensor | None:
    """None of a module that is not quantised. CheckpointError names the file, the tensor and the key."""
    name = parts.module.name
    scheme = settings.of(parts.module.names, class_of(name))
    if scheme is None:
        _require_none(parts, settings)
        return None
    return _matrix(parts, dims, scheme) if "weight_scale" in parts or not may_be_plain(name) else None


def class_of(module: str) -> str:
    """In transformers, as targets name it."""
    return "Embedding" if module.endswith(".embed_tokens") else "Linear"


def may_be_plain(module: str) -> bool:
    """Routers and experts, which are of class Linear in some versions of transformers and not in others."""
    return module.endswith(".feed_forward.gate") or ".experts." in module


def _require_none(parts: Parts, settings: CompressedSettings) -> None:
    is_ignored = settings.is_ignored(parts.module.names, class_of(parts.module.name))
    for part in ("weight_packed", "weight_scale"):
        if part in parts:
            why = "ignore names it" if is_ignored else "no target matches it"
            raise parts[part].wrong(f"expected none, as {why} (config.json)")


def _matrix(parts: Parts, dims: Dims, scheme: Scheme) -> StoredTensor:
    form, (rows, columns) = scheme.weights, dims
    is_packed = scheme.format == "pack-quantized"
    if is_packed:
        words = packed_dim(columns, form.bits, f"{form.key}.num_bits")
        stored = parts.take("weight_packed", f"format={scheme.format}", ("I32",), (rows, words))
        _require_told_shape(parts, dims)
    else:
        stored = parts.take("weight", f"{form.key}.type", ("F8_E4M3",) if form.is_float else ("I8",), dims)
    scales, dtype = _scales(parts, dims, form)
    packed = PackedRows(
        f"{form.bits} bits" if is_packed else "float8" if form.is_float else "int8",
        columns[0],
        stored.array,
        scales,
        dtype,
        zeros=_zeros(parts, dims, form, is_packed),
        group_of=_groups(parts, dims, form),
    )
    if scheme.inputs is not None:
        input_scale(parts, scheme.inputs)
    return replace(stored, name=parts.called("weight"), dtype=_told(form), values=packed)


def _told(form: Args) -> str:
    kind = "float8" if form.is_float else f"int{form.bits}"
    size = {"group": f"g{form.group_size}", "block": f"block{form.block[0]}x{form.block[1]}"}
    return f"{kind}-{size.get(form.strategy, form.strategy)}{'' if form.symmetric else '-zero'}"


def _require_told_shape(parts: Parts, dims: Dims) -> None:
    stored = parts.take("weight_shape", "format=pack-quantized", INTEGERS, ((2, "dimensions of a matrix"),))
    shape, expected = tuple(stored.array.tolist()), (dims[0][0], dims[1][0])
    if shape != expected:
        raise stored.wrong(f"{shape}, expected {expected} from {origins_of(dims)}")


def _scale_dims(parts: Parts, dims: Dims, form: Args) -> tuple[Dim, ...]:
    rows, (columns, origin) = dims
    strategy = f"{form.key}.strategy={form.strategy}"
    if form.strategy == "tensor":
        return ((1, strategy),)
    if form.strategy == "channel":
        return (rows, (1, strategy))
    if form.strategy == "block":
        key = f"{form.key}.block_structure"
        high, wide = form.block
        return (-(-rows[0] // high), f"{rows[1]}/{key}"), (-(-columns // wide), f"{origin}/{key}")
    if columns % form.group_size:
        expected = f"a multiple of {form.key}.group_size={form.group_size} (config.json)"
        raise parts.wrong("weight", f"{origin}={columns}, expected {expected}")
    return rows, (columns // form.group_size, f"{origin}/{form.key}.group_size")


def _scales(parts: Parts, dims: Dims, form: Args) -> tuple[Array, str]:
    """[rows, groups], and their dtype."""
    key, expected = f"{form.key}.strategy", _scale_dims(parts, dims, form)
    if form.strategy == "tensor":
        stored = parts.take_number("weight_scale", key, tuple(DTYPES), expected[0][1])
    else:
        stored = parts.take("weight_scale", key, tuple(DTYPES), expected)
    return _by_row(stored.array, dims, form), stored.dtype


def _by_row(values: Array, dims: Dims, form: Args) -> Array:
    """What a tensor, a row, a group or a block shares, for each row: [rows, groups]."""
    rows = dims[0][0]
    if form.strategy == "tensor":
        return np.broadcast_to(values.reshape(1, 1), (rows, 1))
    return values[np.arange(rows) // form.block[0]] if form.strategy == "block" else values


def _zeros(parts: Parts, dims: Dims, form: Args, is_packed: bool) -> NDArray[np.integer] | int:
    """Of each group, counted as codes are: packed ones from 0 on."""
    if form.symmetric:
        return 2 ** (form.bits - 1) if is_packed else 0
    key, expected = f"{form.key}.symmetric=false", _scale_dims(parts, dims, form)
    if not is_packed:
        stored = parts.take("weight_zero_point", key, ("I8",), expected)
        return np.asarray(_by_row(stored.array, dims, form), np.int8)
    rows, groups = expected
    words = packed_dim(rows, form.bits, f"{form.key}.num_bits")
    stored = parts.take("weight_zero_point", key, ("I32",), (words, groups))
    return unpacked(stored.array.T, form.bits)[:, : rows[0]].T


def _groups(parts: Parts, dims: Dims, form: Args) -> NDArray[np.int64] | None:
    columns = dims[1][0]
    if form.strategy == "block":
        return np.arange(columns, dtype=np.int64) // form.block[1]
    if not form.has_order:
        return None
    last = columns // form.group_size - 1
    return groups_of_columns(parts, "weight_g_idx", f"{form.key}.actorder", dims[1], last)


def input_scale(parts: Parts, inputs: Args) -> tuple[float | None, int]:
    """The static scale of a product's inputs and its zero; none where each run finds its own."""
    if inputs.dynamic:
        return None, 0
    strategy = f"{inputs.key}.strategy=tensor"
    stored = parts.take_number("input_scale", f"{inputs.key}.dynamic=false", tuple(DTYPES), strategy)
    scale = float(numbers(stored.array.reshape(-1), stored.dtype)[0])
    if not 0.0 < scale < float("inf"):
        raise stored.wrong(f"{scale}, expected a positive number")
    if inputs.symmetric:
        return scale, 0
    zero = parts.take_number("input_zero_point", f"{inputs.key}.symmetric=false", ("I8",), strategy)
    return scale, int(zero.array.reshape(-1)[0])
