"""Single operations of `exact` and `float64` against ONNX's ReferenceEvaluator and torch.nn.functional, in float64.

ONNX's evaluator is written in NumPy from the text of the ONNX standard, torch's kernels in C++: neither shares a line
with lfm2np or with each other. Both get the very numbers that lfm2np gets (float32 values for `exact`), widened.

Measured differences, relative to the largest number of the answer: float64 at most 2e-15; exact at most 2**-24 for
operations rounded once to float32, 2.8e-7 for products (weights of 26 bits), 1.1e-6 for attention (queries and keys of
23 bits, scores up to 10; half of it with a scale that suits the numbers).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch.nn import functional
from transformers.models.lfm2.modeling_lfm2 import apply_rotary_pos_emb

from lfm2np.arithmetic import numerics_named
from lfm2np.arithmetic.matrix import AttentionScale
from lfm2np.truth.integers import attention_scale
from lfm2np.truth.rope import Rope, angles, inverse_frequencies, rotary_table

pytestmark = pytest.mark.peers

Array = NDArray[Any]
NUMERICS = {name: numerics_named(name) for name in ("exact", "float64")}
ROUNDED_ONCE = {"exact": 2.0**-23.9, "float64": 2e-15}
LINEAR = {"exact": 5e-7, "float64": 1e-14}
ATTENTION = {"exact": 2e-6, "float64": 1e-14}
EPS = 2.0**-17  # about 1e-5, and the same number in float32, in which ONNX holds attributes
KINDS = {"float64": TensorProto.DOUBLE, "int64": TensorProto.INT64}
SHAPES = [(1, 1), (2, 3), (5, 40), (7, 129)]

each_numerics = pytest.mark.parametrize("numerics", NUMERICS)


def drawn(count: int, **values: Sequence[Any]) -> pytest.MarkDecorator:
    """`count` random combinations, the same every time; each value comes up equally often, give or take one."""
    rng = random.Random(0)
    columns = [rng.sample((list(column) * count)[:count], count) for column in values.values()]
    return pytest.mark.parametrize(",".join(values), list(zip(*columns, strict=True)))


def onnx_op(name: str, opset: int, inputs: dict[str, Array | None], outputs: list[str], **attributes: Any) -> list[Any]:
    """One operator of the ONNX standard; an input of None is left out."""
    feeds = {key: value for key, value in inputs.items() if value is not None}
    node = helper.make_node(name, [key if key in feeds else "" for key in inputs], outputs, **attributes)
    declared = [helper.make_tensor_value_info(key, KINDS[v.dtype.name], v.shape) for key, v in feeds.items()]
    answers = [helper.make_tensor_value_info(key, TensorProto.DOUBLE, None) for key in outputs]
    graph = helper.make_graph([node], name, declared, answers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return list(ReferenceEvaluator(model).run(None, feeds))


def normal(seed: int, *shape: int) -> Array:
    """Standard normal numbers as float32, so that every arithmetic can hold them."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def activations(numerics: str, x: Array) -> Array:
    return x.astype(np.float64) if numerics == "float64" else x


def wide(x: Array) -> Array:
    return x.astype(np.float64)


def tensor(x: Array) -> torch.Tensor:
    return torch.from_numpy(wide(x))


def assert_close(ours: Array, peer: Array | torch.Tensor, bound: float) -> None:
    """Within `bound` of the largest number, element by element."""
    peer = np.asarray(peer)
    assert ours.shape == peer.shape
    assert np.isfinite(ours).all()
    assert np.abs(ours - peer).max(initial=0.0) <= bound * np.abs(peer).max(initial=0.0)


@each_numerics
@drawn(12, shape=SHAPES, outputs=[1, 6, 31], biased=[False, True])
def test_a_linear_map_is_torchs(numerics: str, shape: tuple[int, int], outputs: int, biased: bool) -> None:
    tokens, width = shape
    weight, bias = normal(1, outputs, width), normal(2, outputs) if biased else None
    x = normal(3, tokens, width)
    arithmetic = NUMERICS[numerics]
    ours = arithmetic.linear(activations(numerics, x), arithmetic.prepare_matrix(weight, "weight"), bias)
    peer = functional.linear(tensor(x), tensor(weight), None if bias is None else tensor(bias))
    assert_close(ours, peer, LINEAR[numerics])


