"""The scheduler under the suite's programs of calls (lfm2np.suite.schedulers), held to the strict accounts.

run = StrictRun({"num_blocks": 4, "block_size": 2, "max_num_seqs": 2, "max_num_batched_tokens": 8})
run.add("r0", [0, 1, 0], max_tokens=3)
run.step(2)
run.drain()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from internal_properties.internal import internal, require_at_most
from internal_properties.strict import StrictScheduler
from lfm2np.suite.schedulers import programs
from lfm2np.suite.schedulers.ledger import Account
from lfm2np.suite.schedulers.program_run import Run
from scheduler import POLICIES

OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    *programs.OPTIONS,
    ("", {"prompt_logits": True}),
    ("", {"stop": (2,), "min_tokens": 3}),
)
SIZES = {
    "block_size": st.sampled_from((2, 1, 3, 5)),
    "num_blocks": st.integers(3, 8),
    "max_num_seqs": st.sampled_from((3, 2, 1, 4, 5)),
    "max_num_batched_tokens": st.integers(1, 12),
    "policy": st.sampled_from(tuple(POLICIES)),
    "watermark": st.sampled_from((0.0, 0.1, 0.3)),
    "prefix_caching": st.sampled_from((True, True, False)),
    "sliding_window": st.sampled_from((None, 3, 1, 2, 5, 8)),
    "num_window_blocks": st.integers(3, 8),
}


class StrictRun(Run):
    """And the calls that only our scheduler has."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__(StrictScheduler, sizes)
        self.adapter: StrictScheduler = self.calls.adapted
        self.adapter.demands = self.demands

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        min_tokens: int = 0,
        prompt_logits: bool = False,
        **options: Any,
    ) -> bool:
        self.adapter.options = {"min_tokens": min_tokens, "prompt_logits": prompt_logits}
        accepted = super().add(name, prompt, max_tokens, **options)
        for each in (name, *options.get("children", ())) if accepted else ():
            self.live[each].min_tokens = min_tokens
        return accepted

    def fork(self, parent: str, name: str, more: int) -> None:
        min_tokens = self.live[parent].min_tokens
        self.adapter.options = {"min_tokens": min_tokens}
        super().fork(parent, name, more)
        if name in self.live:
            self.live[name].min_tokens = min_tokens

    def _most_drafts(self, account: Account) -> int:
        """As many as one likes: the scheduler takes those that make sense."""
        return 0 if account.splits else 4

    def drain(self) -> None:
        """At most 18 n m steps, for n requests of at most m positions each, none of which comes anew.

        A step serves the smallest key that runs (prefill-first: at least every ninth does), and no one preempts it, so
        it ends within m of those. Only if a smaller key is admitted meanwhile does it not; that one was the smallest of
        the queue, hence of all, and ends within m. So one request in 2 * 9 * m steps ends. Where blocks are reserved,
        nothing is computed twice, and n m steps are enough.
        """
        bound = 18 * len(self.live) * max((account.most_positions for account in self.live.values()), default=0)
        before = self.steps
        super().drain()
        require_at_most(self.steps - before, bound, "steps until all ended", "the scheduler")
        self.adapter.require_end()


def running(run: StrictRun, index: int) -> str:
    names = [request.request_id for request in run.adapter.scheduler.running]
    return names[index % len(names)] if names else ""


def living(run: StrictRun, index: int) -> str:
    return list(run.live)[index % len(run.live)] if run.live else ""


def fork(run: StrictRun, index: int, more: int) -> None:
    parent = running(run, index)
    more = min(more, programs.most_places(run) + 1 - len(run.live[parent].tokens)) if parent else 0
    if more > 0:
        run.fork(parent, f"r{run.arrivals}", more)


def preempt(run: StrictRun, index: int) -> None:
    if name := running(run, index):
        run.preempt(name)


def end(run: StrictRun, index: int, by: str) -> None:
    if name := living(run, index):
        run.abort(name, by)


def end_in_flight(run: StrictRun, index: int, drafts: int, by: str) -> None:
    if name := living(run, index):
        if by == "abort early":
            run.adapter.aborts_early = name
        run.abort_in_flight(name, drafts, "fail" if by == "fail" else "abort")


CALLS = {
    "add": lambda run, *numbers: programs.add(run, *numbers, all_options=OPTIONS),
    "step": programs.CALLS["step"],
    "speculate": programs.CALLS["speculate"],
    "fork": fork,
    "preempt": preempt,
    "end": end,
    "end_in_flight": end_in_flight,
}
number = st.integers(0, 5)
few = st.integers(0, 4)
DRAWN = (
    programs.NOTHING,
    st.tuples(st.just("speculate"), few, few),
    st.tuples(st.just("fork"), number, st.integers(1, 4)),
    st.tuples(st.just("preempt"), number),
    st.tuples(st.just("end"), number, st.sampled_from(("abort", "finish"))),
    st.tuples(st.just("end_in_flight"), number, few, st.sampled_from(("abort", "abort early", "fail"))),
    *(programs.adding(len(OPTIONS)) for _ in range(3)),  # one_of drops what it is given twice
    *(st.tuples(st.just("step"), st.integers(1, 4)) for _ in range(3)),
)
Program = tuple[dict[str, Any], tuple[programs.Call, ...]]


def strict_programs() -> st.SearchStrategy[Program]:
    drawn = st.lists(st.one_of(*DRAWN), min_size=12, max_size=18)
    calls = drawn.map(lambda calls: tuple(call for call in calls if call != ("nothing",)))
    return st.tuples(st.fixed_dictionaries(SIZES), calls)


@internal(
    "scheduler-machine",
    "Any calls in any order compute each token once, from the right memory; orders, pools and counts are as promised.",
    5,
    strict_programs,
    weight=16.0,
    bugs=("vLLM 4764", "vLLM 12621", "vLLM 5349", "vLLM 56525", "SGLang 38319", "vLLM 45357", "mistral.rs 2357"),
)
def schedules(example: Program) -> None:
    sizes, calls = example
    programs.carry_out(StrictRun(dict(sizes)), calls, CALLS)
