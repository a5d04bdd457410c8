"""What `lfm2np info` says of a checkpoint: its shape, its memory under each arithmetic, the proved bounds."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from lfm2np.arithmetic import NAMES, numerics_named
from lfm2np.arithmetic.matrix import Grid, Weights
from lfm2np.arithmetic.pieces import pieces
from lfm2np.arithmetic.weight_grids import left_over, prove_grid
from lfm2np.checkpoint.config_json import reading_of
from lfm2np.checkpoint.stored import StoredTensor, require_finite
from lfm2np.checkpoint.weights import joined
from lfm2np.truth.config import ATTENTION, CONV, SLIDING, ModelConfig
from lfm2np.truth.layers import expected_tensors, key_value_numbers, matrix_parts, parameter_count, state_shape
from lfm2np.values import Progress

LETTERS = {CONV: "c", ATTENTION: "A", SLIDING: "S"}  # of layers


@dataclass(frozen=True)
class Bound:
    """Proof for one product: activation_bits + row_sum_bits <= 53, so no partial sum is ever rounded.

    rounded_weights   how many weights its grid does not hold to the last bit
    largest_rounding  of those, relative to the power of two of the largest in their row, after columns are equalised
    """

    tensors: tuple[str, ...]
    inputs: int
    outputs: int
    slices: int
    row_sum_bits: int
    activation_bits: int
    rounded_weights: int
    largest_rounding: float


def weight_bytes(config: ModelConfig, bounds: Sequence[Bound]) -> dict[str, int]:
    """Bytes of prepared weights in memory under each arithmetic; the embedding's rows stay in the mapped file.

    Exact arithmetic keeps float32 weights in two slices. Of a mixture all experts are counted, as once each was chosen.
    """
    shapes = expected_tensors(config)
    in_matrices = {name for bound in bounds for name in bound.tensors} | {"model.embed_tokens.weight"}
    vectors = 4 * sum(math.prod(shape) for name, shape in shapes.items() if name not in in_matrices)
    sizes = {}
    for name in NAMES:
        slices = [bound.slices if name == "exact" else 1 for bound in bounds]
        numbers = sum(b.inputs * b.outputs * count for b, count in zip(bounds, slices, strict=True))
        sizes[name] = numbers * numerics_named(name).weight_bytes + vectors
    return sizes


def state_numbers(config: ModelConfig) -> dict[str, int]:
    """Numbers that a cache keeps: keys and values a token, convolution state a request (constant)."""
    return {
        "key_value_per_token": key_value_numbers(config),
        "convolution_per_request": math.prod(state_shape(config)),
    }


def proved_bounds(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, progress: Progress | None = None
) -> list[Bound]:
    """The bound of every product, from the actual weights, one matrix in memory at a time."""
    parts = list(matrix_parts(config))
    bounds: list[Bound] = []
    for name in tensors:
        require_finite(tensors[name])
    for names in parts:
        weight = joined(tensors, names)
        grid = prove_grid(weight, " + ".join(names))
        sizes = weight.shape[1], weight.shape[0]
        bounds.append(
            Bound(names, *sizes, grid.slices, grid.row_sum_bits, grid.activation_bits, *rounded(weight, grid))
        )
        if progress:
            progress(len(bounds), len(parts))
    return bounds


def rounded(weight: Weights, grid: Grid) -> tuple[int, float]:
    """How many weights the grid rounds, and by how much at the most: see Bound."""
    count, largest = 0, 0.0
    for rows in pieces(len(weight), weight.shape[1]):
        lost = np.abs(left_over(weight[rows], grid.columns, grid.slices))
        count, largest = count + int(np.count_nonzero(lost)), max(largest, float(lost.max()))
    return count, largest


def types_of(tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    """How many tensors there are of each type, the most first; each matrix of an expert counts."""
    return dict(Counter(tensor.dtype for tensor in tensors.values()).most_common())


def as_json(config: ModelConfig, tensors: Mapping[str, StoredTensor], bounds: list[Bound]) -> dict[str, object]:
    return {
        "config": asdict(config),
        "parameters": parameter_count(config),
        "active_parameters": parameter_count(config, active=True),
        "weight_bytes": weight_bytes(config, bounds),
        "state_numbers": state_numbers(config),
        "types": types_of(tensors),
        "bounds": [asdict(bound) for bound in bounds],
    }


def as_text(config: ModelConfig, tensors: Mapping[str, StoredTensor], bounds: list[Bound]) -> str:
    letters = "".join(LETTERS[kind] for kind in config.layer_types)
    windowed = ", S = attention in a window" if config.layers_of(SLIDING) else ""
    states = state_numbers(config)
    rows = [
        ("parameters", f"{parameter_count(config):,}"),
        *mixture_rows(config),
        ("layers", f"{config.num_hidden_layers}: {letters} (c = convolution, A = attention{windowed})"),
        ("hidden, feed-forward", f"{config.hidden_size}, {config.feed_forward_size}"),
        (
            "heads, kv heads, head_dim",
            f"{config.num_attention_heads}, {config.num_key_value_heads}, {config.head_dim}",
        ),
        ("conv_L_cache, conv_bias", f"{config.conv_L_cache}, {str(config.conv_bias).lower()}"),
        ("vocabulary, longest context", f"{config.vocab_size:,}, {config.max_position_embeddings:,}"),
        ("rope_theta, norm_eps", f"{config.rope_theta:g}, {config.norm_eps:g}"),
        *lfm3_rows(config),
        ("head tied to embedding", str(config.tie_word_embeddings).lower()),
        ("bos, eos, pad", f"{config.bos_token_id}, {list(config.eos_token_ids)}, {config.pad_token_id}"),
        ("key/value numbers a token", f"{states['key_value_per_token']:,}"),
        ("convolution numbers a request", f"{states['convolution_per_request']:,}"),
        ("tensors", ", ".join(f"{count} {name}" for name, count in types_of(tensors).items())),
    ]
    all_of_them = " once every expert was chosen" if config.mixture else ""
    for name, size in weight_bytes(config, bounds).items():
        rows.append((f"weights in {name}", f"{size / 2**20:,.1f} MiB{all_of_them}"))
    rows.append(("weights that grids round", rounding_told(bounds)))
    lines = [f"{label:<30}{value}" for label, value in rows]
    lines.append("")
    lines.append("Proved: no partial sum of any product exceeds 2**53 units (bits of inputs + bits of row sums <= 53)")
    lines.append(f"{'inputs':>8}{'slices':>8}{'row sums':>10}{'input bits':>12}  product")
    for bound in with_experts_together(bounds):
        lines.append(
            f"{bound.inputs:>8}{bound.slices:>8}{bound.row_sum_bits:>10}{bound.activation_bits:>12}  "
            + " + ".join(name.removeprefix("model.") for name in bound.tensors)
        )
    return "\n".join(lines)


def rounding_told(bounds: Sequence[Bound]) -> str:
    count = sum(bound.rounded_weights for bound in bounds)
    if not count:
        return "none: exact arithmetic holds every bit of every matrix"
    most = math.frexp(max(bound.largest_rounding for bound in bounds))[1]
    total = sum(bound.inputs * bound.outputs for bound in bounds)
    return f"{count:,} of {total:,}, by less than 2**{most} of the largest in their row (exact)"


def mixture_rows(config: ModelConfig) -> list[tuple[str, str]]:
    """What is to be said of a mixture of experts; nothing of a dense model."""
    mixture = config.mixture
    if mixture is None:
        return []
    sparse = len(config.sparse_layers)
    switches = [str(switch).lower() for switch in (mixture.use_expert_bias, mixture.norm_topk_prob)]
    return [
        ("active for one token", f"{parameter_count(config, active=True):,}"),
        (
            "experts, a token, width",
            f"{mixture.num_experts}, {mixture.num_experts_per_tok}, {mixture.moe_intermediate_size}",
        ),
        ("dense layers, sparse layers", f"{config.num_hidden_layers - sparse}, {sparse}"),
        ("bias, normalised, scaling", f"{switches[0]}, {switches[1]}, {mixture.routed_scaling_factor:g}"),
    ]


def lfm3_rows(config: ModelConfig) -> list[tuple[str, str]]:
    """What an LFM3 has beside an LFM2; nothing of others."""
    if config.model_type != "lfm3":
        return []
    full, sliding = config.rope(ATTENTION), config.rope(SLIDING)
    switches = (config.use_sandwich_norm, config.use_attention_gate, config.attention_bias)
    rows = [
        ("sliding window", f"{config.sliding_window} positions (S), their rope_theta {sliding.theta:g}"),
        ("share of a head that turns", f"{full.share:g} in A, {sliding.share:g} in S"),
        ("norms after, gate, biases", ", ".join(str(switch).lower() for switch in switches)),
    ]
    reading = reading_of(config)
    return [*rows, ("rotation", reading)] if reading else rows


MORE_IS_WORSE = ("slices", "row_sum_bits", "rounded_weights", "largest_rounding")  # of a Bound


def with_experts_together(bounds: Sequence[Bound]) -> list[Bound]:
    """One line for the same product of all experts of a layer, with the worst of each number."""
    joined: dict[tuple[str, ...], Bound] = {}
    for bound in bounds:
        key = tuple(re.sub(r"\.experts\.[0-9]+\.", ".experts.*.", name) for name in bound.tensors)
        other = joined.get(key, bound)
        worst = {name: max(getattr(bound, name), getattr(other, name)) for name in MORE_IS_WORSE}
        worst["activation_bits"] = min(bound.activation_bits, other.activation_bits)
        joined[key] = replace(bound, tensors=key, **worst)
    return list(joined.values())
