"""What engines round the inputs of each product to, by how the checkpoint stores its weights.

llama.cpp's kernels multiply weights of a type by inputs of one that goes with it (vec_dot_type in ggml-cpu.c): integers
of 8 bits in blocks of 32, or of 256 for the K-quants. Its kernels for GPUs take blocks of 32 for both (block_q8_1 in
ggml-cuda/mmq.cu), so every second engine that could be does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lfm2np.checkpoint.stored import DTYPES, StoredTensor
from lfm2np.errors import RequestError
from lfm2np.numerics.ieee import round_to_bfloat16, unchanged
from lfm2np.oracle.judging.eight_bits import q8_0, q8_k, round_to_float16
from lfm2np.oracle.judging.formats import Format, Rounding

PLAIN = {"F32": unchanged, "F16": round_to_float16, "BF16": round_to_bfloat16}
LARGE_BLOCKS = frozenset(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"))


@dataclass(frozen=True)
class Input:
    """Of one tensor [rows, inputs]."""

    rows: int
    rounded: Rounding


Inputs = Mapping[str, Input]  # by tensor; none: they are not rounded further than all activations are


def is_quantised(tensors: Mapping[str, StoredTensor]) -> bool:
    return any(one.dtype not in DTYPES for one in tensors.values())


def inputs_of(form: Format, tensors: Mapping[str, StoredTensor], draw: int) -> Inputs:
    """Of a format under which inputs are rounded to more than all activations are; else none.

    RequestError where the checkpoint was to tell how, and does not.
    """
    if form.inputs == "told":
        raise RequestError(f"format {form.name}: the checkpoint does not tell how inputs are rounded")
    if not form.inputs:
        return {}
    return {name: Input(one.shape[0], in_blocks_for(one.dtype, draw)) for name, one in tensors.items()}


def in_blocks_for(dtype: str, draw: int) -> Rounding:
    if dtype in PLAIN:
        return PLAIN[dtype]
    return q8_k if dtype in LARGE_BLOCKS and draw % 2 == 0 else q8_0
