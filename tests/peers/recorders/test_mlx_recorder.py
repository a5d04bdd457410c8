"""A request's part of mlx-lm's padded batches."""

from __future__ import annotations

import numpy as np
import pytest
from recorders.mlx_recorder import Tap, valid_columns
from recorders.requirements import side_by_side, within_layer

from lfm2np.oracle.recorders.recorder import Recorder


def test_columns_behind_a_rows_tokens_are_padding() -> None:
    assert valid_columns([6, 1, 0], 4) == [4, 1, 0]
    assert valid_columns([2, -3, 0], 1) == [1, 0, 0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.conv.in_proj", ("model.layers.3", "conv.in_proj")),
        ("model.layers.3.ffn_norm", ("model.layers.3", "ffn_norm")),
        ("model.layers.3", ("", "model.layers.3")),
        ("model.embedding_norm", ("", "model.embedding_norm")),
        ("lm_head", ("", "lm_head")),
    ],
)
def test_a_name_is_a_part_of_its_layer(name: str, expected: tuple[str, str]) -> None:
    assert within_layer(name) == expected


def test_heads_are_put_side_by_side() -> None:
    heads = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    np.testing.assert_array_equal(side_by_side(heads)[1], [*heads[0, 1], *heads[1, 1]])


def test_steps_are_the_passes_that_have_rows_of_the_request() -> None:
    """Request 7 has a prompt of 5 tokens, in chunks of 4 beside a longer one, then new ones; 7 tokens count."""
    recorder = Recorder()
    tap = Tap({}, 7, 7, recorder)
    tap.batch_begins([3, 7], [9, 5])
    for tokens in ([[1, 2, 3, 4], [11, 12, 13, 14]], [[5, 6, 7, 8], [15, 0, 0, 0]], [[9], [0]]):
        tap.pass_begins(np.array(tokens))
    for uids, tokens in (([3, 7], [[10], [16]]), ([3], [[11]]), ([7], [[17]]), ([7], [[18]])):
        tap.batch_begins(uids, [1] * len(uids))
        tap.pass_begins(np.array(tokens))
    assert recorder.sizes == [4, 1, 1, 1]
    assert recorder.token_ids == [11, 12, 13, 14, 15, 16, 17]
