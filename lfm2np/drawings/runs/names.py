"""What a weight is called, by its identity: experts' weights get theirs when the network first asks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lfm2np.checkpoint.weights import FeedForwardWeights, LayerWeights, MixtureWeights, ModelWeights, ShortConvWeights


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
        operator, feed_forward = layer.operator, layer.feed_forward
        named: dict[str, object] = {"operator_norm": layer.operator_norm, "ffn_norm": layer.ffn_norm}
        if isinstance(feed_forward, FeedForwardWeights):
            named |= matrices("feed_forward", feed_forward)
        else:
            named |= {"feed_forward.gate": feed_forward.router, "feed_forward.expert_bias": feed_forward.bias}
        if isinstance(operator, ShortConvWeights):
            named |= {"conv.in_proj": operator.in_proj, "conv.conv": operator.taps, "conv.out_proj": operator.out_proj}
        else:
            named |= {
                "self_attn.q_proj, k_proj, v_proj": operator.qkv_proj,
                "self_attn.q_layernorm": operator.q_norm,
                "self_attn.k_layernorm": operator.k_norm,
                "self_attn.out_proj": operator.out_proj,
            }
        found |= {id(weight): Named(index, name) for name, weight in named.items() if weight is not None}
    return found


def matrices(prefix: str, weights: FeedForwardWeights) -> dict[str, object]:
    return {f"{prefix}.w1, w3": weights.gate_up_proj, f"{prefix}.w2": weights.down_proj}


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
        for name, weight in matrices(f"feed_forward.experts.{number}", expert_weights).items():
            names[id(weight)] = Named(index, name, number)
        return expert_weights

    return expert
