"""The strict accounts fail for bugs that are put into the scheduler, and not for two programs that looked wrong."""

import pytest
from faults import Edit, Fault, inject
from hypothesis import HealthCheck, Phase, given, settings

from internal_properties.schedules import StrictRun, end_in_flight, schedules, strict_programs
from lfm2np.suite.schedulers.programs import PROMPT
from scheduler import SchedulerError


def strict_run(block_size: int, num_blocks: int, max_num_seqs: int, budget: int, policy: str, **more: int) -> StrictRun:
    sizes = {"block_size": block_size, "num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "policy": policy, **more}
    return StrictRun({**sizes, "max_num_batched_tokens": budget, "watermark": 0.0})


def test_samples_that_an_abort_queues_did_not_wait_before():
    """Found in 25,000 random schedules: a false alarm of the check that nobody is overtaken."""
    run = strict_run(1, 3, 3, 1, "static")
    run.add("r0", (0,), 1)
    run.add("r1", (0,), 1, children=["r2"])
    run.add("r3", (3,), 1)
    end_in_flight(run, 1, 0, "abort early")
    run.drain()


def test_a_request_that_waits_is_not_held_to_a_hit_that_decodes_evicted_later():
    """Found in 30,000 random schedules."""
    run = strict_run(5, 4, 2, 5, "prefill-first", sliding_window=3, num_window_blocks=3)
    run.add("r0", (*PROMPT[:9], 3), 2)
    run.add("r1", (*PROMPT[:5], *(3,) * 6), 2)
    run.add("r2", (3,) * 12, 2)
    run.add("r3", (0,), 3)
    run.add("r4", (3,) * 10, 3, children=["r5"])
    run.add("r6", (*(3,) * 10, 0), 3)
    run.drain()


# Bugs that are in no fault: edits (where in scheduler, what stands there, what instead).
BUGS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "a hit that skips prompt logits": (("request:Request.first_logits", "self.prompt_logits and", "False and"),),
    "no copy on write, and no guard": (
        ("groups:Group.is_shared", "return place < len(table)", "return False"),
        ("step:scheduled_tokens", "group.pool.require_writable(block)", "pass"),
    ),
    "rejected drafts kept": (("plan:ScheduledTokens.num_kept", " - self.num_drafts + max(0, num_answered - 1)", ""),),
    "a checkpoint of another position": (
        ("step:scheduled_tokens", "(end * size, table[end - 1])", "(end * size - 1, table[end - 1])"),
    ),
    "a stop token that ignores min_tokens": (
        ("request:Request.reason_to_end", "num_output_tokens >= self.min_tokens", "True"),
    ),
    "a shared block still in the free list": (("block_pool:BlockPool.share", "self._unlink(block)", "pass"),),
    "cached blocks taken for unused ones": (
        ("block_pool:BlockPool.allocate_unused", "or self.key_of[block] is not None", ""),
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_the_accounts_find(name: str):
    @settings(
        max_examples=3000,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strict_programs())
    def try_programs(program):
        schedules(program)

    edits = tuple(Edit(f"scheduler.{where}", old, new) for where, old, new in BUGS[name])
    with inject(Fault("hand-made", "C", "", (), edits)), pytest.raises((AssertionError, SchedulerError, LookupError)):
        try_programs()
