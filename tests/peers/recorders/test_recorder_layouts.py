"""Where the recorders find a request's numbers, by what each engine's batches, graphs and caches look like; no engine
is needed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from recorders import mlx_recorder, openvino_recorder, vllm_taps
from recorders.llama_cpp_batches import Cells, Place, Row, place_of, sequence_tensors, split_equal
from recorders.llama_cpp_nodes import BF16, F32, Source, known_as, strided
from recorders.llama_cpp_slot import Checkpoint, chosen_checkpoint, cut
from recorders.vllm_recorder import filled

from lfm2np.oracle.recorders.recorder import Recorder

pytestmark = pytest.mark.peers


# --- llama.cpp


@pytest.mark.parametrize(
    ("sequential", "expected"),
    [(False, [["00", "10", "20"], ["01", "21"], ["02"]]), (True, [["00", "10", "20"], ["01", "02"], ["21"]])],
)
def test_micro_batches_have_as_many_rows_of_each_sequence(sequential: bool, expected: list[list[str]]) -> None:
    rows = [Row(number, at, 0) for number, length in enumerate((3, 1, 2)) for at in range(length)]
    batches = list(split_equal(rows, 512, sequential))
    assert [[f"{row.sequence}{row.position}" for row in batch] for batch in batches] == expected
    assert (place_of(batches[0], 2), place_of(batches[-1], 1)) == (Place(2, 2, 3), None)
    assert [len(batch) for batch in split_equal(rows, 2, sequential)] == [3, 2, 1]


def test_a_sequence_gets_its_part_of_each_tensor_in_the_order_of_its_positions() -> None:
    rng, prefix = np.random.default_rng(0), "model.layers.0.self_attn"
    graph: dict[str, Any] = {
        "tokens": np.arange(6),
        "lm_head": rng.normal(size=(6, 5)),
        "model.layers.1.conv.state": rng.normal(size=(2, 2, 4)),
        f"{prefix}.looks_at": Cells(64, 8, 2, 8),
        f"{prefix}.keys": rng.normal(size=(2, 2, 8, 4)),  # [streams, G, C, E]
        f"{prefix}.weights": rng.normal(size=(2, 2, 3, 8)),  # [streams, H, T / streams, C]
    }
    tensors = dict(sequence_tensors(graph, Place(1, 3, 6), [74, 72, 73], 4))
    np.testing.assert_array_equal(tensors["lm_head"], graph["lm_head"][3:])
    np.testing.assert_array_equal(tensors["model.layers.1.conv.state"], graph["model.layers.1.conv.state"][1:])
    keys, weights = graph[f"{prefix}.keys"][1], graph[f"{prefix}.weights"][1]
    np.testing.assert_array_equal(tensors[f"{prefix}.keys_read"][0], [*keys[0, 2], *keys[1, 2]])
    np.testing.assert_array_equal(tensors[f"{prefix}.weights"][2, 1], [*weights[1, 2, [2, 0, 1]], 0])
    assert len(tensors) == 4


@pytest.mark.parametrize(
    ("op", "sources", "expected"),
    [
        ("GET_ROWS", ["token_embd.weight", "inp_tokens"], "model.embed_tokens"),
        ("MUL_MAT", ["token_embd.weight", "=model.embedding_norm"], "lm_head"),
        ("MUL_MAT", ["blk.13.shortconv.in_proj.weight", "=L.operator_norm"], "L.conv.in_proj"),
        ("MUL", ["=L.conv.in_proj", "=L.conv.conv"], "L.conv.gated"),
        ("SOFT_MAX", ["=L.self_attn.scores", "attn_inp_kq_mask"], "L.self_attn.weights"),
        ("ADD", ["=model.layers.12", "=L.conv.out_proj"], "L.residual"),
        ("ADD", ["=model.embed_tokens", "=L.self_attn.out_proj"], "L.residual"),
        ("ADD", ["=L.residual", "=L.feed_forward.w2"], "L"),
        ("ADD", ["=L.feed_forward.w2", "=model.layers.12.residual"], ""),
        ("MUL", ["=model.layers.12.conv.in_proj", "=L.conv.conv"], ""),
        ("SCALE", [], ""),
    ],
)
def test_a_node_is_what_its_operation_makes_of_what_it_reads(op: str, sources: list[str], expected: str) -> None:
    """`=`: a node that is known already; L: the layer model.layers.13."""
    *names, name = (re.sub(r"\bL\b", "model.layers.13", name) for name in (*sources, expected))
    read = [Source(known=each[1:]) if each.startswith("=") else Source(leaf=each) for each in names]
    assert known_as(op, read) == (name, True)


def test_another_shape_of_a_tensor_and_the_rows_that_are_chosen_of_it_stand_for_it() -> None:
    for op, sources in (("VIEW", [Source("x")]), ("GET_ROWS", [Source("x"), Source(leaf="out_ids")])):
        assert known_as(op, sources) == ("x", False)


def test_axes_are_turned_around_strides_followed_and_bfloat16_widened() -> None:
    whole = np.arange(24, dtype="<f4").reshape(2, 3, 4)
    turned = strided(whole.tobytes(), F32, (3, 4, 2, 1), (16, 4, 48, 96))  # the last two exchanged
    np.testing.assert_array_equal(turned, whole.transpose(0, 2, 1)[None])
    half = (whole.reshape(-1).view(np.uint32) >> 16).astype("<u2")
    np.testing.assert_array_equal(strided(half.tobytes(), BF16, (24, 1, 1, 1), (2, 48, 48, 48)).reshape(2, 3, 4), whole)


def test_a_slot_cuts_prompts_before_their_end_and_goes_back_to_the_latest_checkpoint_that_fits() -> None:
    assert [cut(0, length) for length in (1, 4, 5, 9, 600, 5000)] == [1, 4, 1, 5, 84, 2048]
    assert [cut(1, 5), cut(84, 600), cut(596, 600)] == [5, 596, 600]
    kept = [Checkpoint(count, count - 1, count - 1, b"") for count in (1, 3, 9)]
    assert chosen_checkpoint(kept, 5, 5) is kept[1] and chosen_checkpoint(kept[:1], 1, 1) is kept[0]
    assert chosen_checkpoint(kept[2:], 5, 5) is None


# --- mlx, OpenVINO


def test_steps_are_the_passes_that_have_rows_of_the_request() -> None:
    """Request 7 has a prompt of 5 tokens, in chunks of 4 beside a longer one, then new ones; 7 tokens count."""
    recorder = Recorder()
    tap = mlx_recorder.Tap({}, 7, 7, recorder)
    tap.batch_begins([3, 7], [9, 5])
    for tokens in ([[1, 2, 3, 4], [11, 12, 13, 14]], [[5, 6, 7, 8], [15, 0, 0, 0]], [[9], [0]]):
        tap.pass_begins(np.array(tokens))
    for uids, tokens in (([3, 7], [[10], [16]]), ([3], [[11]]), ([7], [[17]]), ([7], [[18]])):
        tap.batch_begins(uids, [1] * len(uids))
        tap.pass_begins(np.array(tokens))
    assert (recorder.sizes, recorder.token_ids) == ([4, 1, 1, 1], [*range(11, 18)])


def test_outputs_of_a_graph_become_rows() -> None:
    joined = np.arange(12).reshape(2, 6)  # D=2: three columns that were kept, then three of u
    state = openvino_recorder.as_rows("model.layers.0.conv.state", joined, 3, 2)
    np.testing.assert_array_equal(state, joined[:, 1:3].T[None])
    np.testing.assert_array_equal(openvino_recorder.as_rows("model.layers.0.conv.u", joined, 6, 2), joined.T)
    heads = np.arange(24).reshape(2, 3, 4)  # [G, C, E]
    keys = openvino_recorder.as_rows("model.layers.1.self_attn.keys_read", heads, 1, 2)
    np.testing.assert_array_equal(keys[1], [*heads[0, 1], *heads[1, 1]])


# --- vLLM


def test_a_request_has_its_rows_its_state_and_its_part_of_a_merged_product() -> None:
    batch = (["a", "b", "c"], [0, 1, 8, 9], [20, 30, 0])
    assert vllm_taps.place_of("b", *batch) == vllm_taps.Place(1, 30, slice(1, 8))
    assert vllm_taps.place_of("d", *batch) is None
    assert [vllm_taps.state_slot(index, [7, 9], [3, 5], [1, 0]) for index in range(4)] == [7, 9, 3, None]
    parts = vllm_taps.parted(("q", "k"), (2, 1), None, (np.arange(6).reshape(2, 3), None))
    assert {name: rows.tolist() for name, rows in parts.items()} == {"q": [[0, 1], [3, 4]], "k": [[2], [5]]}


def test_blocks_in_any_order_are_read_as_rows_with_heads_side_by_side() -> None:
    rng, (blocks, heads, size, width) = np.random.default_rng(0), (3, 2, 4, 5)
    rows, places = rng.normal(size=(blocks * size, heads * width)), rng.permutation(size * 2 * width)[: size * width]
    pages = rng.normal(size=(blocks, heads, size * 2 * width))
    pages[:, :, places] = rows.reshape(blocks, size, heads, width).swapaxes(1, 2).reshape(blocks, heads, -1)
    np.testing.assert_array_equal(vllm_taps.unpacked(pages.reshape(blocks, heads, size, -1), places), rows)


def test_of_a_request_that_was_computed_again_the_last_time_counts() -> None:
    passes = ((0, 3, 0), (3, 1, 0), (2, 2, 1), (4, 1, 1))
    steps = [vllm_taps.Step(start, count, {"x": np.full((count, 1), value)}) for start, count, value in passes]
    tensors = filled(Recorder(), [*range(10, 16)], steps).tensors()
    assert tensors["token_ids"].tolist() == [*range(10, 15)] and tensors["steps"].tolist() == [2, 2, 1]
    assert tensors["x"].ravel().tolist() == [0, 0, 1, 1, 1]
