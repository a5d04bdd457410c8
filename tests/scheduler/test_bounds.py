"""The pure scheduler: under every policy nobody starves; what runs is found; names that come twice."""

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


def stepped(subject: Scheduler, errors: tuple[str, ...] = ()) -> dict[str, int]:
    """One step; where each of its requests started."""
    plan = subject.schedule()
    subject.update(
        plan, {name: [9] for entry in plan.scheduled for name in entry.samples if name not in errors}, errors
    )
    return {entry.request_id: entry.start for entry in plan.scheduled}


def test_a_prefix_that_runs_is_found_although_the_block_of_its_twin_was_evicted():
    """Each of two that began together had computed its own block; what was found, then evicted, was the other's."""
    subject = Scheduler(SchedulerConfig(num_blocks=6, block_size=4, max_num_seqs=4, watermark=0.0))
    subject.add(Request("a", (1, 2, 3, 4, 5), 1))
    subject.add(Request("b", (1, 2, 3, 4, 5), 9))
    assert stepped(subject) == {"a": 0, "b": 0}
    subject.add(Request("x", (8,) * 13, 1))
    stepped(subject)
    subject.add(Request("c", (1, 2, 3, 4, 6), 1))
    assert stepped(subject)["c"] == 4


def test_an_error_that_is_named_twice_ends_its_request_once():
    subject = Scheduler(SchedulerConfig(num_blocks=6, block_size=4))
    subject.add(Request("a", (1, 2), 3))
    stepped(subject, ("a", "a"))
    assert not subject.has_unfinished and subject.pool.num_free == 6


def test_a_sample_that_was_aborted_before_it_is_split_off_is_not_asked_for():
    """Its name may be another request's by then."""
    subject = Scheduler(SchedulerConfig(num_blocks=9, block_size=4, max_num_batched_tokens=2))
    subject.add(Request("a", (1, 2, 3), 3), [Request("b", (1, 2, 3), 3)])
    stepped(subject)
    subject.abort("b")
    subject.add(Request("b", (7, 7), 2))
    assert [entry.samples for entry in subject.schedule().scheduled] == [("a",), ()]
