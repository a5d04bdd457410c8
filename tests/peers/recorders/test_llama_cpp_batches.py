"""How llama.cpp splits a batch, and where a request's rows, keys and scores are in a micro-batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from recorders.llama_cpp_batches import (
    Cells,
    Place,
    Row,
    place_of,
    scores_by_row,
    sequence_tensors,
    split_equal,
)

from lfm2np.oracle.engines.target import TargetError


def prompts(*lengths: int) -> list[Row]:
    return [Row(number, at, 100 * number + at) for number, length in enumerate(lengths) for at in range(length)]


def shape(batch: list[Row]) -> list[tuple[int, int]]:
    return [(row.sequence, row.position) for row in batch]


def test_micro_batches_have_as_many_rows_of_each_sequence() -> None:
    batches = [shape(batch) for batch in split_equal(prompts(3, 1, 2), 512, sequential=False)]
    assert batches == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (2, 1)], [(0, 2)]]


def test_sequences_whose_numbers_do_not_follow_each_other_are_apart_in_separate_caches() -> None:
    batches = [shape(batch) for batch in split_equal(prompts(3, 1, 2), 512, sequential=True)]
    assert batches == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (0, 2)], [(2, 1)]]


def test_a_micro_batch_has_no_more_rows_than_it_may_unless_there_are_more_sequences() -> None:
    assert [len(batch) for batch in split_equal(prompts(5, 5), 4, sequential=False)] == [4, 4, 2]
    assert [len(batch) for batch in split_equal(prompts(1, 1, 1, 1), 2, sequential=False)] == [3, 1]


def test_every_row_is_in_one_micro_batch() -> None:
    rows = prompts(7, 2, 11)
    for most in (1, 3, 4, 64):
        for sequential in (False, True):
            split = [row for batch in split_equal(rows, most, sequential) for row in batch]
            assert sorted(shape(split)) == sorted(shape(rows))


def test_a_sequences_place_is_its_number_and_its_rows() -> None:
    first, second, _ = split_equal(prompts(3, 1, 2), 512, sequential=False)
    assert place_of(first, 2) == Place(2, 2, 3)
    assert place_of(second, 2) == Place(1, 1, 2)
    assert place_of(second, 1) is None
    assert place_of(prompts(3, 3), 1) == Place(1, 3, 6)


def test_cells_are_counted_within_their_stream() -> None:
    looks_at = Cells(first=64, between=64, streams=2, seen=32)
    assert [looks_at.stream_of(row, 6) for row in range(6)] == [0, 0, 0, 1, 1, 1]
    assert looks_at.within(1, [128, 130]).tolist() == [0, 2]
    with pytest.raises(TargetError, match="expected those of 32 from 64 on in stream 0"):
        looks_at.within(0, [128])


def test_scores_are_ordered_by_position_with_zeros_behind() -> None:
    scores = np.arange(2 * 2 * 3 * 4).reshape(2, 2, 3, 4)  # [streams, H, T / streams, C]
    picked = scores_by_row(scores, Place(1, 3, 6), 1, np.array([3, 1]), 5)
    assert picked.shape == (3, 2, 5)
    np.testing.assert_array_equal(picked[2, 1], [*scores[1, 1, 2, [3, 1]], 0, 0, 0])
    in_one = scores_by_row(scores[:1], Place(2, 2, 3), 0, np.array([0]), 1)  # all sequences in one stream
    np.testing.assert_array_equal(in_one[0, :, 0], scores[0, :, 2, 0])


def test_a_request_gets_its_part_of_each_tensor() -> None:
    rng = np.random.default_rng(0)
    prefix = "model.layers.0.self_attn"
    graph: dict[str, Any] = {
        "tokens": np.arange(6),
        "positions": np.arange(6),
        "cells": np.arange(6),
        "out_ids": np.arange(6),
        "lm_head": rng.normal(size=(6, 5)),
        "model.layers.1.conv.state": rng.normal(size=(2, 2, 4)),
        f"{prefix}.looks_at": Cells(0, 8, 2, 8),
        f"{prefix}.keys": rng.normal(size=(2, 1, 8, 4)),
        f"{prefix}.weights": rng.normal(size=(2, 2, 3, 8)),
    }
    tensors = dict(sequence_tensors(graph, Place(1, 3, 6), [8, 9, 10], 4))
    assert {name: values.shape for name, values in tensors.items()} == {
        "lm_head": (3, 5),
        "model.layers.1.conv.state": (1, 2, 4),
        f"{prefix}.keys_read": (3, 4),
        f"{prefix}.weights": (3, 2, 4),
    }
    np.testing.assert_array_equal(tensors["lm_head"], graph["lm_head"][3:])
    np.testing.assert_array_equal(tensors["model.layers.1.conv.state"][0], graph["model.layers.1.conv.state"][1])
    np.testing.assert_array_equal(tensors[f"{prefix}.keys_read"], graph[f"{prefix}.keys"][1, 0, :3])
