"""The tensors of a directory that mlx-lm wrote under our names: quantised, or only called and shaped otherwise.

A module's `weight` (uint32) has `scales` and, in mode affine, `biases` beside it. Taps of a convolution are [D, L, 1].
Of an lfm2_moe, mlx-lm calls w1, w2, w3 gate_proj, down_proj, up_proj, and stacks those of a layer's experts under
switch_mlp. Source: mlx_lm/models/lfm2.py and lfm2_moe.py, sanitize; mlx.core.quantize.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from lfm2np.checkpoint.layout import Place, experts_of, part_of, whole_dims
from lfm2np.checkpoint.packed.matrix_parts import Parts, packed_dim, parts_of
from lfm2np.checkpoint.packed.rows import PackedRows
from lfm2np.checkpoint.packed.settings import KEY, MlxFormat, MlxSettings
from lfm2np.checkpoint.stored import DTYPES, StoredTensor
from lfm2np.errors import CheckpointError, ConfigError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import Dim, layout_of
from lfm2np.truth.weights import EMBEDDING, HEAD
from lfm2np.values import plain, show

PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
SCALE_DTYPES = {"mxfp4": "F8_E8M0", "mxfp8": "F8_E8M0", "nvfp4": "F8_E4M3"}  # uint8 in the file
CODINGS = {"mxfp4": "float4", "mxfp8": "float8", "nvfp4": "float4"}
FEED_FORWARD = re.compile(r"(model\.layers\.[0-9]+\.feed_forward)(?:\.experts\.([0-9]+))?\.(w[123])\.weight")


def place_of(name: str, config: ModelConfig) -> Place:
    matched = FEED_FORWARD.fullmatch(name)
    if config.mixture is None or matched is None:
        return Place(name)
    prefix, expert, part = matched.groups()
    if expert is None:
        return Place(f"{prefix}.{PROJECTIONS[part]}.weight")
    return Place(f"{prefix}.switch_mlp.{PROJECTIONS[part]}.weight", int(expert))


def has_their_names(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a directory without quantised tensors is one of an lfm2_moe that mlx-lm wrote."""
    return any(f".{projection}.weight" in name for name in tensors for projection in PROJECTIONS.values())


def with_our_taps(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    layout = layout_of(config)
    return {name: _taps(tensor, layout.get(name, ())) for name, tensor in tensors.items()}


def in_our_names(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, settings: MlxSettings | None, source: str
) -> dict[str, StoredTensor]:
    """What is not one of theirs keeps its name. CheckpointError names the file, the tensor and the key."""
    layout = layout_of(config)
    if HEAD in tensors:
        layout[HEAD] = layout[EMBEDDING]
    places = {name: place_of(name, config) for name in layout}
    theirs = parts_of({place.name: None for place in places.values()}, tensors, source)
    known = {name for parts in theirs.values() for name in parts.names}
    for path in sorted(() if settings is None else settings.modules.keys() - known)[:1]:
        raise ConfigError(f"{source}: {KEY}.{show(path)} (config.json): there is no such module in this model")
    whole: dict[str, StoredTensor] = {}  # by their name
    used: set[str] = set()
    ours: dict[str, StoredTensor] = {}
    for name, place in places.items():
        if place.name not in tensors:
            if place.name != name:
                raise CheckpointError(f"{source}: missing {place.name}, which mlx-lm's checkpoints have for {name}")
            continue  # told with the others that are missing
        dims, experts = layout[name], experts_of(config)
        if place.name not in whole:
            whole[place.name] = _whole(theirs[place.name], place.name, whole_dims(place, dims, experts), settings)
            used |= theirs[place.name].used
        stored = whole[place.name]
        ours[name] = stored if place == Place(name) else part_of(stored, place, name, dims, experts)
    for name in sorted(tensors.keys() - used):
        if name in ours:
            where = tensors[name].source
            raise CheckpointError(f"{where}: {plain(name)} stands beside {places[name].name}, expected one of them")
        ours[name] = tensors[name]
    return ours


def _whole(parts: Parts, name: str, dims: tuple[Dim, ...], settings: MlxSettings | None) -> StoredTensor:
    """One of theirs, with the tensors that belong to it."""
    weight = parts.tensors[name]
    parts.used.add(name)
    if settings is None:
        return _taps(weight, dims)
    key, form = settings.of(parts.names)
    if "scales" not in parts:
        if weight.dtype != "U32" and (key is None or form is None):
            return _taps(weight, dims)
        source = form.key if key and form else f"dtype {weight.dtype}"
        missing = f"missing {parts.called('scales')} beside {weight.name}"
        raise CheckpointError(f"{weight.source}: {missing}, expected it from {source}")
    if form is None:
        raise parts["scales"].wrong(f"expected none from {KEY}.{show(key)}=false (config.json)")
    return _quantised(parts, dims, form)


def _taps(stored: StoredTensor, dims: tuple[Dim, ...]) -> StoredTensor:
    """[D, L, 1] as [D, 1, L]; all else as it is."""
    if not is_of_taps(dims) or stored.shape != (dims[0][0], dims[2][0], 1) or stored.is_quantised:
        return stored
    return replace(stored, values=stored.array.swapaxes(1, 2))


def is_of_taps(dims: tuple[Dim, ...]) -> bool:
    return len(dims) == 3 and dims[1][1] == "depthwise"


def _quantised(parts: Parts, dims: tuple[Dim, ...], form: MlxFormat) -> StoredTensor:
    *rows, (columns, origin) = dims
    if len(dims) == 1 or is_of_taps(dims):
        raise parts["scales"].wrong("only matrices are quantised, expected none")
    if columns % form.group_size:
        expected = f"a multiple of {form.key}.group_size={form.group_size}"
        raise parts["weight"].wrong(f"rows of {origin}={columns} numbers, expected {expected}")
    key, is_affine = f"{form.key}.mode={form.mode}", form.mode == "affine"
    grouped = (*rows, (columns // form.group_size, f"{origin}/{form.key}.group_size"))
    weight = parts.take("weight", key, ("U32",), (*rows, packed_dim((columns, origin), form.bits, f"{form.key}.bits")))
    scales = parts.take("scales", key, tuple(DTYPES) if is_affine else ("U8",), grouped)
    if is_affine and "biases" not in parts:
        missing = f"missing {parts.called('biases')} beside {scales.name}"
        raise CheckpointError(f"{scales.source}: {missing}, expected it from {key}")
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
