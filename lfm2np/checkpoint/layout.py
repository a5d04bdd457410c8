"""Where our tensors stand in a file, and that all of them are there and nothing else, each of the shape it must have.

One of ours is a tensor of the file, one expert of it, or some of its rows. names.py and gguf/names.py say which; what
is missing, unexpected or of another shape or type is refused here, by the file's names, with the keys that say so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lfm2np.checkpoint.stored import DTYPES, StoredTensor
from lfm2np.errors import CheckpointError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import Dim
from lfm2np.values import plain


class Place(NamedTuple):
    """Where one of our tensors stands in a file: in which of its tensors, as which expert of it, in which rows.

    first, rows  where the file has several of ours below each other: the first row of ours, and how many there are
    axes         which of our axes the file has, in its order, where it has taps [D, 1, L] as [D, L, 1] or [D, L]
    """

    name: str
    expert: int | None = None
    first: int = 0
    rows: Dim | None = None
    axes: tuple[int, ...] | None = None


Plan = Mapping[str, tuple[Place, tuple[Dim, ...]]]  # our name -> where it stands, and its dimensions here


def whole_dims(place: Place, dims: tuple[Dim, ...], experts: Dim) -> tuple[Dim, ...]:
    """Of the file's tensor, where ours has `dims` and a layer so many experts."""
    if place.axes is not None:
        return tuple(dims[axis] for axis in place.axes)
    dims = dims if place.rows is None else (place.rows, *dims[1:])
    return dims if place.expert is None else (experts, *dims)


def experts_of(config: ModelConfig) -> Dim:
    return (0 if config.mixture is None else config.mixture.num_experts), "num_experts"


def collected(
    tensors: Mapping[str, StoredTensor],
    plan: Plan,
    config: ModelConfig,
    source: str,
    spelled: Callable[[str], str] = str,
) -> dict[str, StoredTensor]:
    """Ours, as views of the file's. CheckpointError for one too few or too many, or of another shape or type.

    spelled  keys of config.json in a text -> as the file has them
    """
    number, origin = experts_of(config)
    experts = number, spelled(origin)
    whole = {place.name: whole_dims(place, dims, experts) for place, dims in plan.values()}
    missing, unexpected = whole.keys() - tensors, tensors.keys() - whole
    if missing or unexpected:
        name = min(missing or unexpected)
        names = sorted(missing or {tensors[each].name for each in unexpected})
        shape = tuple(size for size, _ in whole[name]) if missing else tensors[name].shape
        what = f"missing {len(names)} of" if missing else f"{len(names)} unexpected beside"
        listed = ", ".join(map(plain, names[:5])) + (", ..." if len(names) > 5 else "")
        why = f"the first of shape {shape}; {spelled(facts_of(name, config))}"
        raise CheckpointError(f"{source}: {what} the {len(whole)} tensors: {listed} ({why})")
    for name, dims in whole.items():
        require_shape(tensors[name], dims)
    return {name: part_of(tensors[place.name], place, name, dims) for name, (place, dims) in plan.items()}


def part_of(whole: StoredTensor, place: Place, name: str, dims: tuple[Dim, ...]) -> StoredTensor:
    """Ours as a view, whose source names what the file has."""
    if not whole.is_quantised and whole.dtype not in DTYPES:
        raise whole.wrong(f"dtype {whole.dtype}, expected one of {', '.join(DTYPES)} of what is not quantised")
    if whole.is_quantised and len(dims) != 2:
        raise whole.wrong(f"{whole.dtype}, expected {', '.join(DTYPES)} of what is no matrix")
    if place.name == name and whole.name == name and place.axes is None:
        return whole
    values, number = (whole.values, "") if place.expert is None else (whole.values[place.expert], f"[{place.expert}]")
    if place.rows is not None:
        values = values[place.first : place.first + dims[0][0]]
    if place.axes is not None and isinstance(values, np.ndarray):
        values = values.reshape([size for size, _ in dims])
    return replace(whole, name=name, values=values, source=f"{whole.source}: {whole.name}{number}")


def facts_of(name: str, config: ModelConfig) -> str:
    """The keys of config.json that say which tensors a layer has, or the model beside its layers."""
    matched = re.match(r"(?:model\.layers|blk)\.([0-9]{1,4})\.", name)
    facts = [f"num_hidden_layers={config.num_hidden_layers}"]
    if matched is None:
        facts.append(f"tie_word_embeddings={str(config.tie_word_embeddings).lower()}")
    elif int(matched[1]) < config.num_hidden_layers:
        facts.append(f"layer_types[{matched[1]}]={config.layer_types[int(matched[1])]}")
        if mixture := config.mixture:
            facts += [f"num_dense_layers={mixture.num_dense_layers}", f"num_experts={mixture.num_experts}"]
            facts.append(f"use_expert_bias={str(mixture.use_expert_bias).lower()}")
        else:
            facts.append(f"model_type={config.model_type}")
    return ", ".join(facts)


def require_shape(tensor: StoredTensor, dims: tuple[Dim, ...]) -> None:
    """CheckpointError unless the tensor has these dimensions; it names those that differ and where they come from."""
    shape, expected = tensor.shape, tuple(size for size, _ in dims)
    if shape != expected:
        if len(shape) == len(dims):
            dims = tuple(dim for dim, size in zip(dims, shape, strict=True) if dim[0] != size)
        origins = ", ".join(f"{origin}={size}" for size, origin in dims)
        raise tensor.wrong(f"shape {shape}, expected {expected} from {origins}")
