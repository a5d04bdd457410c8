"""A policy is one class: once registered, it reaches options, sizes, strategies and messages."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler import POLICIES, Request, Scheduler, SchedulerConfig, TraceWriter, check, reasons, replay
from scheduler.policy import FirstComeFirstServed, Step


class NewestFirst(FirstComeFirstServed):
    """Starves whoever is old, so it is only for this test."""

    name = "newest-first"

    def key(self, request: Request) -> tuple[int, int]:
        return (-request.arrival, 0)

    def plan(self, step: Step) -> None:
        step.fill(False, False)
        step.fill(admit=False)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, NewestFirst.name, NewestFirst)


def test_a_new_policy_schedules_and_its_trace_is_replayed() -> None:
    config = SchedulerConfig(12, block_size=2, max_num_seqs=2, max_num_batched_tokens=4, policy="newest-first")
    scheduler, file, ended = Scheduler(config), io.StringIO(), []
    trace = TraceWriter(file, config)
    for name in "abc":
        request = Request(name, (1, 2, 3), max_tokens=3)
        scheduler.add(request)
        trace.add(request, [])
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        tokens = {name: [7] for entry in plan.scheduled for name in entry.samples}
        finished = scheduler.update(plan, tokens)
        ended += [request.request_id for request in finished]
        state = len(scheduler.waiting), len(scheduler.running), scheduler.pool.num_free
        trace.step(plan, {}, tokens, (), reasons(finished), state, None)
        check(scheduler)
    trace.end()
    assert ended == ["c", "b", "a"]
    assert replay(io.StringIO(file.getvalue())).requests == 3


LISTS = """
from test_new_policy import NewestFirst
from scheduler import POLICIES
POLICIES[NewestFirst.name] = NewestFirst
from argparse import ArgumentParser
from hypothesis import find
from lfm2np.commands.cli.options import add_engine_options
from internal_properties.wrong_calls import POLICY_NAMES
from lfm2np.suite.strategies.scenarios import sizes
from lfm2np.teaching.lab.settings import FIELDS
parser = ArgumentParser()
add_engine_options(parser)
assert parser.parse_args(["--policy", "newest-first"]).policy == "newest-first"
assert find(sizes(), lambda drawn: drawn["policy"] == "newest-first")
assert POLICY_NAMES.endswith(", newest-first")
assert any("newest-first" in each.may for each in FIELDS)
"""


def test_every_list_of_policies_has_a_new_one() -> None:
    """In a process of its own: some lists are made when their module is imported."""
    folder = Path(__file__).parent
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent)])}
    command = [sys.executable, "-c", LISTS]
    done = subprocess.run(command, env=paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
