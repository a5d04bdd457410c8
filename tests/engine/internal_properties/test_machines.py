"""The strict books pass, and fail for every bug that is put into scheduler or pool: an edited line or two each."""

import pytest
from faults import Edit, Fault, inject
from hypothesis import HealthCheck, Phase, given, settings

from internal_properties.schedules import StrictRun, end_in_flight, schedules, strict_programs
from lfm2np.suite.schedulers.programs import PROMPT
from scheduler import SchedulerError


def try_programs(examples: int, *phases: Phase) -> int:
    """How many were tried until the first that fails, which raises."""
    tried = 0

    @settings(
        max_examples=examples,
        phases=phases or tuple(Phase),
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(strict_programs())
    def run_one(program):
        nonlocal tried
        tried += 1
        schedules(program)

    try:
        run_one()
    finally:
        print(f"  {tried} programs")  # pytest -s
    return tried


@pytest.mark.slow
def test_any_schedule_computes_what_each_request_alone_demands():
    assert try_programs(300) > 100


# --- programs of which a check was wrong: false alarms


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


# --- bugs

# Of the catalogue: some that `scheduler-machine` catches.
FAULTS_FOUND = ("prefix-hit-without-its-state", "parent-key-not-hashed", "salt-not-hashed", "abort-leaks-blocks")
FAULTS_FOUND += ("blocks-freed-while-the-step-is-in-flight", "oldest-is-preempted-first", "budget-ignored")
# Bugs that are in no fault: edits (where in scheduler, what stands there, what instead), and what the books say.
SCHEDULER_BUGS: dict[str, tuple[list[tuple[str, str, str]], str]] = {
    "a hit that skips prompt logits": (
        [("request:Request.first_logits", "self.prompt_logits and", "False and")],
        "prompt positions with logits|blocks of the prefix hit|first logits",
    ),
    "no copy on write, and no guard": (
        [
            ("groups:Group.is_shared", "return any(", "return False and any("),
            ("step:scheduled_tokens", "group.pool.require_writable(block)", "pass"),
        ],
        "owners, users in this step and key",
    ),
    "rejected drafts kept": (
        [("plan:ScheduledTokens.num_kept", " - self.num_drafts + max(0, num_answered - 1)", "")],
        "",
    ),
    "a checkpoint of another position": (
        [("step:scheduled_tokens", "(end * size, table[end - 1])", "(end * size - 1, table[end - 1])")],
        "checkpoint",
    ),
    "a stop token that ignores min_tokens": (
        [("request:Request.reason_to_end", "num_output_tokens >= self.min_tokens", "True")],
        "none that stops it",
    ),
}

POOL_BUGS = {
    "cached blocks handed out first": ("BlockPool.release", "self.key_of[block] is None", "True"),
    "a shared block still in the free list": ("BlockPool.share", "self._unlink(block)", "pass"),
    "cached blocks taken for unused ones": ("BlockPool.allocate_unused", "or self.key_of[block] is not None", ""),
    "a double free": ("BlockPool._require_owned", "raise PoolError(", "str("),
    "a table released from its head": ("BlockPool.release_table", "reversed(table)", "table"),
}


def bug(edits: list[tuple[str, str, str]]) -> Fault:
    return Fault("hand-made", "C", "", (), tuple(Edit(f"scheduler.{where}", old, new) for where, old, new in edits))


def require_failure(message: str | None) -> None:
    with pytest.raises((AssertionError, SchedulerError, LookupError), match=message):
        try_programs(3000, Phase.generate)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULER_BUGS)
def test_the_books_find(name: str):
    edits, message = SCHEDULER_BUGS[name]
    with inject(bug(edits)):
        require_failure(message or None)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS_FOUND)
def test_the_books_find_the_fault(name: str):
    with inject(name):
        require_failure(None)


@pytest.mark.slow
@pytest.mark.parametrize("name", POOL_BUGS)
def test_the_books_find_the_bug_of_the_pool(name: str):
    where, old, new = POOL_BUGS[name]
    with inject(bug([(f"block_pool:{where}", old, new)])):
        require_failure(None)
