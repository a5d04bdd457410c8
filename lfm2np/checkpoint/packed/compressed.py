"""Our matrices among the tensors of compressed-tensors.

Format pack-quantized: `weight_packed` (int32, codes from the lowest bit on, counted from -2**(bits-1)), `weight_shape`,
and with zero points `weight_zero_point`, packed along the rows; with actorder=group `weight_g_idx`, the group of each
column. The other formats: `weight` (int8 or float8 E4M3), with zero points `weight_zero_point` (int8). All of them
have `weight_scale`, of the whole, of each row, of groups of columns or of blocks, and where inputs are rounded by a
scale that is told, `input_scale`. Source: the package compressed-tensors, compressors/pack_quantized,
compressors/naive_quantized, quantization/lifecycle/forward.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.layout import Module, modules_of, origins_of, require_shape
from lfm2np.checkpoint.packed.compressed_settings import CompressedSettings, Inputs, Scheme, Weights
from lfm2np.checkpoint.packed.rows import Array, PackedRows, numbers, packed_words, unpacked
from lfm2np.checkpoint.stored import DTYPES, StoredTensor
from lfm2np.errors import CheckpointError
from lfm2np.model.config import ModelConfig
from lfm2np.model.layers import Dim, layout_of
from lfm2np.model.weights import EMBEDDING, HEAD

Dims = tuple[Dim, Dim]
INTEGERS = ("I32", "I64")


def with_matrices(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, settings: CompressedSettings, source: str
) -> dict[str, StoredTensor]:
    """What is no part of a quantised matrix keeps its name. CheckpointError names the file, the tensor and the key."""
    found = dict(tensors)
    for module, dims in matrices(tensors, config):
        scheme = settings.of(module.names, class_of(module.name))
        if scheme is None:
            _require_none(tensors, module, settings)
        elif f"{module.name}.weight_scale" in tensors or not may_be_plain(module.name):
            parts = Parts(tensors, module, source)
            found[f"{module.name}.weight"] = _matrix(parts, dims, scheme)
            for name in parts.used - {f"{module.name}.weight"}:
                del found[name]
    return found


def matrices(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> Iterator[tuple[Module, Dims]]:
    """A tied head counts if the file has one."""
    layout = layout_of(config)
    if any(name.startswith(HEAD) for name in tensors):
        layout[HEAD] = layout[EMBEDDING]
    weights = {name: (dims[0], dims[1]) for name, dims in layout.items() if len(dims) == 2}
    yield from zip(modules_of(weights, tensors), weights.values(), strict=True)


def class_of(module: str) -> str:
    """In transformers, as targets name it."""
    return "Embedding" if module.endswith(".embed_tokens") else "Linear"


def may_be_plain(module: str) -> bool:
    """Routers and experts, which are of class Linear in some versions of transformers and not in others."""
    return module.endswith(".feed_forward.gate") or ".experts." in module


class Parts:
    """The tensors of one module by what they are, and which of them were used."""

    def __init__(self, tensors: Mapping[str, StoredTensor], module: Module, source: str):
        self.tensors, self.module, self.source = tensors, module, source
        self.used: set[str] = set()

    def take(self, part: str, key: str, dtypes: tuple[str, ...]) -> StoredTensor:
        name = f"{self.module.name}.{part}"
        if name not in self.tensors:
            raise CheckpointError(f"{self.source}: missing {self.called(part)}, expected it from {key} (config.json)")
        self.used.add(name)
        one = self.tensors[name]
        if one.dtype not in dtypes:
            raise one.wrong(f"dtype {one.dtype}, expected {' or '.join(dtypes)} from {key} (config.json)")
        return one

    def called(self, part: str) -> str:
        return f"{self.module.called}.{part}"

    def wrong(self, part: str, text: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {self.called(part)}: {text}")


def _require_none(tensors: Mapping[str, StoredTensor], module: Module, settings: CompressedSettings) -> None:
    is_ignored = settings.is_ignored(module.names, class_of(module.name))
    for part in ("weight_packed", "weight_scale"):
        if one := tensors.get(f"{module.name}.{part}"):
            why = "ignore names it" if is_ignored else "no target matches it"
            raise one.wrong(f"expected none, as {why} (config.json)")


def _matrix(parts: Parts, dims: Dims, scheme: Scheme) -> StoredTensor:
    form, (rows, columns) = scheme.weights, dims
    is_packed = scheme.format == "pack-quantized"
    if is_packed:
        stored = parts.take("weight_packed", f"format={scheme.format}", ("I32",))
        words = packed_words(form.bits, columns[0]), f"{columns[1]}*{form.key}.num_bits/32"
        require_shape(stored, (rows, words))
        _require_told_shape(parts, dims)
    else:
        stored = parts.take("weight", f"{form.key}.type", ("F8_E4M3",) if form.is_float else ("I8",))
        require_shape(stored, dims)
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


def _told(form: Weights) -> str:
    kind = "float8" if form.is_float else f"int{form.bits}"
    size = {"group": f"g{form.group_size}", "block": f"block{form.block[0]}x{form.block[1]}"}
    return f"{kind}-{size.get(form.strategy, form.strategy)}{'' if form.symmetric else '-zero'}"


def _require_told_shape(parts: Parts, dims: Dims) -> None:
    one = parts.take("weight_shape", "format=pack-quantized", INTEGERS)
    require_shape(one, ((2, "dimensions of a matrix"),))
    told, expected = tuple(one.array.tolist()), (dims[0][0], dims[1][0])
    if told != expected:
        raise one.wrong(f"{told}, expected {expected} from {origins_of(dims)}")


def _scale_dims(parts: Parts, dims: Dims, form: Weights) -> tuple[Dim, ...]:
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


def _scales(parts: Parts, dims: Dims, form: Weights) -> tuple[Array, str]:
    """[rows, groups], and their dtype."""
    stored = parts.take("weight_scale", f"{form.key}.strategy", tuple(DTYPES))
    expected = _scale_dims(parts, dims, form)
    values = stored.array
    if form.strategy == "tensor":
        if stored.shape != ():
            require_shape(stored, expected)
        return np.broadcast_to(values.reshape(1, 1), (dims[0][0], 1)), stored.dtype
    require_shape(stored, expected)
    return (values[np.arange(dims[0][0]) // form.block[0]] if form.strategy == "block" else values), stored.dtype


def _zeros(parts: Parts, dims: Dims, form: Weights, is_packed: bool) -> NDArray[np.integer] | int:
    """Of each group, counted as codes are: packed ones from 0 on."""
    if form.symmetric:
        return 2 ** (form.bits - 1) if is_packed else 0
    key, expected = f"{form.key}.symmetric=false", _scale_dims(parts, dims, form)
    if not is_packed:
        stored = parts.take("weight_zero_point", key, ("I8",))
        require_shape(stored, expected)
        values = np.asarray(stored.array, np.int8)
        if form.strategy == "tensor":
            values = np.broadcast_to(values.reshape(1, 1), (dims[0][0], 1))
        return values[np.arange(dims[0][0]) // form.block[0]] if form.strategy == "block" else values
    stored = parts.take("weight_zero_point", key, ("I32",))
    rows, groups = expected
    require_shape(stored, ((packed_words(form.bits, rows[0]), f"{rows[1]}*{form.key}.num_bits/32"), groups))
    return unpacked(stored.array.T, form.bits)[:, : rows[0]].T


def _groups(parts: Parts, dims: Dims, form: Weights) -> NDArray[np.int64] | None:
    columns = dims[1][0]
    if form.strategy == "block":
        return np.arange(columns, dtype=np.int64) // form.block[1]
    if not form.has_order:
        return None
    stored = parts.take("weight_g_idx", f"{form.key}.actorder", INTEGERS)
    return group_of_columns(stored, dims[1], columns // form.group_size - 1)


def group_of_columns(stored: StoredTensor, columns: Dim, last: int) -> NDArray[np.int64]:
    require_shape(stored, (columns,))
    groups = stored.array.astype(np.int64)
    for bad in np.flatnonzero((groups < 0) | (groups > last))[:1]:
        raise stored.wrong(f"group {int(groups[bad])} of column {int(bad)}, expected 0 to {last}")
    return groups


def input_scale(parts: Parts, inputs: Inputs) -> tuple[float | None, int]:
    """The static scale of a product's inputs and its zero; none where each run finds its own."""
    if inputs.dynamic:
        return None, 0
    key = f"{inputs.key}.dynamic=false"
    stored = parts.take("input_scale", key, tuple(DTYPES))
    if stored.shape != ():
        require_shape(stored, ((1, f"{inputs.key}.strategy=tensor"),))
    scale = float(numbers(stored.array.reshape(-1), stored.dtype)[0])
    if not 0.0 < scale < float("inf"):
        raise stored.wrong(f"{scale}, expected a positive number")
    if inputs.symmetric:
        return scale, 0
    zero = parts.take("input_zero_point", f"{inputs.key}.symmetric=false", ("I8",))
    if zero.shape != ():
        require_shape(zero, ((1, f"{inputs.key}.strategy=tensor"),))
    return scale, int(zero.array.reshape(-1)[0])
