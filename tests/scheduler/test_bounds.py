"""The pure scheduler: under every policy nobody starves; and it needs the standard library only."""

import ast
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import scheduler
from scheduler import (
    POLICIES,
    Request,
    Scheduler,
    SchedulerConfig,
)

FOLDER = Path(scheduler.__file__).parent


def answer(subject: Scheduler, plan: scheduler.BatchPlan, token: int = 9) -> None:
    subject.update(plan, {name: [token] for entry in plan.scheduled for name in entry.samples})


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_an_endless_stream_of_others_starves_no_one(policy: str):
    """policy.py's bounds: nobody who arrived later is served first (priority: 1,000 steps later a level), and once
    it decodes, the next token comes within 9 steps (prefill-first: 8 without decodes)."""
    config = SchedulerConfig(num_blocks=40, block_size=2, max_num_seqs=3, max_num_batched_tokens=8, policy=policy)
    subject = Scheduler(config)
    target = Request("target", (1, 2, 3), 6, priority=1)
    served: list[int] = []
    overtook: list[int] = []  # how many steps later they had arrived
    for step in range(1500):
        if step == 5:
            subject.add(target)
        for k in range(2 if len(subject.waiting) < 40 else 0):
            subject.add(Request(f"{step}.{k}", (1, step, k), 2))
        plan = subject.schedule()
        names = {entry.request_id for entry in plan.scheduled}
        if "target" in names:
            served.append(step)
        elif step >= 5 and not served:
            overtook += [subject.requests[name].arrival_step - 5 for name in names]
            later = [name for name in names if subject.requests[name].arrival > target.arrival]
            assert policy == "priority" or not later
        answer(subject, plan)
        if target.is_finished:
            break
    assert target.is_finished
    assert max(after - before for before, after in pairwise(served)) <= 9
    if policy == "priority":
        assert 0 < max(overtook) <= 1000


def test_the_scheduler_needs_the_standard_library_only():
    script = "import sys; sys.modules['numpy'] = sys.modules['lfm2np'] = None; import scheduler"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=FOLDER.parent)
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert all(name.split(".")[0] in {*sys.stdlib_module_names, "scheduler"} for name in names), file
