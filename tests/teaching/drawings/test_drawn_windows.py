"""A run of an LFM3 drawn: the pool of windowed layers, what is given back while a request runs, the gates' numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from drawn import demo_run
from faults import inject

import lfm2np
from lfm2np.engine.loading import Model
from lfm2np.teaching.drawings import demo
from lfm2np.teaching.drawings.all_views import draw
from lfm2np.teaching.drawings.runs.derive import num_kept, pools
from lfm2np.teaching.drawings.runs.paged import contents
from lfm2np.teaching.drawings.runs.recorded import Coming, recorded
from lfm2np.teaching.drawings.runs.recorded_run import Run, in_windows, read_run
from lfm2np.teaching.drawings.terminal_drawing import as_text
from lfm2np.teaching.drawings.views.batching import batching
from lfm2np.teaching.drawings.views.schedule import schedule
from scheduler import FREED

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 8, "watermark": 0.0}


@pytest.fixture(scope="module")
def model() -> Model:
    return lfm2np.load(lfm2np.lfm3_fixture())


def run_of(model: Model, **sizes: Any) -> Run:
    """Two long requests with one prompt, and a short one."""
    coming = [Coming(name, "count: 23 to 31 ->", demo.greedy(24)) for name in "ab"]
    return read_run(recorded(model, [*coming, Coming("c", "copy: zo sa ->", demo.greedy(6), 3)], **SIZES, **sizes))


@pytest.fixture(scope="module")
def windowed_run(model: Model) -> Run:
    return run_of(model, num_blocks=32, num_window_blocks=40)


@pytest.mark.parametrize("num_blocks", [32, 13])
def test_windowed_blocks_hold_what_the_next_row_sees(model: Model, num_blocks: int) -> None:
    """Also of requests that were preempted, whose blocks are others then."""
    run = run_of(model, num_blocks=num_blocks)
    assert (num_blocks == 13) == any(step.preempted for step in run.steps)
    windows = in_windows(run)
    assert windows is not None
    known = {name: list(asked.prompt) for name, asked in run.requests.items()}
    for step, held in zip(windows.steps, contents(windows), strict=True):
        for entry in step.entries:
            count, text = entry.start + num_kept(step, entry), known[entry.request_id]
            text[entry.start : count] = entry.token_ids[: count - entry.start]
            for at in range(max(0, count - 16), count):
                assert held.tokens[entry.block_table[at // 4]][at % 4] == text[at]


def test_a_block_is_given_back_while_its_request_runs(windowed_run: Run) -> None:
    assert in_windows(demo_run()) is None
    windows = in_windows(windowed_run)
    assert windows is not None and windows.config["num_blocks"] == windowed_run.config["num_window_blocks"]
    known = pools(windowed_run, windows)
    freed = {entry.request_id for step in windows.steps for entry in step.entries if FREED in entry.block_table}
    assert {"a", "b"} <= freed
    for step, pool in zip(windows.steps, known, strict=True):
        for entry in step.entries:
            owned = {block for block, names in pool.owners.items() if entry.request_id in names}
            assert set(entry.block_table) - {FREED} <= owned and len(owned) <= (16 - 1 + 8 + 2) // 4 + 1


def test_a_broken_schedule_has_windows_by_its_plans(model: Model) -> None:
    with inject("budget-ignored"):
        run = run_of(model, num_blocks=32)
    windows = in_windows(run)
    assert all(pool.cached is None and FREED not in pool.owners for pool in pools(run, windows))


def test_the_operations_have_both_rotations_the_gates_and_the_norms_behind(windowed_run: Run) -> None:
    rotations = []
    for layer in (2, 4):  # with full attention, and in a window
        named = {each["name"]: each for each in windowed_run.steps[0].operations if each["layer"] == layer}
        assert named["attention"].get("window") == (16 if layer == 4 else None)
        assert {"post_operator_norm", "post_ffn_norm", "self_attn.g_proj"} <= set(named)
        gates = named["gates of the heads"]["output"]
        assert gates["shape"] == [8, 4] and all(0 < gate < 1 for row in gates["values"] for gate in row)
        rotations.append(named["rotary"]["inputs"]["cos"]["values"])
    assert rotations[0] != rotations[1]


def test_the_page_and_the_terminal_show_windows(windowed_run: Run) -> None:
    page = draw(windowed_run, lfm2np.load(), "a run", "lfm2np draw run.jsonl -o page.html")
    assert "Blocks of windowed layers in step 12" in page
    assert re.search(r"sees positions 0 to \d+ in full layers only, and windowed ones gave \d+ of them back", page)
    last = as_text(windowed_run, 12, False)
    assert "blocks of 4 tokens in windowed layers:" in last and "blocks of 4 tokens:" in last


def test_a_longer_request_than_the_windows_pool_is_drawn(model: Model) -> None:
    """Policies that reserve take the whole length of it; the pool that fits the recorded one may not."""
    coming = [Coming("a", "count: 23 to 31 ->", demo.greedy(30))]
    run = read_run(recorded(model, coming, **SIZES, num_blocks=32, num_window_blocks=8))
    assert schedule(run).picture and batching(run).picture
