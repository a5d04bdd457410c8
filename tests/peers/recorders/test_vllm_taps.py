"""Which numbers of a batch, a merged product and a cache's blocks are a request's, as vLLM lays them out."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from recorders.vllm_recorder import VERSIONS, filled, missing_keys, record
from recorders.vllm_taps import Place, Step, parted, place_of, state_slot, summed_norm, unpacked

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.recorders import Recorder

FIXTURES = Path(__file__).parent.parent.parent.parent / "fixtures"
TRAINED = FIXTURES / "trained"


def test_a_request_has_the_rows_between_its_borders_and_sees_what_came_before() -> None:
    place = place_of("b", ["a", "b", "c"], [0, 1, 8, 9], [20, 30, 0])
    assert place == Place(1, 30, slice(1, 8))
    assert place is not None and (place.count, place.seen) == (7, 37)


def test_a_request_that_is_not_in_the_batch_has_no_place() -> None:
    assert place_of("d", ["a", "b", "c"], [0, 1, 8, 9], [20, 30, 0]) is None


def test_states_of_decodes_come_first_and_a_prompt_begins_with_none() -> None:
    slots = [state_slot(index, [7, 9], [3, 5], [1, 0]) for index in range(4)]
    assert slots == [7, 9, 3, None]


def test_a_merged_projection_is_parted_at_its_widths() -> None:
    joined = np.arange(14).reshape(2, 7)
    tensors = parted(("q", "k", "v"), (4, 2, 1), None, (joined, None))
    assert {name: rows.tolist() for name, rows in tensors.items()} == {
        "q": [[0, 1, 2, 3], [7, 8, 9, 10]],
        "k": [[4, 5], [11, 12]],
        "v": [[6], [13]],
    }


def test_a_norm_returns_the_sum_only_if_it_added() -> None:
    assert summed_norm("norm", "total", None, ("normed", "sum")) == {"norm": "normed", "total": "sum"}
    assert summed_norm("norm", "total", None, "normed") == {"norm": "normed"}


def test_blocks_in_any_order_are_read_as_rows_with_heads_side_by_side() -> None:
    blocks, heads, size, width = 3, 2, 4, 5
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(blocks * size, heads * width))
    places = rng.permutation(size * 2 * width)[: size * width]
    pages = rng.normal(size=(blocks, heads, size * 2 * width))
    by_head = rows.reshape(blocks, size, heads, width).swapaxes(1, 2)
    pages[:, :, places] = by_head.reshape(blocks, heads, -1)
    np.testing.assert_array_equal(unpacked(pages.reshape(blocks, heads, size, 2 * width), places), rows)


def test_steps_are_put_together_behind_the_prefix_that_they_found() -> None:
    steps = [Step(2, 2, {"x": np.ones((2, 3))}), Step(4, 1, {"x": np.zeros((1, 3))})]
    tensors = filled(Recorder(), [10, 11, 12, 13, 14, 15], steps).tensors()
    assert tensors["token_ids"].tolist() == [10, 11, 12, 13, 14]
    assert tensors["steps"].tolist() == [2, 1]
    assert tensors["x"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]


def test_of_a_request_that_was_computed_again_the_last_time_counts() -> None:
    first = [Step(0, 3, {"x": np.zeros((3, 1))}), Step(3, 1, {"x": np.zeros((1, 1))})]
    again = [Step(2, 2, {"x": np.ones((2, 1))}), Step(4, 1, {"x": np.ones((1, 1))})]
    tensors = filled(Recorder(), [10, 11, 12, 13, 14, 15], first + again).tensors()
    assert tensors["token_ids"].tolist() == [10, 11, 12, 13, 14]
    assert tensors["steps"].tolist() == [2, 2, 1]  # of the first step what the second time found in a cache
    assert tensors["x"].tolist() == [[0], [0], [1], [1], [1]]


def test_logits_of_chunks_before_the_last_are_left_out() -> None:
    steps = [Step(0, 2, {"lm_head": np.full((1, 1), 1)}), Step(2, 3, {"lm_head": np.full((1, 1), 4)})]
    steps += [Step(5, 1, {"lm_head": np.full((1, 1), 5)})]
    assert filled(Recorder(), list(range(7)), steps).tensors()["lm_head"].tolist() == [[4], [5]]


def test_a_format_that_is_not_known_is_refused_before_vllm_is_imported() -> None:
    with pytest.raises(RequestError, match="format 'q8': expected one of float32, float16, bfloat16"):
        record(TRAINED, [[1]], 0, 4, Recorder(format="q8"))


def test_a_missing_vllm_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(TargetError, match=r"^vllm: .*: expected vLLM 0\.32\.0 for CPUs$"):
        record(TRAINED, [[1]], 0, 1, Recorder(format="float32"))


@pytest.mark.parametrize(
    ("version", "is_cpu", "message"),
    [
        ("0.31.0", True, r"vllm: version 0\.31\.0, expected 0\.32\.0"),
        (f"{VERSIONS[0]}+cu130", False, "vllm: platform some card, expected cpu"),
    ],
)
def test_another_version_or_platform_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, is_cpu: bool, message: str
) -> None:
    engine, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    engine.__dict__["__version__"] = version
    platforms.__dict__["current_platform"] = SimpleNamespace(is_cpu=lambda: is_cpu, device_name="some card")
    monkeypatch.setitem(sys.modules, "vllm", engine)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    with pytest.raises(TargetError, match=message):
        record(TRAINED, [[1]], 0, 1, Recorder(format="float32"))


def test_keys_that_vllm_reads_from_a_config_are_added_if_missing(tmp_path: Path) -> None:
    assert missing_keys(TRAINED) == {}
    shutil.copy(FIXTURES / "torture" / "magnitudes" / "config.json", tmp_path)
    assert missing_keys(tmp_path) == {"block_dim": 48, "conv_dim": 48}
