"""What engines round the inputs of each product to, by how the checkpoint stores its weights.

llama.cpp's kernels multiply weights of a type by inputs of one that goes with it (vec_dot_type in ggml-cpu.c): integers
of 8 bits in blocks of 32, or of 256 for the K-quants. Its kernels for GPUs take blocks of 32 for both (block_q8_1 in
ggml-cuda/mmq.cu), so every second engine that could be does.
A checkpoint of compressed-tensors may tell how inputs are rounded. Of tensors that share a product and have static
scales of their own vLLM takes the largest, so every second engine does; and of one scale for all inputs of a step each
second one sees a single token. Not modelled: of float8 weights with one scale a tensor vLLM also rounds those that
share a product once more, to the largest of their scales, and of integers with zeros it joins the ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lfm2np.checkpoint.config import ModelConfig
from lfm2np.checkpoint.packed.activations import InputRounding, input_roundings
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.checkpoint.weights import matrix_parts
from lfm2np.errors import RequestError
from lfm2np.numerics.ieee import round_to_bfloat16, unchanged
from lfm2np.oracle.judging import eight_bits
from lfm2np.oracle.judging.eight_bits import q8_0, q8_k, round_to_float16
from lfm2np.oracle.judging.formats import Array, Format, Rounding

PLAIN = {"F32": unchanged, "F16": round_to_float16, "BF16": round_to_bfloat16}
LARGE_BLOCKS = frozenset(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"))


@dataclass(frozen=True)
class Input:
    """Of one tensor [rows, inputs]."""

    rows: int
    rounded: Rounding


Inputs = Mapping[str, Input]  # by tensor; none: they are not rounded further than all activations are


def inputs_of(form: Format, path: Path, config: ModelConfig, tensors: Mapping[str, StoredTensor], draw: int) -> Inputs:
    """Of a format under which inputs are rounded to more than all activations are; else none.

    RequestError where the checkpoint was to tell how, and does not.
    """
    if form.inputs == "told":
        return told_inputs(form, path, config, tensors, draw)
    if not form.inputs:
        return {}
    return {name: Input(tensor.shape[0], in_blocks_for(tensor.dtype, draw)) for name, tensor in tensors.items()}


def in_blocks_for(dtype: str, draw: int) -> Rounding:
    """MLX's and compressed-tensors' formats are none of llama.cpp's: blocks of 32, as of most of its own."""
    if dtype in PLAIN:
        return PLAIN[dtype]
    return q8_k if dtype in LARGE_BLOCKS and draw % 2 == 0 else q8_0


def told_inputs(
    form: Format, path: Path, config: ModelConfig, tensors: Mapping[str, StoredTensor], draw: int
) -> Inputs:
    stated = input_roundings(path, config)
    if not stated:
        raise RequestError(f"format {form.name}: {path} does not tell how inputs are rounded")
    inputs: dict[str, Input] = {}
    for names in matrix_parts(config):
        roundings_of_parts = [stated.get(name) for name in names]
        if draw % 2:
            roundings_of_parts = of_one_scale(roundings_of_parts)
        roundings: dict[InputRounding | None, Rounding] = {
            rounding: rounding_of(rounding, draw) for rounding in roundings_of_parts
        }
        inputs |= {
            name: Input(tensors[name].shape[0], roundings[rounding])
            for name, rounding in zip(names, roundings_of_parts, strict=True)
        }
    return inputs


def of_one_scale(roundings: Iterable[InputRounding | None]) -> list[InputRounding | None]:
    """With the largest of their static scales."""
    roundings_of_parts = list(roundings)
    largest = max(
        (rounding.scale for rounding in roundings_of_parts if rounding is not None and rounding.scale is not None),
        default=None,
    )
    return [
        rounding if rounding is None or rounding.scale is None else replace(rounding, scale=largest)
        for rounding in roundings_of_parts
    ]


def rounding_of(stated: InputRounding | None, draw: int) -> Rounding:
    """None: not at all."""
    if stated is None:
        return unchanged
    if stated.scale is not None:
        if stated.kind == "float8":
            return partial(eight_bits.float8_static, scale=stated.scale)
        return partial(eight_bits.int8_static, step=stated.scale, zero=stated.zero)
    by_row: Callable[[Array], Array] = eight_bits.float8_rows
    if stated.kind == "int8":
        by_row = eight_bits.int8_rows if stated.symmetric else eight_bits.int8_rows_asymmetric
    if stated.of == "group":
        return partial(eight_bits.by_group, size=stated.group_size, by_row=by_row)
    if stated.of == "tensor" and draw % 2 == 0:
        return partial(eight_bits.by_tensor, by_row=by_row)
    return by_row
