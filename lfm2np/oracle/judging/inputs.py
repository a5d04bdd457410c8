"""How engines round the inputs of each product, given how the checkpoint stores its weights.

llama.cpp's kernels round inputs to a type that goes with the weights' (vec_dot_type in ggml-cpu.c): integers of 8 bits
in blocks of 32, or of 256 for the K-quants. Its GPU kernels use blocks of 32 for both (block_q8_1 in ggml-cuda/mmq.cu),
so every second emulated engine does. A checkpoint of compressed-tensors may state how inputs are rounded. Of tensors
that share a product and have static scales vLLM takes the largest, so every second engine does; of one scale for all
inputs of a step every second engine sees a single token. Not modelled: of float8 weights with one scale per tensor vLLM
also rounds those that share a product once more, to their largest scale, and of integers with zero points it joins the
ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lfm2np.checkpoint.packed.activations import InputRounding, input_roundings
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.errors import RequestError
from lfm2np.model.config import ModelConfig
from lfm2np.model.layers import matrix_parts
from lfm2np.numerics.ieee import round_to_bfloat16, unchanged
from lfm2np.oracle.judging import formats
from lfm2np.oracle.judging.formats import Array, Format, Rounding, q8_0, q8_k, round_to_float16

PLAIN = {"F32": unchanged, "F16": round_to_float16, "BF16": round_to_bfloat16}
LARGE_BLOCKS = frozenset(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"))


@dataclass(frozen=True)
class Input:
    """Of one tensor [rows, inputs]: its rows, and how its inputs are rounded."""

    rows: int
    rounded: Rounding


Inputs = Mapping[str, Input]  # by tensor; empty: not rounded further than all activations


def inputs_of(form: Format, path: Path, config: ModelConfig, tensors: Mapping[str, StoredTensor], draw: int) -> Inputs:
    """By tensor, for a format that rounds inputs further than all activations; else empty.

    RequestError if the checkpoint should state how, and does not.
    """
    if form.inputs == "stated":
        return stated_inputs(form, path, config, tensors, draw)
    if not form.inputs:
        return {}
    return {name: Input(tensor.shape[0], in_blocks_for(tensor.dtype, draw)) for name, tensor in tensors.items()}


def in_blocks_for(dtype: str, draw: int) -> Rounding:
    """MLX's and compressed-tensors' formats are unknown to llama.cpp: blocks of 32, as for most of its own."""
    if dtype in PLAIN:
        return PLAIN[dtype]
    return q8_k if dtype in LARGE_BLOCKS and draw % 2 == 0 else q8_0


def stated_inputs(
    form: Format, path: Path, config: ModelConfig, tensors: Mapping[str, StoredTensor], draw: int
) -> Inputs:
    known = input_roundings(path, config)
    if not known:
        raise RequestError(f"format {form.name}: {path} does not tell how inputs are rounded")
    inputs: dict[str, Input] = {}
    for names in matrix_parts(config):
        stated = [known.get(name) for name in names]
        if draw % 2:
            stated = of_one_scale(stated)
        roundings = {each: rounding_of(each, draw) for each in stated}  # equal ones are one object
        inputs |= {
            name: Input(tensors[name].shape[0], roundings[each]) for name, each in zip(names, stated, strict=True)
        }
    return inputs


def of_one_scale(stated: Sequence[InputRounding | None]) -> list[InputRounding | None]:
    """With the largest of their static scales for all."""
    largest = max((each.scale for each in stated if each is not None and each.scale is not None), default=None)
    return [each if each is None or each.scale is None else replace(each, scale=largest) for each in stated]


def rounding_of(stated: InputRounding | None, draw: int) -> Rounding:
    if stated is None:
        return unchanged
    if stated.scale is not None:
        if stated.kind == "float8":
            return partial(formats.float8_static, scale=stated.scale)
        return partial(formats.int8_static, step=stated.scale, zero=stated.zero)
    by_row: Callable[[Array], Array] = formats.float8_rows
    if stated.kind == "int8":
        by_row = formats.int8_rows if stated.symmetric else formats.int8_rows_asymmetric
    if stated.of == "group":
        return partial(formats.by_group, size=stated.group_size, by_row=by_row)
    if stated.of == "tensor" and draw % 2 == 0:
        return partial(formats.by_tensor, by_row=by_row)
    return by_row
