"""What `lfm2np info` says of a checkpoint: its shape, its memory under each arithmetic, the proved bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lfm2np.checkpoint import StoredTensor, expected_tensors, parameter_count
from lfm2np.config import ModelConfig
from lfm2np.numerics import NAMES, numerics_named
from lfm2np.numerics.exact import prove_grid
from lfm2np.weights import Progress, joined, matrix_parts


@dataclass(frozen=True)
class Bound:
    """Proof for one product: activation_bits + row_sum_bits <= 53, so no partial sum is ever rounded."""

    tensors: tuple[str, ...]
    inputs: int
    weight_bits: int
    row_sum_bits: int
    activation_bits: int


def weight_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of prepared weights in memory under each arithmetic; the embedding's rows stay in the mapped file."""
    shapes = expected_tensors(config)
    in_matrices = {name for names in matrix_parts(config) for name in names}
    matrices = sum(math.prod(shapes[name]) for name in in_matrices)
    embedding = "model.embed_tokens.weight"
    vectors = sum(math.prod(shape) for name, shape in shapes.items() if name not in in_matrices | {embedding})
    return {name: matrices * numerics_named(name).weight_bytes + vectors * 4 for name in NAMES}


def state_numbers(config: ModelConfig) -> dict[str, int]:
    """Numbers that a cache keeps: keys and values a token, convolution state a request (constant)."""
    attention = config.layer_types.count("full_attention")
    convolution = config.num_hidden_layers - attention
    return {
        "key_value_per_token": 2 * attention * config.num_key_value_heads * config.head_dim,
        "convolution_per_request": convolution * (config.conv_L_cache - 1) * config.hidden_size,
    }


def proved_bounds(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, progress: Progress | None = None
) -> list[Bound]:
    """The bound of every product, from the actual weights, one matrix in memory at a time."""
    parts = list(matrix_parts(config))
    bounds = []
    for names in parts:
        weight = joined(tensors, names)
        grid = prove_grid(weight, " + ".join(names))
        bounds.append(Bound(names, weight.shape[1], grid.weight_bits, grid.row_sum_bits, grid.activation_bits))
        if progress:
            progress(len(bounds), len(parts))
    return bounds


def as_json(config: ModelConfig, bounds: list[Bound]) -> dict[str, object]:
    return {
        "config": asdict(config),
        "parameters": parameter_count(config),
        "weight_bytes": weight_bytes(config),
        "state_numbers": state_numbers(config),
        "bounds": [asdict(bound) for bound in bounds],
    }


def as_text(config: ModelConfig, bounds: list[Bound]) -> str:
    """The same for a person."""
    letters = "".join("A" if kind == "full_attention" else "c" for kind in config.layer_types)
    states = state_numbers(config)
    rows = [
        ("parameters", f"{parameter_count(config):,}"),
        ("layers", f"{config.num_hidden_layers}: {letters} (c = convolution, A = attention)"),
        ("hidden, feed-forward", f"{config.hidden_size}, {config.feed_forward_size}"),
        (
            "heads, kv heads, head_dim",
            f"{config.num_attention_heads}, {config.num_key_value_heads}, {config.head_dim}",
        ),
        ("conv_L_cache, conv_bias", f"{config.conv_L_cache}, {str(config.conv_bias).lower()}"),
        ("vocabulary, longest context", f"{config.vocab_size:,}, {config.max_position_embeddings:,}"),
        ("rope_theta, norm_eps", f"{config.rope_theta:g}, {config.norm_eps:g}"),
        ("head tied to embedding", str(config.tie_word_embeddings).lower()),
        ("bos, eos, pad", f"{config.bos_token_id}, {list(config.eos_token_ids)}, {config.pad_token_id}"),
        ("key/value numbers a token", f"{states['key_value_per_token']:,}"),
        ("convolution numbers a request", f"{states['convolution_per_request']:,}"),
    ]
    rows += [(f"weights in {name}", f"{size / 2**20:,.1f} MiB") for name, size in weight_bytes(config).items()]
    lines = [f"{label:<30}{value}" for label, value in rows]
    lines.append("")
    lines.append("Proved: no partial sum of any product exceeds 2**53 units (bits of inputs + bits of row sums <= 53)")
    lines.append(f"{'inputs':>8}{'weight bits':>13}{'row sums':>10}{'input bits':>12}  product")
    for bound in bounds:
        lines.append(
            f"{bound.inputs:>8}{bound.weight_bits:>13}{bound.row_sum_bits:>10}{bound.activation_bits:>12}  "
            + " + ".join(name.removeprefix("model.") for name in bound.tensors)
        )
    return "\n".join(lines)