@each_numerics
@drawn(
    20,
    taps=[1, 2, 4, 7],
    width=[1, 3, 40],
    biased=[False, True],
    chunks=[(9,), (1,), (1, 1, 1, 1), (2, 1, 5), (3, 7, 1, 12)],
)
def test_a_convolution_in_chunks_is_onnxs_with_its_state(
    numerics: str, taps: int, width: int, biased: bool, chunks: tuple[int, ...]
) -> None:
    """The first chunk starts without a state, which is zeros; chunks may be shorter than the state."""
    weight, bias = normal(1, width, taps), normal(2, width) if biased else None
    state: Array | None = None
    for i, tokens in enumerate(chunks):
        u = normal(10 + i, tokens, width)
        inputs: dict[str, Array | None] = {
            "input": wide(u).T[None],
            "weight": wide(weight)[:, None],
            "bias": None if bias is None else wide(bias),
            "past_state": state,
        }
        peer, present = onnx_op("CausalConvWithState", 27, inputs, ["output", "present_state"])
        history = np.zeros((taps - 1, width)) if state is None else state[0].T
        like = activations(numerics, u)
        ours = NUMERICS[numerics].convolve(history.astype(like.dtype), like, weight, bias)
        assert_close(ours, peer[0].T, ROUNDED_ONCE[numerics])
        state = present


@each_numerics
@pytest.mark.parametrize("shape", [*SHAPES, (3, 2, 64), (4, 5, 7)])
@pytest.mark.parametrize("scale", [1.0, 2.0**-12, 2.0**20])
def test_a_norm_is_onnxs_and_torchs(numerics: str, shape: tuple[int, ...], scale: float) -> None:
    """Also where eps decides, and where the mean square is 2**40."""
    x, weight = normal(1, *shape) * np.float32(scale), normal(2, shape[-1])
    ours = NUMERICS[numerics].rms_norm(activations(numerics, x), weight, EPS)
    inputs: dict[str, Array | None] = {"X": wide(x), "scale": wide(weight)}
    (onnx_norm,) = onnx_op("RMSNormalization", 23, inputs, ["Y"], epsilon=EPS)
    assert_close(ours, onnx_norm, ROUNDED_ONCE[numerics])
    torch_norm = functional.rms_norm(tensor(x), (shape[-1],), tensor(weight), EPS)
    assert_close(ours, torch_norm, ROUNDED_ONCE[numerics])


@each_numerics
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1000.0])
def test_swiglu_is_onnxs_and_torchs(numerics: str, scale: float) -> None:
    """Element by element, since silu spans many magnitudes; -1000 gives zero or nearly so."""
    gate, up = normal(1, 9, 77) * np.float32(scale), normal(2, 9, 77)
    ours = NUMERICS[numerics].swiglu(activations(numerics, gate), activations(numerics, up))
    with np.errstate(over="ignore"):  # exp(1000)
        (onnx_silu,) = onnx_op("Swish", 24, {"X": wide(gate)}, ["Y"], alpha=1.0)
    for silu in (onnx_silu, functional.silu(tensor(gate)).numpy()):
        np.testing.assert_allclose(ours, silu * wide(up), rtol=ROUNDED_ONCE[numerics], atol=1e-45)


@each_numerics
@drawn(15, head_dim=[2, 6, 10, 64, 128], heads=[1, 5], start=[0, 1, 1000, 100_000])
def test_a_rotation_is_onnxs_and_transformers(numerics: str, head_dim: int, heads: int, start: int) -> None:
    tokens = 5
    x, positions = normal(1, tokens, heads, head_dim), np.arange(start, start + tokens)
    cos, sin = rotary_table(positions, head_dim, Rope(1e6))
    ours = NUMERICS[numerics].rotate(activations(numerics, x), cos, sin)
    by_head = wide(x).transpose(1, 0, 2)[None]  # [1, heads, T, E]
    order = np.random.default_rng(0).permutation(tokens)  # the tables are looked up by position
    inputs: dict[str, Array | None] = {
        "X": by_head,
        "cos_cache": cos[order],
        "sin_cache": sin[order],
        "position_ids": np.argsort(order)[None],
    }
    (onnx_rotated,) = onnx_op("RotaryEmbedding", 23, inputs, ["Y"])
    assert_close(ours, onnx_rotated[0].transpose(1, 0, 2), ROUNDED_ONCE[numerics])
    both = [torch.from_numpy(np.concatenate([table, table], axis=-1))[None] for table in (cos, sin)]
    rotated, _ = apply_rotary_pos_emb(torch.from_numpy(by_head), torch.from_numpy(by_head), *both)
    assert_close(ours, rotated[0].transpose(0, 1), ROUNDED_ONCE[numerics])


