"""Tensors of another shape than the config says, refused with the key that says so; fused experts, taken apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.errors import CheckpointError
from lfm2np.truth.config import MixtureConfig, ModelConfig
from lfm2np.truth.layers import Dim
from lfm2np.values import plain

FUSED = ("gate_up_proj", "down_proj")  # as transformers holds an lfm2_moe's experts: [E, 2F, D], w1 then w3; [E, D, F]


def taken_apart(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors with fused experts as views, one tensor an expert.

    CheckpointError for fused ones of another shape, one without the other, or beside single ones of their layer.
    """
    apart, mixture = dict(tensors), config.mixture
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.feed_forward.experts."
        fused = [tensors[prefix + name] for name in FUSED if prefix + name in tensors]
        if not fused or mixture is None or not config.is_sparse(layer):
            continue  # one in a dense layer is refused as unexpected
        single = [name for name in tensors if re.match(re.escape(prefix) + "[0-9]", name)]
        if single:
            both = f"{fused[0].name} stands beside {plain(single[0])}"
            raise CheckpointError(f"{fused[0].source}: {both}, expected the experts fused or one tensor each")
        for name, dims in fused_layout(config, mixture).items():
            if prefix + name not in tensors:
                expected = f"{tuple(size for size, _ in dims)} from {origins_of(dims)} beside {fused[0].name}"
                raise CheckpointError(f"{fused[0].source}: missing {prefix + name}, expected {expected}")
            require_shape(tensors[prefix + name], dims)
            apart |= experts_of(apart.pop(prefix + name), prefix, name)
    return apart


def fused_layout(config: ModelConfig, mixture: MixtureConfig) -> dict[str, tuple[Dim, ...]]:
    """By the names of FUSED."""
    experts, hidden = (mixture.num_experts, "num_experts"), (config.hidden_size, "hidden_size")
    width = (mixture.moe_intermediate_size, "moe_intermediate_size")
    return dict(zip(FUSED, ((experts, (2 * width[0], f"2*{width[1]}"), hidden), (experts, hidden, width)), strict=True))


def experts_of(fused: StoredTensor, prefix: str, what: str) -> dict[str, StoredTensor]:
    """w1 and w3, or w2, of each expert; their source names what the file holds."""
    matrices = []
    for expert in range(len(fused.values)):
        values = fused.values[expert]
        half = len(values) // 2
        parts = {"w1": values[:half], "w3": values[half:]} if what == FUSED[0] else {"w2": values}
        source = f"{fused.source}: {fused.name}[{expert}]"
        for name, part in parts.items():
            matrices.append(replace(fused, name=f"{prefix}{expert}.{name}.weight", values=part, source=source))
    return {tensor.name: tensor for tensor in matrices}


def reason(name: str, config: ModelConfig) -> str:
    """Why a tensor of a feed-forward is missing or unexpected: the key that says so; "" for others."""
    matched = re.fullmatch(r"model\.layers\.([0-9]{1,4})\.feed_forward\.(.+)", name)
    if matched is None or int(matched[1]) >= config.num_hidden_layers:
        return ""
    layer, part, mixture = int(matched[1]), matched[2], config.mixture
    of_mixture = part.startswith(("gate.", "expert_bias", "experts."))
    if mixture is None:
        return "a model_type of lfm2 has no experts" if of_mixture else ""
    if of_mixture != config.is_sparse(layer) or part == "gate.weight":
        kind = "has experts" if config.is_sparse(layer) else "is dense"
        return f"layer {layer} {kind} by num_dense_layers={mixture.num_dense_layers}"
    if part == "expert_bias":
        return f"use_expert_bias={str(mixture.use_expert_bias).lower()}"
    if part.startswith("experts."):
        return f"num_experts={mixture.num_experts} means experts 0 to {mixture.num_experts - 1}"
    return ""


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
