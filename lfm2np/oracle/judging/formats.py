"""The number formats that an engine may declare: what is rounded to what, and where.

A name is one of FORMATS, optionally with a format of the key/value cache: "bfloat16 kv:float8".
What rounds takes float32 [..., n] and returns the rounded numbers as float32 of the same shape.
Sources: quantize_row_q8_0_ref, quantize_row_q8_K_ref, quantize_row_q4_0_ref in ggml-quants.c (llama.cpp);
scaled_int8_quant and scaled_fp8_quant in vllm/_custom_ops.py; the format E4M3 in OCP's "8-bit floating point".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.ieee import round_to_bfloat16, unchanged
from lfm2np.checkpoint.packed.compressed import InputRounding
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.checkpoint.tensors import input_roundings
from lfm2np.errors import RequestError
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import matrix_parts

Array = NDArray[Any]
MOST_FLOAT8 = 448.0  # of E4M3
SMALL_BLOCK, LARGE_BLOCK = 32, 256
TURNED = 64


def round_to_float16(x: Array) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(np.float16).astype(np.float32)


def rounded_to(bits: int, x: Array) -> Array:
    """The nearest float32 of so many significant bits, ties to even, in three operations: as bfloat16 or float16 of
    numbers that are neither tiny nor huge, NaN from about 2**(104 + bits) on.

    Source: Veltkamp's splitting.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        high = x * np.float32(2 ** (24 - bits) + 1)
        low = high - x
        return np.asarray(np.subtract(high, low, out=high))


def to_bfloat16(x: Array) -> Array:
    """Of the network's numbers; of weights, which may be float64, by the operations that take any."""
    return rounded_to(8, x) if x.dtype == np.float32 else round_to_bfloat16(x)


def q8_0(x: Array) -> Array:
    """Blocks of 32 in whole steps of their largest / 127; codes by the step in float32, values by it in float16.

    Q8_1, of CUDA and of weights with a minimum, rounds the same. The float16 sum of a block that it also stores is not
    modelled: its relative error is at most 2**-11, while each code is off by up to half a step.
    """
    blocks = in_blocks(x, SMALL_BLOCK)
    step = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    return out_of_blocks(whole_steps(blocks, step) * round_to_float16(step), x)


def q8_k(x: Array) -> Array:
    """Blocks of 256 in whole steps of their largest / 127; the step stays float32."""
    return by_group(x, LARGE_BLOCK, int8_rows)


def q4_0(x: Array) -> Array:
    """Blocks of 32 with codes -8 to 7, in steps of the number of largest magnitude / -8."""
    blocks = in_blocks(x, SMALL_BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1)
    step = largest / np.float32(-8)
    codes = np.minimum(np.floor(quotients(blocks, step) + np.float32(8.5)), 15) - 8
    return out_of_blocks(codes.astype(np.float32) * round_to_float16(step), x)


def int8_rows(x: Array) -> Array:
    """Each row in whole steps of its largest / 127."""
    step = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    return np.asarray(whole_steps(x, step) * step)


def int8_rows_asymmetric(x: Array) -> Array:
    """Each row in 255 steps from its least to its largest, 0 included."""
    least, largest = np.minimum(x.min(-1, keepdims=True), 0), np.maximum(x.max(-1, keepdims=True), 0)
    step = (largest - least) / np.float32(255)
    zero = np.rint(quotients(least, step))
    return np.asarray(((whole_steps(x, step) - zero).clip(0, 255) + zero) * step, np.float32)


def int8_static(x: Array, step: float, zero: int = 0) -> Array:
    """In whole steps stated by the checkpoint, codes -128 to 127 with `zero` for 0; others saturate."""
    codes = (np.rint(x / np.float32(step)) + zero).clip(-128, 127)
    return np.asarray((codes - zero) * np.float32(step), np.float32)


def float8(x: Array) -> Array:
    """The nearest E4M3: 4 significant bits down to 2**-6, multiples of 2**-9 below; larger numbers saturate."""
    clipped = x.clip(-MOST_FLOAT8, MOST_FLOAT8)
    step = np.ldexp(np.float32(1), np.maximum(np.frexp(clipped)[1] - 1, -6) - 3)
    return np.asarray(np.rint(clipped / step) * step, np.float32)


def float8_rows(x: Array) -> Array:
    """Each row scaled so that its largest becomes float8's largest."""
    return float8_scaled(x, np.abs(x).max(-1, keepdims=True) / np.float32(MOST_FLOAT8))


def by_tensor(x: Array, by_row: Callable[[Array], Array]) -> Array:
    """All rows by one scale, their largest's; how many rows a step has depends on the engine."""
    return by_row(x.reshape(1, -1)).reshape(x.shape)


def by_group(x: Array, size: int, by_row: Callable[[Array], Array]) -> Array:
    """Columns of a row in groups, each with its scale."""
    return out_of_blocks(by_row(in_blocks(x, size)), x)


def float8_scaled(x: Array, scale: Array | np.float32) -> Array:
    return float8(quotients(x, scale)) * scale


def turned(heads: Array) -> Array:
    """Heads [..., E] with every TURNED numbers multiplied by the Walsh-Hadamard matrix, which is its own inverse.

    llama.cpp (ggml_gen_hadamard in llama-kv-cache.cpp) so spreads outliers before rounding keys, values and queries.
    """
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < TURNED:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix /= np.float32(np.sqrt(TURNED))
    return np.asarray((heads.reshape(-1, TURNED) @ matrix).reshape(heads.shape))


def whole_steps(x: Array, step: Array) -> Array:
    return np.rint(quotients(x, step))


