"""Nodes of the graph that llama.cpp evaluates: which tensor each is, and its numbers.

A node is identified by its operation and its inputs: a weight, whose name GGUF fixes, or another node. llama.cpp's
names of nodes are not used: most have none, and one is wrong (`ffn_out` is the norm before it). Source: llama.cpp
0c1e570, src/models/lfm2.cpp, src/llama-graph.cpp, ggml/include/ggml.h.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.stored import widen

Array = NDArray[Any]
F32, F16, I32, I64, BF16 = 0, 1, 26, 27, 30  # enum ggml_type
STORED = {F32: "<f4", F16: "<f2", I32: "<i4", I64: "<i8", BF16: "<u2"}

WEIGHTS = {  # GGUF's name of a layer's weight -> what the product, norm or convolution with it makes
    "attn_norm": "operator_norm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
WHOLE = {  # of the whole model, by operation and weight
    ("GET_ROWS", "token_embd"): "model.embed_tokens",
    ("MUL", "token_embd_norm"): "model.embedding_norm",
    ("MUL_MAT", "token_embd"): "lm_head",
    ("MUL_MAT", "output"): "lm_head",
}
READS = {  # by operation and what it reads of the same layer: what it makes
    ("MUL", "conv.in_proj", "conv.in_proj"): "conv.u",
    ("CONCAT", "", "conv.u"): "conv.state",  # and u behind it
    ("MUL", "conv.in_proj", "conv.conv"): "conv.gated",
    ("ROPE", "self_attn.q_layernorm", ""): "self_attn.q_rotated",
    ("ROPE", "self_attn.k_layernorm", ""): "self_attn.k_rotated",
    ("SET_ROWS", "self_attn.k_rotated", ""): "self_attn.cells",  # where the cache takes the keys
    ("MUL_MAT", "", "self_attn.q_rotated"): "self_attn.scores",  # with the cache's keys
    ("SOFT_MAX", "self_attn.scores", ""): "self_attn.weights",
    ("MUL_MAT", "", "self_attn.weights"): "self_attn.mixed",  # with the cache's values
    ("CONT", "self_attn.mixed", ""): "self_attn.attended",
    ("GLU", "feed_forward.w1", "feed_forward.w3"): "feed_forward.gated",
    ("ADD", "", "conv.out_proj"): "residual",
    ("ADD", "", "self_attn.out_proj"): "residual",
    ("ADD", "residual", "feed_forward.w2"): "",  # the layer's output
}
SAME = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")  # other shapes of what they read


class Tensor(ctypes.Structure):
    """struct ggml_tensor"""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.POINTER(Tensor)),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
    ("extra", ctypes.c_void_p),
    ("padding", ctypes.c_char * 8),
]


@dataclass(frozen=True)
class Source:
    """An input of a node: a node with a known name, or a leaf (a weight, an input, a cache) with its own."""

    known: str = ""
    leaf: str = ""


def known_as(op: str, sources: Sequence[Source]) -> tuple[str, bool]:
    """Which of our tensors a node is or views, and whether it computes it; "" for none."""
    first, second = (*sources, Source(), Source())[:2]
    if op in SAME or (op == "GET_ROWS" and second.leaf == "out_ids"):
        return first.known, False
    weight = re.fullmatch(r"(?:blk\.(\d+)\.)?(.+)\.weight", first.leaf or second.leaf)
    if weight is not None and weight[1] is None:
        return WHOLE.get((op, weight[2]), ""), True
    if weight is not None:
        part = WEIGHTS.get(weight[2], "")
        return (f"model.layers.{weight[1]}.{part}" if part else ""), True
    layer, of_first, of_second = within_layer(first.known, second.known)
    for form in ((op, of_first, of_second), (op, "", of_second), (op, of_first, "")):
        if layer and form in READS:
            return f"{layer}.{READS[form]}".removesuffix("."), True
    return "", True


def within_layer(*names: str) -> tuple[str, ...]:
    """The layer of the last name that has one, and each name within it: "" for one of another layer."""
    matches = [re.fullmatch(r"(model\.layers\.\d+)\.(.+)", name) for name in names]
    layer = next((match[1] for match in reversed(matches) if match is not None), "")
    return layer, *(match[2] if match is not None and match[1] == layer else "" for match in matches)


class Library:
    """The functions of ggml that the loaded llama.cpp brings along."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._loaded = loaded
        loaded.ggml_op_name.restype = loaded.ggml_commit.restype = ctypes.c_char_p
        loaded.ggml_op_name.argtypes = [ctypes.c_int]
        loaded.ggml_nbytes.restype = ctypes.c_size_t
        loaded.ggml_nbytes.argtypes = [ctypes.c_void_p]
        loaded.ggml_backend_tensor_get.restype = None
        loaded.ggml_backend_tensor_get.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_size_t] * 2]

    @property
    def commit(self) -> str:
        return str(self._loaded.ggml_commit().decode())

    def op(self, tensor: Any) -> str:
        return str(self._loaded.ggml_op_name(tensor.op).decode())

    def numbers(self, tensor: Any) -> Array:
        """A copy, the fastest axis last; float16 and bfloat16 as float32."""
        address = ctypes.addressof(tensor)
        size = int(self._loaded.ggml_nbytes(address))
        content = ctypes.create_string_buffer(size)
        self._loaded.ggml_backend_tensor_get(address, content, 0, size)
        return strided(content.raw, tensor.type, tuple(tensor.ne), tuple(tensor.nb))


def strided(content: bytes, kind: int, ne: Sequence[int], nb: Sequence[int]) -> Array:
    """ggml's axes, the fastest first, with strides in bytes -> an array, the fastest last."""
    flat = np.frombuffer(content, STORED[kind])
    values = np.lib.stride_tricks.as_strided(flat, tuple(ne)[::-1], tuple(nb)[::-1])
    if kind == BF16:
        return widen(np.ascontiguousarray(values), "BF16")
    return values.astype(np.float32) if kind == F16 else values.copy()