@each_numerics
@drawn(
    30,
    heads_and_groups=[(1, 1), (3, 3), (4, 2), (5, 1), (15, 3)],
    head_dim=[2, 6, 10, 64],
    tokens_and_context=[(1, 1), (9, 9), (1, 8), (2, 37), (5, 6), (3, 129)],
)
def test_attention_in_a_chunk_is_onnxs_and_torchs(
    numerics: str, heads_and_groups: tuple[int, int], head_dim: int, tokens_and_context: tuple[int, int]
) -> None:
    """One, two or five query heads a key/value head; the queries are the last of the context."""
    (heads, groups), (tokens, context) = heads_and_groups, tokens_and_context
    past = context - tokens
    queries = 2 * normal(1, tokens, heads, head_dim)
    keys, values = normal(2, context, groups, head_dim), normal(3, context, groups, head_dim)
    scales = [
        AttentionScale(np.zeros(head_dim, np.int32), np.zeros((groups, head_dim), np.int32)),
        attention_scale(normal(4, head_dim), 64 * normal(5, head_dim), normal(6, groups * head_dim, 7)),
    ]
    q, k, v = (wide(x).transpose(1, 0, 2)[None] for x in (queries, keys, values))  # [1, heads, positions, E]
    inputs: dict[str, Array | None] = {"Q": q, "K": k[:, :, past:], "V": v[:, :, past:], "attn_mask": None}
    if past:
        inputs |= {"past_key": k[:, :, :past], "past_value": v[:, :, :past]}
    (by_onnx,) = onnx_op("Attention", 25, inputs, ["Y"], is_causal=1)
    mask = torch.ones(tokens, context, dtype=torch.bool).tril(past)  # bottom right: query t sees past + t + 1 keys
    by_torch = functional.scaled_dot_product_attention(
        torch.from_numpy(q), torch.from_numpy(k), torch.from_numpy(v), attn_mask=mask, enable_gqa=True
    )
    like_queries, like_keys, like_values = (activations(numerics, x) for x in (queries, keys, values))
    for scale in scales if numerics == "exact" else scales[:1]:
        ours = NUMERICS[numerics].attend(like_queries, like_keys, like_values, scale)
        assert_close(ours.transpose(1, 0, 2), by_onnx[0], ATTENTION[numerics])
        assert_close(ours.transpose(1, 0, 2), by_torch[0], ATTENTION[numerics])


@each_numerics
def test_log_probabilities_are_torchs(numerics: str) -> None:
    logits = 5 * normal(1, 7, 1001)
    ours = NUMERICS[numerics].log_softmax(activations(numerics, logits))
    assert_close(ours, functional.log_softmax(tensor(logits), dim=-1), 1e-14)


def torch_inverse_frequencies(head_dim: int, theta: float) -> Array:
    """Lfm2RotaryEmbedding.compute_default_rope_parameters."""
    return np.asarray(1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)))


@pytest.mark.parametrize("theta", [1e4, 1e6, 5e6])
def test_frequencies_are_transformers_bit_for_bit_in_every_published_model(theta: float) -> None:
    assert np.array_equal(inverse_frequencies(64, Rope(theta)), torch_inverse_frequencies(64, theta))


@pytest.mark.parametrize("start", [0, 1000, 127_000, 2**20 - 1000])
def test_the_rotary_table_is_torchs_float64_cosine_of_the_float32_angle(start: int) -> None:
    positions = np.arange(start, start + 1000)
    angle = torch.from_numpy(positions).float()[:, None] * torch.from_numpy(torch_inverse_frequencies(64, 1e6))
    assert np.array_equal(angles(positions, 64, Rope(1e6)), angle.numpy())
    cos, sin = rotary_table(positions, 64, Rope(1e6))
    np.testing.assert_allclose(cos, angle.double().cos(), rtol=0, atol=4e-16)
    np.testing.assert_allclose(sin, angle.double().sin(), rtol=0, atol=4e-16)
