"""What is worked out of a trace: the tokens in every block, and who owns it; of an LFM3 also the pool of windowed
layers, what is given back while a request runs, and the gates' numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from drawn import demo_run
from faults import inject
from hypothesis import given

import lfm2np
from lfm2np.engine.loading import Model
from lfm2np.suite.adapters import own
from lfm2np.suite.properties.driver import make
from lfm2np.suite.properties.driver import run as run_scenario
from lfm2np.suite.strategies.scenarios import Scenario, scenarios
from lfm2np.teaching.drawings import demo
from lfm2np.teaching.drawings.all_views import draw
from lfm2np.teaching.drawings.runs.derive import by_plans, num_kept, pools
from lfm2np.teaching.drawings.runs.paged import contents
from lfm2np.teaching.drawings.runs.recorded import Coming, recorded
from lfm2np.teaching.drawings.runs.recorded_run import Run, in_windows, read_run
from lfm2np.teaching.drawings.terminal_drawing import as_text
from lfm2np.teaching.drawings.views.batching import batching
from lfm2np.teaching.drawings.views.schedule import schedule
from scheduler import FREED

pytestmark = pytest.mark.slow


@pytest.mark.night
@given(scenarios(kinds=("abort", "preempt", "fork")))
def test_the_map_the_owners_and_the_schedule_are_the_trace(scenario: Scenario) -> None:
    """After every step: at a table's places are the request's own tokens; tables and slots of the plan are among what
    the scheduler holds, and what it holds is not free. (Other blocks are reserved, and in no table yet.)"""
    engine = make(own, scenario.model, scenario.sizes)
    run_scenario(engine, scenario)
    run = read_run(engine.trace(), is_whole=False)
    holds_what_was_computed(run)
    has_forks = any(asked.parent for asked in run.requests.values())
    for step, pool in zip(run.steps, pools(run), strict=True):
        assert pool.cached is not None and pool.cached + len(pool.owners) <= run.config["num_blocks"]
        still = {block for block, names in pool.owners.items() if set(names) - set(step.finished)}
        assert has_forks or len(still) <= run.config["num_blocks"] - step.free_blocks, step.number
        for entry in step.entries:
            assert pool.slots[entry.slot] == entry.request_id
            assert all(entry.request_id in pool.owners[block] for block in entry.block_table)


def test_a_schedule_that_no_sound_scheduler_makes_is_told() -> None:
    model = lfm2np.load()
    sizes = {"num_blocks": 8, "block_size": 4, "max_num_batched_tokens": 12}
    coming = [Coming(name, "copy: tivu zo sa mi ->", demo.greedy(6)) for name in "ab"]
    with inject("budget-ignored"):
        run = read_run(recorded(model, coming, **sizes))
    assert pools(run) == by_plans(run)
    assert all(pool.cached is None for pool in pools(run))
    assert all(pool.cached is not None for pool in pools(read_run(recorded(model, coming, **sizes))))


def test_in_the_demo_all_blocks_that_are_not_free_are_owned() -> None:
    """A sample without a slot waits, and has no blocks (it had, on the page)."""
    run = demo_run()
    for step, owned in zip(run.steps, [pool.owners for pool in pools(run)], strict=True):
        rejected = sum(entry.num_drafts for entry in step.entries)
        still = {block for block, names in owned.items() if set(names) - set(step.finished)}
        assert 0 <= len(still) - (run.config["num_blocks"] - step.free_blocks) <= rejected, step.number


def test_the_map_holds_no_rejected_draft() -> None:
    run = demo_run()
    assert any(num_kept(step, entry) < len(entry.token_ids) for step in run.steps for entry in step.entries)
    holds_what_was_computed(run)


def holds_what_was_computed(run: Run) -> None:
    size = int(run.config["block_size"])
    known = {name: list(asked.prompt) for name, asked in run.requests.items()}
    for step, held in zip(run.steps, contents(run), strict=True):
        for entry in step.entries:
            computed = entry.start + num_kept(step, entry)
            tokens = [held.tokens[entry.block_table[at // size]][at % size] for at in range(computed)]
            parent = run.requests[entry.request_id].parent
            if parent is not None and entry.start > len(known[entry.request_id]):  # forked behind its prompt
                known[entry.request_id] = known[parent]
            before = known[entry.request_id][: entry.start]
            assert tokens == [*before, *entry.token_ids[: computed - entry.start]]
            known[entry.request_id] = tokens
            assert all(
                set(held.tokens[block]) <= set(range(size)) for block in entry.block_table if block in held.tokens
            )
            number, filled = divmod(computed, size)
            if filled:
                assert sorted(held.tokens[entry.block_table[number]]) == list(range(filled))


# --- windows

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
