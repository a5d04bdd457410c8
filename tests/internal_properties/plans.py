"""The scheduler, where no token shows it: what update() takes, what never changes, defaults."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import strategies as st

from internal_properties.internal import internal, require
from lfm2np.suite.properties.property import Violation
from scheduler import PlanError, Request, Scheduler, SchedulerConfig
from scheduler.request import Status

# --- what may be told to update()


@st.composite
def turns(draw: st.DrawFn) -> tuple[int, int, int, tuple[int, ...]]:
    """max_tokens, min_tokens, tokens so far, drafts; token 2 is the stop token."""
    so_far = draw(st.integers(0, 4))
    drafts = draw(st.lists(st.sampled_from((2, 0)), max_size=4))
    return so_far + draw(st.integers(1, 6)), draw(st.integers(0, so_far + 5)), so_far, tuple(drafts)


@internal(
    "answers-are-judged",
    "What does not answer the plan is refused, what does is taken, and a request ends where it must.",
    7,
    turns,
    weight=5.0,
)
def answers_are_judged(example: tuple[int, int, int, tuple[int, ...]]) -> None:
    """Right drafts and then any token, up to too many; and drafts that were not planned."""
    drafts = example[3]
    right = [(*drafts[:count], token) for count in range(len(drafts) + 1) for token in (0, 2)]
    wrong = [(*(1 for _ in drafts[:count]), 0) for count in range(1, len(drafts) + 1)]
    for answer in ((), *right, *wrong, (*drafts, 0, 0)):
        answer_is_judged(*example, answer)


def answer_is_judged(most: int, least: int, so_far: int, drafts: tuple[int, ...], answer: tuple[int, ...]) -> None:
    """Taken if and only if: as many as asked for, the drafts first, and nothing behind the token that ends it."""
    subject = Scheduler(SchedulerConfig(num_blocks=20, block_size=2))
    subject.add(Request("a", (1,), most, stop_token_ids=frozenset([2]), min_tokens=least))
    for _ in range(so_far):
        subject.update(subject.schedule(), {"a": [0]})
    plan = subject.add_drafts(subject.schedule(), {"a": drafts})
    fitting = drafts[: most - so_far - 1]
    require(plan.scheduled[0].drafts, fitting, "drafts of the plan", f"drafts {drafts}")

    def ends(place: int) -> bool:
        count = so_far + place + 1
        return count >= most or (answer[place] == 2 and count >= least)

    allowed = 1 <= len(answer) <= 1 + len(fitting) and answer[:-1] == fitting[: len(answer) - 1]
    allowed = allowed and not any(ends(place) for place in range(len(answer) - 1))
    try:
        finished = subject.update(plan, {"a": answer})
    except PlanError:
        if allowed:
            raise
        return
    require(allowed, True, "may be answered with", f"drafts {fitting}, answer {answer}")
    require(bool(finished), ends(len(answer) - 1), "finished:", f"after {answer}")


# --- what holds without being asked for

DEFAULTS = SchedulerConfig(1, 16, 64, 2048, "fcfs", 0.3, 20, True, 0.01)
LEFT_OUT = {"stop_token_ids": frozenset(), "min_tokens": 0, "priority": 0, "cache_salt": "", "prompt_logits": False}
COUNTERS = ("num_cached_tokens", "num_preemptions", "num_recomputed_tokens", "furthest_computed", "num_steps")
STATE = {"token_ids": [1], "status": Status.WAITING, "arrival": -1, "arrival_step": -1, "tables": [(), ()]}
EMPTY: dict[str, object] = {"finish_reason": None, "slot": None, "block_keys": [], "forks": [], "awaits_split": False}
OWN = {**STATE, **EMPTY, **dict.fromkeys((*COUNTERS, "num_computed_tokens", "most_blocks"), 0)}


@internal(
    "defaults-are-documented",
    "Sizes that nobody asked for are those that the documentation names; sizes and plans never change.",
    7,
    lambda: st.just("all"),
)
def defaults(example: str) -> None:
    require(SchedulerConfig(1), DEFAULTS, "defaults", "sizes")
    new = Request("a", (1,), 1)
    asked = {each.name: getattr(new, each.name) for each in fields(Request) if each.init}
    expected = {"request_id": "a", "prompt_token_ids": (1,), "max_tokens": 1, **LEFT_OUT}
    require(list(asked.items()), list(expected.items()), "is made of", "a request")
    counters = {each.name: getattr(new, each.name) for each in fields(Request) if not each.init}
    require(counters, OWN, "has", "a new request")
    require(new == Request("a", (1,), 1), False, "equals", "another request")
    subject = Scheduler(DEFAULTS)
    subject.add(new)
    plan = subject.schedule()
    for item, name in (
        (DEFAULTS, "num_blocks"),
        (plan, "step"),
        (plan.moves[0], "source"),
        (plan.scheduled[0], "start"),
    ):
        try:
            setattr(item, name, 2)
        except AttributeError:  # of a frozen dataclass, too
            continue
        raise Violation(f"{type(item).__name__}.{name} can be changed")
