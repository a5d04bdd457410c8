"""A matrix of a directory that mlx-lm wrote: `weight` (uint32) with `scales` and, in mode affine, `biases` beside it.

Source: mlx.core.quantize; mlx_lm/utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lfm2np.checkpoint.packed.matrix_parts import Dims, Parts, modules, packed_dim
from lfm2np.checkpoint.packed.rows import PackedRows
from lfm2np.checkpoint.packed.settings import KEY, MlxSettings
from lfm2np.checkpoint.stored import DTYPES, StoredTensor
from lfm2np.errors import CheckpointError, ConfigError
from lfm2np.truth.config import ModelConfig
from lfm2np.values import show

SCALE_DTYPES = {"mxfp4": "F8_E8M0", "mxfp8": "F8_E8M0", "nvfp4": "F8_E4M3"}  # uint8 in the file
CODINGS = {"mxfp4": "float4", "mxfp8": "float8", "nvfp4": "float4"}


def require_modules(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, settings: MlxSettings, source: str
) -> None:
    """ConfigError for settings of a module that the model does not have."""
    known = {name for _, parts, _ in modules(tensors, source, config) for name in parts.names}
    for path in sorted(settings.modules.keys() - known)[:1]:
        raise ConfigError(f"{source}: {KEY}.{show(path)} (config.json): there is no such module in this model")


def read_matrix(parts: Parts, dims: Dims, settings: MlxSettings) -> StoredTensor | None:
    """None of a module that is not quantised. CheckpointError names the file, the tensor and the key."""
    key, form = settings.of(parts.names)
    if "scales" not in parts:
        if "weight" not in parts or (parts["weight"].dtype != "U32" and (key is None or form is None)):
            return None
        why = f"{form.key} (config.json)" if form and key else f"dtype {parts['weight'].dtype} of weight"
        raise CheckpointError(f"{parts.source}: missing {parts.called('scales')}, expected it from {why}")
    if form is None:
        raise parts["scales"].wrong(f"expected none from {KEY}.{show(key)}=false (config.json)")
    *rows, (columns, origin) = dims
    if not rows or (len(dims) == 3 and "conv" in parts.name.split(".")):
        raise parts["scales"].wrong("only matrices are quantised, expected none")
    if columns % form.group_size:
        expected = f"a multiple of {form.key}.group_size={form.group_size}"
        raise parts.wrong("weight", f"rows of {origin}={columns} numbers, expected {expected}")
    key, is_affine = f"{form.key}.mode={form.mode}", form.mode == "affine"
    grouped = (*rows, (columns // form.group_size, f"{origin}/{form.key}.group_size"))
    weight = parts.take("weight", key, ("U32",), (*rows, packed_dim((columns, origin), form.bits, f"{form.key}.bits")))
    scales = parts.take("scales", key, tuple(DTYPES) if is_affine else ("U8",), grouped)
    packed = PackedRows(
        CODINGS.get(form.mode, f"{form.bits} bits"),
        columns,
        weight.array,
        scales.array,
        SCALE_DTYPES.get(form.mode, scales.dtype),
        biases=parts.take("biases", key, (scales.dtype,), grouped).array if is_affine else None,
    )
    bits = f"{form.bits}bit-" if is_affine else ""
    return replace(weight, dtype=f"{form.mode}-{bits}g{form.group_size}", values=packed)
