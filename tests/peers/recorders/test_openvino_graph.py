"""Which node of an exported graph is which tensor: one layer of each kind, named as optimum-intel names nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recorders.openvino_recorder import TOP, Node, as_rows, tensors_of

from lfm2np.checkpoint.config_json import load_config
from lfm2np.oracle.engines.target import TargetError

TRAINED = load_config(Path(__file__).parents[3] / "fixtures" / "trained")
CONFIG = replace(TRAINED, num_hidden_layers=2, layer_types=("conv", "full_attention"))


def graph() -> dict[str, Node]:
    """Short names are those of nodes outside of all modules."""
    nodes: dict[str, Node] = {"ids": Node("Parameter", ()), "w": Node("Constant", ()), "cache": Node("ReadValue", ())}

    def add(name: str, op: str, *reads: str) -> str:
        nodes[TOP + name] = Node(op, reads)
        return TOP + name

    def norm(module: str, read: str) -> str:
        power = add(f"{module}/Power", "Power", "w", read)
        output = add(f"{module}/Multiply_1", "Multiply", add(f"{module}/Multiply", "Multiply", read, power), "w")
        add(f"{module}/shared", "Constant")  # by other modules
        return output

    def linear(module: str, read: str) -> str:
        return add(f"{module}/MatMul", "MatMul", read, "w")

    def end(layer: str, mixed: str, before: str) -> str:
        residual = add(f"{layer}/Add", "Add", before, mixed)
        normed = norm(f"{layer}.ffn_norm", residual)
        gate, up = linear(f"{layer}.feed_forward.w1", normed), linear(f"{layer}.feed_forward.w3", normed)
        gated = add(f"{layer}.feed_forward/Multiply", "Multiply", add(f"{layer}.feed_forward/Swish", "Swish", gate), up)
        return add(f"{layer}/Add_1", "Add", residual, linear(f"{layer}.feed_forward.w2", gated))

    embedded = add("model.embed_tokens/Gather", "Gather", "w", "ids")
    conv, attn = "model.layers.0.conv", "model.layers.1.self_attn"
    masked = add(f"{conv}/Multiply_1", "Multiply", norm("model.layers.0.operator_norm", embedded), "ids")
    parts = add(f"{conv}/VariadicSplit", "VariadicSplit", linear(f"{conv}.in_proj", masked), "w")
    u = add(f"{conv}/Multiply_2", "Multiply", parts, parts)
    joined = add(f"{conv}/Concat", "Concat", "cache", u)
    add(f"{conv}/Slice_4", "Slice", joined)  # the next state
    mixed = add(f"{conv}/Slice_7", "Slice", add(f"{conv}/GroupConvolution", "GroupConvolution", joined, "w"))
    gated = add(f"{conv}/Multiply_3", "Multiply", parts, mixed)
    first = end("model.layers.0", linear(f"{conv}.out_proj", gated), embedded)
    normed = norm("model.layers.1.operator_norm", first)
    values = linear(f"{attn}.v_proj", normed)
    shape = add(f"{attn}/Concat_shape", "Concat", add(f"{attn}/ShapeOf", "ShapeOf", values))
    seen = add(f"{attn}/Concat_v", "Concat", "cache", add(f"{attn}/View", "Reshape", values, shape))
    turned = {}
    for part in "kq":
        heads = norm(f"{attn}.{part}_layernorm", linear(f"{attn}.{part}_proj", normed))
        half = add(f"{attn}/Concat_{part}half", "Concat", heads, heads)
        turned[part] = add(f"{attn}/Add_{part}", "Add", heads, half)
    keys = add(f"{attn}/Concat_k", "Concat", "cache", turned["k"])
    attended = add(f"{attn}/Attention", "ScaledDotProductAttention", turned["q"], keys, seen)
    last = end("model.layers.1", linear(f"{attn}.out_proj", attended), first)
    linear("lm_head", norm("model.embedding_norm", last))
    return nodes


def test_each_tensor_has_its_node() -> None:
    nodes = {name: node.removeprefix(TOP) for name, node in tensors_of(graph(), CONFIG).items()}
    conv, attn = "model.layers.0.conv", "model.layers.1.self_attn"
    assert nodes["model.embed_tokens"] == "model.embed_tokens/Gather"
    assert nodes["model.layers.0.operator_norm"] == "model.layers.0.operator_norm/Multiply_1"
    assert {name.removeprefix(conv): node for name, node in nodes.items() if name.startswith(conv)} == {
        ".in_proj": f"{conv}.in_proj/MatMul",
        ".u": f"{conv}/Multiply_2",
        ".state": f"{conv}/Concat",
        ".conv": f"{conv}/Slice_7",
        ".gated": f"{conv}/Multiply_3",
        ".out_proj": f"{conv}.out_proj/MatMul",
    }
    assert (nodes[f"{attn}.q_rotated"], nodes[f"{attn}.k_rotated"]) == (f"{attn}/Add_q", f"{attn}/Add_k")
    assert (nodes[f"{attn}.keys_read"], nodes[f"{attn}.values_read"]) == (f"{attn}/Concat_k", f"{attn}/Concat_v")
    assert nodes[f"{attn}.attended"] == f"{attn}/Attention"
    assert (nodes["model.layers.1.residual"], nodes["model.layers.1"]) == ("model.layers.1/Add", "model.layers.1/Add_1")
    assert nodes["model.layers.1.feed_forward.gated"] == "model.layers.1.feed_forward/Multiply"
    assert list(nodes)[-2:] == ["model.embedding_norm", "lm_head"]


def test_a_module_that_is_not_there_is_named() -> None:
    without = {name: node for name, node in graph().items() if "ffn_norm" not in name}
    with pytest.raises(TargetError, match=r"no input of model\.layers\.0\.ffn_norm"):
        tensors_of(without, CONFIG)


def test_two_nodes_that_could_be_one_tensor_are_refused() -> None:
    twice = graph()
    twice[f"{TOP}model.layers.0.conv/Concat_2"] = twice[f"{TOP}model.layers.0.conv/Concat"]
    with pytest.raises(TargetError, match=r"2 fitting nodes Concat in model\.layers\.0\.conv, expected one"):
        tensors_of(twice, CONFIG)


def test_outputs_become_rows() -> None:
    joined = np.arange(2 * 6).reshape(2, 6)  # D=2: three columns that were kept, then three of u
    state = as_rows("model.layers.0.conv.state", joined, 3, 2)
    np.testing.assert_array_equal(state, joined[:, 1:3].T[None])
    np.testing.assert_array_equal(as_rows("model.layers.0.conv.u", joined[:, 3:], 3, 2), joined[:, 3:].T)
    heads = np.arange(2 * 3 * 4).reshape(2, 3, 4)  # [G, C, E]
    np.testing.assert_array_equal(
        as_rows("model.layers.1.self_attn.keys_read", heads, 1, 2)[1], [*heads[0, 1], *heads[1, 1]]
    )
    assert as_rows("model.layers.1.self_attn.q_layernorm", np.zeros((3, 2, 4)), 3, 2).shape == (3, 8)
    gated = np.arange(6).reshape(3, 2)
    np.testing.assert_array_equal(as_rows("model.layers.0.feed_forward.gated", gated, 3, 2), gated)
