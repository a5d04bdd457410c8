"""What is worked out of a trace: the tokens in every block, and who owns it."""

from __future__ import annotations

import pytest
from drawn import demo_run
from faults import inject
from hypothesis import given

import lfm2np
from lfm2np.suite.adapters import own
from lfm2np.suite.properties.driver import make
from lfm2np.suite.properties.driver import run as run_scenario
from lfm2np.suite.strategies.scenarios import Scenario, scenarios
from lfm2np.teaching.drawings import demo
from lfm2np.teaching.drawings.runs.derive import by_plans, num_kept, pools
from lfm2np.teaching.drawings.runs.paged import contents
from lfm2np.teaching.drawings.runs.recorded import Coming, recorded
from lfm2np.teaching.drawings.runs.recorded_run import Run, read_run

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
