"""Sizes beyond those that examples are drawn from: hundreds of requests, blocks, slots and positions."""

from __future__ import annotations

from hypothesis import strategies as st

from lfm2np.conformance.demands import Property
from lfm2np.conformance.machines import PROMPT, SchedulerMachine
from lfm2np.conformance.protocol import Factory
from scheduler import POLICIES, Request

LONG = 700  # tokens
MANY = 290  # requests


def large_schedule(factory: Factory, policy: str) -> None:
    """The scheduler's machine, in one program that is written here."""
    machine = SchedulerMachine()
    machine.start(
        block_size=2,
        num_blocks=800,
        max_num_seqs=280,
        budget=900,
        policy=policy,
        watermark=0.01,
        no_caching=False,
        num_host_blocks=400,
        taps=3,
    )
    add(machine, Request("long", PROMPT * (LONG // len(PROMPT)), 3))
    for index in range(MANY):
        add(machine, Request(f"r{index}", (index, *PROMPT[: 1 + index % 4]), 1 + index % 5))
    for _ in range(4):
        machine._step(drafts=1, right=1)
        machine.books.require_memory()
    machine.holds_what_it_must()
    machine.teardown()


def add(machine: SchedulerMachine, request: Request) -> None:
    machine.scheduler.add(request)
    machine.books.open(request, request.prompt_token_ids)
    if machine.trace:
        machine.trace.add(request, ())


LARGE: tuple[Property, ...] = (
    Property(
        "large-schedules",
        "With hundreds of requests, blocks and positions everything holds as with a few.",
        7,
        ("own",),
        (),
        lambda: st.sampled_from(tuple(POLICIES)),
        large_schedule,
    ),
)
