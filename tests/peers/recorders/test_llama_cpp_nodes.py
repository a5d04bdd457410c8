"""Which of our tensors a node of llama.cpp's graph is, told by what it reads; and ggml's axes."""

from __future__ import annotations

import numpy as np
import pytest
from recorders.llama_cpp_nodes import BF16, F16, F32, I32, Source, known_as, strided

LAYER = "model.layers.3"


def known(name: str) -> Source:
    return Source(known=f"{LAYER}.{name}")


def leaf(name: str) -> Source:
    return Source(leaf=name)


@pytest.mark.parametrize(
    ("op", "sources", "expected"),
    [
        ("GET_ROWS", [leaf("token_embd.weight"), leaf("inp_tokens")], "model.embed_tokens"),
        ("MUL", [Source(), leaf("token_embd_norm.weight")], "model.embedding_norm"),
        ("MUL_MAT", [leaf("token_embd.weight"), Source("model.embedding_norm")], "lm_head"),
        ("MUL_MAT", [leaf("output.weight"), Source("model.embedding_norm")], "lm_head"),
        ("MUL", [Source(), leaf("blk.3.attn_norm.weight")], f"{LAYER}.operator_norm"),
        ("MUL", [Source(), leaf("blk.3.ffn_norm.weight")], f"{LAYER}.ffn_norm"),
        ("MUL_MAT", [leaf("blk.3.shortconv.in_proj.weight"), known("operator_norm")], f"{LAYER}.conv.in_proj"),
        ("MUL", [known("conv.in_proj"), known("conv.in_proj")], f"{LAYER}.conv.u"),
        ("CONCAT", [Source(), known("conv.u")], f"{LAYER}.conv.state"),
        ("SSM_CONV", [known("conv.state"), leaf("blk.3.shortconv.conv.weight")], f"{LAYER}.conv.conv"),
        ("MUL", [known("conv.in_proj"), known("conv.conv")], f"{LAYER}.conv.gated"),
        ("ROPE", [known("self_attn.q_layernorm"), leaf("inp_pos")], f"{LAYER}.self_attn.q_rotated"),
        ("ROPE", [known("self_attn.k_layernorm"), leaf("inp_pos")], f"{LAYER}.self_attn.k_rotated"),
        ("SET_ROWS", [known("self_attn.k_rotated"), leaf("attn_inp_k_idxs")], f"{LAYER}.self_attn.cells"),
        ("MUL_MAT", [Source(), known("self_attn.q_rotated")], f"{LAYER}.self_attn.scores"),
        ("SOFT_MAX", [known("self_attn.scores"), leaf("attn_inp_kq_mask")], f"{LAYER}.self_attn.weights"),
        ("MUL_MAT", [Source(), known("self_attn.weights")], f"{LAYER}.self_attn.mixed"),
        ("CONT", [known("self_attn.mixed")], f"{LAYER}.self_attn.attended"),
        ("ADD", [Source("model.layers.2"), known("conv.out_proj")], f"{LAYER}.residual"),
        ("ADD", [Source("model.embed_tokens"), known("self_attn.out_proj")], f"{LAYER}.residual"),
        ("GLU", [known("feed_forward.w1"), known("feed_forward.w3")], f"{LAYER}.feed_forward.gated"),
        ("ADD", [known("residual"), known("feed_forward.w2")], LAYER),
    ],
)
def test_a_node_is_what_its_operation_makes_of_what_it_reads(op: str, sources: list[Source], expected: str) -> None:
    assert known_as(op, sources) == (expected, True)


@pytest.mark.parametrize("op", ["VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"])
def test_another_shape_of_a_tensor_stands_for_it_and_is_not_read(op: str) -> None:
    assert known_as(op, [known("conv.u")]) == (f"{LAYER}.conv.u", False)


def test_rows_that_are_chosen_for_output_stand_for_their_tensor() -> None:
    assert known_as("GET_ROWS", [Source("model.layers.2"), leaf("out_ids")]) == ("model.layers.2", False)


@pytest.mark.parametrize(
    ("op", "sources"),
    [
        ("RMS_NORM", [known("residual")]),
        ("GET_ROWS", [leaf("cache_r_l3 (reshaped)"), Source()]),
        ("MUL_MAT", [leaf("blk.3.attn_qkv.weight"), known("operator_norm")]),
        ("ADD", [known("feed_forward.w2"), Source("model.layers.2.residual")]),
        ("MUL", [Source("model.layers.2.conv.in_proj"), known("conv.conv")]),
        ("CPY", [known("conv.state"), leaf("cache_r_l3")]),
        ("SCALE", []),
    ],
)
def test_other_nodes_are_not_ours(op: str, sources: list[Source]) -> None:
    assert known_as(op, sources)[0] == ""


def test_axes_are_turned_around_and_strides_followed() -> None:
    whole = np.arange(24, dtype="<f4").reshape(2, 3, 4)
    seen = strided(whole.tobytes(), F32, (3, 4, 2, 1), (16, 4, 48, 96))  # the last two exchanged
    np.testing.assert_array_equal(seen, whole.transpose(0, 2, 1)[None])


def test_half_formats_are_widened_and_whole_numbers_stay() -> None:
    values = np.array([1.5, -0.25], np.float32)
    half = (values.view(np.uint32) >> 16).astype("<u2")
    np.testing.assert_array_equal(strided(half.tobytes(), BF16, (2, 1, 1, 1), (2, 4, 4, 4))[0, 0, 0], values)
    np.testing.assert_array_equal(
        strided(values.astype("<f2").tobytes(), F16, (2, 1, 1, 1), (2, 4, 4, 4))[0, 0, 0], values
    )
    assert strided(np.array([7], "<i4").tobytes(), I32, (1, 1, 1, 1), (4, 4, 4, 4)).dtype == np.int32
