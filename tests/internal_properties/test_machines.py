"""The machines pass, and fail for every bug that is put into the scheduler: each control is one edited line or two."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from internal_properties.state_machines.scheduler_machine import PoolMachine, SchedulerMachine
from lfm2np.faults import Edit, Fault, inject
from scheduler import SchedulerError


def profile(examples: int, rules: int, *phases: Phase) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=rules,
        phases=phases or tuple(Phase),
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def test_the_pool_is_what_a_list_and_two_dicts_are():
    run_state_machine_as_test(PoolMachine, settings=profile(100, 30))


@pytest.mark.slow
def test_any_schedule_computes_what_each_request_alone_demands():
    run_state_machine_as_test(SchedulerMachine, settings=profile(150, 15))


def test_a_request_that_waits_beside_decodes_is_not_held_to_tokens_that_they_took_later():
    """Found by `deep`: under prefill-first admission is tried before decodes, with more tokens than are left then.

    A false alarm of the machine's check that no room is left while a request waits.
    """
    state = SchedulerMachine()
    state.start(
        block_size=5,
        num_blocks=3,
        max_num_seqs=3,
        budget=2,
        policy="prefill-first",
        watermark=0.0,
        no_caching=False,
        num_host_blocks=3,
        taps=2,
    )
    state.step(count=1)
    state.step(count=1)
    state.abandon(aborted=False, drafts=0, executed=False, patience=1)
    state.add(beyond=0, blocks=1, family=0, forks=0, more=1, most=4, options=0)
    state.holds_what_it_must()
    state.teardown()


def test_who_waits_is_looked_at_before_an_abort_changes_it():
    """Found by `deep`: another false alarm of that check, made after a request was aborted in flight."""
    state = SchedulerMachine()
    state.start(
        block_size=1,
        num_blocks=5,
        max_num_seqs=3,
        budget=5,
        policy="fcfs",
        watermark=0.0,
        no_caching=False,
        num_host_blocks=0,
        taps=2,
    )
    state.add(beyond=0, blocks=2, family=0, forks=2, more=1, most=3, options=0)
    state.abandon(aborted=True, drafts=0, executed=False, patience=0)
    state.step(count=1)
    state.step(count=1)
    state.step(count=2)
    state.add(beyond=0, blocks=2, family=0, forks=0, more=0, most=4, options=0)
    state.add(beyond=0, blocks=2, family=0, forks=2, more=0, most=1, options=2)
    state.step(count=1)
    state.finish_in_flight(drafts=0, early=False, which=1)
    state.step(count=2)
    state.add(beyond=0, blocks=2, family=0, forks=0, more=0, most=1, options=0)
    state.add(beyond=0, blocks=0, family=0, forks=0, more=0, most=1, options=0)
    state.finish_in_flight(drafts=0, early=True, which=2)
    state.holds_what_it_must()
    state.teardown()


def test_samples_that_an_abort_queues_did_not_wait_before():
    """Found in 25,000 random schedules: a false alarm of the check that nobody is overtaken."""
    state = SchedulerMachine()
    state.start(
        block_size=1,
        num_blocks=3,
        max_num_seqs=3,
        budget=1,
        policy="static",
        watermark=0.0,
        no_caching=False,
        num_host_blocks=0,
        taps=2,
    )
    state.add(beyond=0, blocks=0, family=0, forks=0, more=0, most=1, options=0)
    state.add(beyond=0, blocks=0, family=0, forks=1, more=1, most=1, options=0)
    state.finish_in_flight(drafts=0, early=True, which=1)
    state.holds_what_it_must()
    state.teardown()


def test_a_request_that_waits_is_not_held_to_a_hit_that_decodes_evicted_later():
    """Found in 30,000 random schedules: a false alarm of the check that no room is left while a request waits."""
    state = SchedulerMachine()
    state.start(
        block_size=5,
        num_blocks=4,
        max_num_seqs=2,
        budget=5,
        policy="prefill-first",
        watermark=0.0,
        no_caching=False,
        num_host_blocks=3,
        taps=2,
        window=3,
        num_window_blocks=3,
    )
    state.add(beyond=0, blocks=2, family=1, forks=0, more=2, most=2, options=0)
    state.add(beyond=0, blocks=0, family=0, forks=0, more=0, most=3, options=0)
    state.add(beyond=0, blocks=2, family=3, forks=1, more=1, most=3, options=0)
    state.holds_what_it_must()
    state.teardown()


# Of the catalogue; `lfm2np faults` shows all that the machine is the first to catch.
FAULTS_FOUND = ("prefix-hit-without-its-state", "parent-key-not-hashed", "salt-not-hashed", "abort-leaks-blocks")
FAULTS_FOUND += ("blocks-freed-while-the-step-is-in-flight", "oldest-is-preempted-first", "budget-ignored")
# Bugs that are in no fault: edits (where in scheduler, what stands there, what instead), and what the machine says.
SCHEDULER_BUGS: dict[str, tuple[list[tuple[str, str, str]], str]] = {
    "a hit that skips prompt logits": (
        [("request:Request.first_logits", "self.prompt_logits and", "False and")],
        "prompt positions with logits|blocks of the prefix hit|first logits",
    ),
    "no copy on write, and no guard": (
        [
            ("memory:Memory.grow", "first < len(table) and self.pool.is_shared(table[first])", "False"),
            ("block_pool:BlockPool.require_writable", "self._require_known(block)", "return"),
        ],
        "owners, users in this step and key",
    ),
    "host blocks lost at swap-in": (
        [("memory:Memory.enter", "self.release_host_blocks(request)", "request.host_blocks = ()")],
        "host blocks",
    ),
    "a state swapped in from the wrong host block": (
        [("memory:Memory.enter", '"load_state", request.host_blocks[-1]', '"load_state", request.host_blocks[0]')],
        "logits at|checkpoint",
    ),
    "rejected drafts kept": (
        [("plan:ScheduledTokens.num_kept", " - self.num_drafts + max(0, num_answered - 1)", "")],
        "",
    ),
    "a checkpoint of another position": (
        [("scheduler:Scheduler._schedule", "(end * size, table[end - 1])", "(end * size - 1, table[end - 1])")],
        "checkpoint",
    ),
    "a stop token that ignores min_tokens": (
        [("request:Request.reason_to_end", "num_output_tokens >= self.min_tokens", "True")],
        "finished|expected none after that",
    ),
    "an abandoned step whose swapped-out copies are believed": (
        [("scheduler:Scheduler.abandon", "if request.host_blocks:", "if False:")],
        "its host blocks|state on the host",
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


def require_failure(machine: type[SchedulerMachine] | type[PoolMachine], rules: int, message: str | None) -> None:
    """Prints how many schedules it took (pytest -s)."""
    before = machine.schedules
    with pytest.raises((AssertionError, SchedulerError, LookupError), match=message):
        run_state_machine_as_test(machine, settings=profile(3000, rules, Phase.generate))
    print(f"  found by schedule {machine.schedules - before}")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULER_BUGS)
def test_the_scheduler_machine_finds(name: str):
    edits, message = SCHEDULER_BUGS[name]
    with inject(bug(edits)):
        require_failure(SchedulerMachine, 15, message or None)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS_FOUND)
def test_the_scheduler_machine_finds_the_fault(name: str):
    with inject(name):
        require_failure(SchedulerMachine, 15, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", POOL_BUGS)
def test_the_pool_machine_finds(name: str):
    where, old, new = POOL_BUGS[name]
    with inject(bug([(f"block_pool:{where}", old, new)])):
        require_failure(PoolMachine, 30, None)
