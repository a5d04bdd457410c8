"""The pure scheduler: under every policy nobody starves."""

from itertools import pairwise

import pytest

from scheduler import POLICIES, Request, Scheduler, SchedulerConfig


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
        subject.update(plan, {name: [9] for entry in plan.scheduled for name in entry.samples})
        if target.is_finished:
            break
    assert target.is_finished
    assert max(after - before for before, after in pairwise(served)) <= 9
    if policy == "priority":
        assert 0 < max(overtook) <= 1000
