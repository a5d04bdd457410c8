"""Where our tensors stand in a file: as they are, as one expert of several, or in some rows; and which shape is right.

A tensor of another shape than the config says is refused with the key that says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from lfm2np.checkpoint.names import listed
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.errors import CheckpointError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import Dim, layout_of
from lfm2np.values import plain

FUSED = ("gate_up_proj", "down_proj")  # as transformers holds an lfm2_moe's experts: [E, 2F, D], w1 then w3; [E, D, F]
EXPERT = re.compile(r"(model\.layers\.[0-9]+\.feed_forward)\.experts\.([0-9]+)\.(w[123])\.weight")


class Place(NamedTuple):
    """Where one of our tensors stands in a file: in which of its tensors, as which expert of it, in which rows.

    first, rows  where the file has several of ours below each other: the first row of ours, and how many there are
    """

    name: str
    expert: int | None = None
    first: int = 0
    rows: Dim | None = None


def whole_dims(place: Place, dims: tuple[Dim, ...], experts: Dim) -> tuple[Dim, ...]:
    """Of the file's tensor, where ours has `dims` and a layer so many experts."""
    dims = dims if place.rows is None else (place.rows, *dims[1:])
    return dims if place.expert is None else (experts, *dims)


def part_of(whole: StoredTensor, place: Place, name: str, dims: tuple[Dim, ...], experts: Dim) -> StoredTensor:
    """Ours as a view, whose source names what the file has. CheckpointError for a whole of another shape."""
    require_shape(whole, whole_dims(place, dims, experts))
    values, number = (whole.values, "") if place.expert is None else (whole.values[place.expert], f"[{place.expert}]")
    if place.rows is not None:
        values = values[place.first : place.first + dims[0][0]]
    return replace(whole, name=name, values=values, source=f"{whole.source}: {whole.name}{number}")


def experts_of(config: ModelConfig) -> Dim:
    return (0 if config.mixture is None else config.mixture.num_experts), "num_experts"


def taken_apart(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors with fused experts as views, one tensor an expert.

    CheckpointError for fused ones of another shape, one without the other, or beside single ones of their layer.
    """
    apart = dict(tensors)
    for name, dims in layout_of(config).items():
        if (matched := EXPERT.fullmatch(name)) is None:
            continue  # fused ones in a dense layer are refused as unexpected
        fused, width = [f"{matched[1]}.experts.{part}" for part in FUSED], dims[0]
        place = Place(fused[1], int(matched[2]))
        if matched[3] != "w2":
            first = width[0] if matched[3] == "w3" else 0
            place = Place(fused[0], int(matched[2]), first, (2 * width[0], f"2*{width[1]}"))
        beside = next((tensors[each] for each in fused if each in tensors), None)
        if beside is None:
            continue
        if name in tensors:
            both = f"{beside.name} stands beside {plain(name)}"
            raise CheckpointError(f"{beside.source}: {both}, expected the experts fused or one tensor each")
        if place.name not in tensors:
            sizes = whole_dims(place, dims, experts_of(config))
            expected = f"{tuple(size for size, _ in sizes)} from {origins_of(sizes)} beside {beside.name}"
            raise CheckpointError(f"{beside.source}: missing {place.name}, expected {expected}")
        apart.pop(place.name, None)
        apart[name] = part_of(tensors[place.name], place, name, dims, experts_of(config))
    return apart


def require_names(
    found: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[Dim, ...]],
    source: str,
    facts: Callable[[str], str],
    called: Callable[[str], str] = str,
) -> None:
    """CheckpointError for a tensor that is missing or unexpected; `facts` are the keys that decide about a name."""
    missing, unexpected = expected.keys() - found, found.keys() - expected
    if missing:
        shape = tuple(size for size, _ in expected[min(missing)])
        names, what = {called(name) for name in missing}, f"missing {len(missing)} of"
    elif unexpected:
        shape = found[min(unexpected)].shape
        names, what = {found[name].name for name in unexpected}, f"{len(unexpected)} unexpected beside"
    else:
        return
    why = f"the first of shape {shape}; {facts(min(missing or unexpected))}"
    raise CheckpointError(f"{source}: {what} the {len(expected)} tensors: {listed(names)} ({why})")


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
        raise tensor.wrong(f"shape {shape}, expected {expected} from {origins_of(differing(shape, dims))}")


def differing(shape: tuple[int, ...], dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The dimensions of `dims` that a shape does not have; all where their number is another."""
    if len(shape) != len(dims):
        return dims
    return tuple(dim for dim, size in zip(dims, shape, strict=True) if dim[0] != size)


def origins_of(dims: tuple[Dim, ...]) -> str:
    return ", ".join(f"{origin}={size}" for size, origin in dims)
