"""What a weight is called, by its identity: experts' weights get theirs when the network first asks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lfm2np.model.layers import expert_parts
from lfm2np.model.weights import (
    FeedForwardWeights,
    LayerWeights,
    MixtureWeights,
    ModelWeights,
    named_weights,
    tensors_of,
)


@dataclass(frozen=True)
class Named:
    """A weight's layer, None for those after the last, its name in the checkpoint, and the expert that it is of."""

    layer: int | None
    name: str
    expert: int | None = None


Names = dict[int, Named]  # by id()


def names_of(weights: ModelWeights) -> Names:
    """Of all weights but experts'."""
    found = {
        id(weights.final_norm): Named(None, "embedding_norm"),
        id(weights.head): Named(None, "lm_head"),
    }
    for index, layer in enumerate(weights.layers):
        found |= {id(weight): Named(index, shown(names)) for names, weight in named_weights(layer)}
    return found


def shown(names: tuple[str, ...]) -> str:
    """Tensors of one product: "self_attn.q_proj, k_proj, v_proj"."""
    first, *others = (name.removesuffix(".weight") for name in names)
    return ", ".join([first, *(other.rpartition(".")[2] for other in others)])


def naming_experts(weights: ModelWeights, names: Names) -> ModelWeights:
    """The same weights; an expert enters `names` when it is used."""
    layers = tuple(layer_naming_experts(index, layer, names) for index, layer in enumerate(weights.layers))
    return replace(weights, layers=layers)


def layer_naming_experts(index: int, layer: LayerWeights, names: Names) -> LayerWeights:
    mixture = layer.feed_forward
    if isinstance(mixture, FeedForwardWeights):
        return layer
    return replace(layer, feed_forward=replace(mixture, expert=naming(index, mixture, names)))


def naming(index: int, mixture: MixtureWeights, names: Names) -> Callable[[int], FeedForwardWeights]:
    def expert(number: int) -> FeedForwardWeights:
        expert_weights = mixture.expert(number)
        for tensors, field in zip(expert_parts(number), tensors_of(expert_weights), strict=True):
            names[id(getattr(expert_weights, field))] = Named(index, shown(tensors), number)
        return expert_weights

    return expert