def quotients(x: Array, step: Array | np.float32) -> Array:
    """x / step; 0 where the step is 0, as are then all numbers it was computed from."""
    return np.asarray(x / np.where(step == 0, np.float32(1), step) * (step != 0))


def in_blocks(x: Array, size: int) -> Array:
    """[..., n] -> [..., n / size, size], the last block padded with zeros."""
    inputs = x.shape[-1]
    padded = np.zeros((*x.shape[:-1], -(-inputs // size) * size), np.float32)
    padded[..., :inputs] = x
    return padded.reshape(*x.shape[:-1], -1, size)


def out_of_blocks(blocks: Array, like: Array) -> Array:
    return np.asarray(blocks.reshape(*like.shape[:-1], -1)[..., : like.shape[-1]])


Rounding = Callable[[Array], Array]
KV = " kv:"  # between a format and that of the cache


@dataclass(frozen=True)
class Kept:
    """How keys and values are kept in the cache, and what meets them in products."""

    keep: Rounding
    queries: Rounding = unchanged
    shares: Rounding = unchanged
    adds_in_float16: bool = False  # the weighted values, position by position, with shares that are not rounded
    may_turn: bool = False  # heads may be rotated before they are rounded: turned


KEPT = {
    "float32": Kept(unchanged),
    "float16": Kept(round_to_float16, round_to_float16, adds_in_float16=True),
    "bfloat16": Kept(to_bfloat16, to_bfloat16, to_bfloat16),
    "float8": Kept(float8),
    "q8_0": Kept(q8_0, q8_0, may_turn=True),
    "q4_0": Kept(q4_0, q8_0, may_turn=True),
}


@dataclass(frozen=True)
class Format:
    """How an engine stores and computes.

    inputs  of products: "" as all activations; "blocks" as llama.cpp rounds them for the weights' type; "stated" as the
            checkpoint states
    kv      a name of KEPT; "" as all activations
    """

    name: str
    keep: Rounding  # rounds activations
    bits: int  # of the significand, the hidden one included
    levels: int = 0  # weights are whole steps of their group's largest / levels; 0: those of the checkpoint
    group: int = 32  # inputs that share a step
    inputs: str = ""
    kv: str = ""

    @property
    def is_fine(self) -> bool:
        """As fine as float32: near ties of a mixture's routes are rare."""
        return self.bits >= 24 and not self.inputs and self.kv in ("", "float32")


FORMATS = {
    form.name: form
    for form in (
        Format("float32", unchanged, 24),
        Format("float16", round_to_float16, 11),
        Format("bfloat16", to_bfloat16, 8),
        Format("q8", unchanged, 24, inputs="blocks", kv="float16"),
        Format("w8a8", to_bfloat16, 8, inputs="stated"),
        Format("int8", round_to_float16, 11, levels=127),
        Format("int4", round_to_float16, 11, levels=7),
    )
}


def format_named(name: str) -> Format:
    """RequestError for a name that is not in FORMATS, or a cache format that is not in KEPT."""
    base, kv, kept = name.partition(KV)
    if base not in FORMATS:
        raise RequestError(f"format {base!r}: expected one of {', '.join(FORMATS)}")
    if not kv:
        return FORMATS[base]
    if kept not in KEPT:
        raise RequestError(f"format of keys and values {kept!r}: expected one of {', '.join(KEPT)}")
    return replace(FORMATS[base], name=name, kv=kept)


def others(name: str, in_blocks: bool, states_inputs: bool, is_quantised: bool) -> list[str]:
    """Formats that may explain what `name` does not, with the same format of the cache, the finest first.

    in_blocks      a GGUF file with quantised weights: llama.cpp's rounding comes first, as bfloat16 errs about as much
    states_inputs  the checkpoint states how inputs are rounded
    is_quantised   every bit of the weights is known, which rules out schemes for unknown ones
    """
    base, kv, kept = name.partition(KV)
    tried = {"": True, "blocks": in_blocks, "stated": states_inputs}
    return [
        form.name + kv + kept
        for form in sorted(FORMATS.values(), key=lambda form: form.inputs != "blocks")
        if form.name != base and tried[form.inputs] and not (is_quantised and form.levels)
    ]


# --- how engines round the inputs of each product, given how the checkpoint stores its weights
#
# llama.cpp's kernels round inputs to a type that goes with the weights' (vec_dot_type in ggml-cpu.c): integers of 8
# bits in blocks of 32, or of 256 for the K-quants. Its GPU kernels use blocks of 32 for both (block_q8_1 in
# ggml-cuda/mmq.cu), so every second emulated engine does. A checkpoint of compressed-tensors may state how inputs are
# rounded. Of tensors that share a product and have static scales vLLM takes the largest, so every second engine does;
# of one scale for all inputs of a step every second engine sees a single token. Not modelled: of float8 weights with
# one scale per tensor vLLM also rounds those that share a product once more, to their largest scale, and of integers
# with zero points it joins the ranges.


PLAIN = {"F32": unchanged, "F16": round_to_float16, "BF16": to_bfloat16}
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
            return partial(float8_scaled, scale=np.float32(stated.scale))
        return partial(int8_static, step=stated.scale, zero=stated.zero)
    by_row: Callable[[Array], Array] = float8_rows
    if stated.kind == "int8":
        by_row = int8_rows if stated.symmetric else int8_rows_asymmetric
    if stated.of == "group":
        return partial(by_group, size=stated.group_size, by_row=by_row)
    if stated.of == "tensor" and draw % 2 == 0:
        return partial(by_tensor, by_row=by_row)
    return by_row
