"""Programs of calls, drawn by Hypothesis: small integers, which mean something only once the scheduler stands.

A length is so many blocks and a few tokens more or less; a request is the n-th of those that live. So one program fits
schedulers of all sizes, and shrinks to few calls of small numbers. What a scheduler lacks, its program leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from lfm2np.suite.schedulers.ledger import Account
from lfm2np.suite.schedulers.program_run import Run

Call = tuple[Any, ...]  # the name of a function of CALLS, and its numbers
PROMPT = (0, 1, 0, 0, 2, 1, 1, 0, 2, 2, 0, 1, 2, 0, 0, 1, 2, 1)
OTHER = 3  # a token that no shared prefix has
FAMILIES = ("same", "last differs", "a block differs", "all differ", "a dialogue goes on")
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (  # the feature that it takes, and the arguments of Run.add
    ("", {}),
    ("salts", {"salt": "x"}),
    ("stops", {"stop": (1,)}),
    ("priorities", {"priority": 1}),
    ("priorities", {"priority": -1}),
)

number = st.integers(0, 5)
few = st.integers(0, 4)


def adding(num_options: int) -> st.SearchStrategy[Call]:
    return st.tuples(
        st.just("add"),
        st.integers(0, 3),  # blocks
        st.integers(-1, 2),  # tokens beyond
        st.integers(0, len(FAMILIES) - 1),
        st.integers(1, 6),  # tokens to generate
        st.integers(0, num_options - 1),
        st.integers(0, 2),  # more requests of the same kind, each a token longer
        st.sampled_from((0, 0, 0, 1, 2)),  # children
    )


ADD = adding(len(OPTIONS))
NOTHING = st.just(("nothing",))
STEP = st.tuples(st.just("step"), st.integers(1, 4))
OTHERS = {
    "abort": st.tuples(st.just("abort"), number),
    "abort-in-flight": st.tuples(st.just("abort_in_flight"), number),
    "drafts": st.tuples(st.just("speculate"), st.integers(1, 4), few),
    "fork": st.tuples(st.just("fork"), number, st.integers(1, 4)),
    "preempt": st.tuples(st.just("preempt"), number),
}
SIZES = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from((2, 1, 3, 4)),
        "num_blocks": st.integers(2, 8),
        "max_num_seqs": st.sampled_from((3, 2, 1, 4)),
        "max_num_batched_tokens": st.integers(1, 12),
        "prefix_caching": st.sampled_from((True, True, False)),
        "num_host_blocks": st.sampled_from((0, 6)),
        "sliding_window": st.sampled_from((None, 3, 1, 5)),
        "num_window_blocks": st.integers(3, 8),
        "seed": st.integers(0, 3),
    }
)


def programs(lacks: frozenset[str]) -> st.SearchStrategy[tuple[dict[str, Any], list[Call]]]:
    """Sizes, and a dozen calls. A list of that many shrinks to calls that do nothing, which are left out."""
    others = [each for feature, each in OTHERS.items() if feature not in lacks]
    return st.tuples(SIZES, st.lists(st.one_of(NOTHING, ADD, STEP, *others), min_size=10, max_size=16))


def carry_out(run: Run, calls: Sequence[Call], functions: Mapping[str, Callable[..., None]] | None = None) -> None:
    """All calls, then whatever is left. `functions`, by name: CALLS."""
    for name, *numbers in calls:
        (functions or CALLS)[name](run, *numbers)
    run.drain()


def add(
    run: Run,
    blocks: int,
    beyond: int,
    family: int,
    most: int,
    option: int,
    more: int,
    children: int,
    all_options: Sequence[tuple[str, dict[str, Any]]] = OPTIONS,
) -> None:
    lacks = run.calls.lacks
    feature, options = all_options[option]
    options = {} if feature in lacks else options
    length = blocks * run.demands.block_size + beyond
    for index in range(more + 1):
        kind = FAMILIES[(family + index) % len(FAMILIES)]
        count = 0 if index or "children" in lacks else children
        add_request(run, length + index, kind, most, options if not index else {}, count)


def add_request(run: Run, length: int, family: str, most: int, options: Mapping[str, Any], children: int) -> None:
    """What is far too long is cut to a bit too long, which must be refused; if that can't be said, to what fits."""
    sizes, lacks = run.calls.sizes, run.calls.lacks
    room = most_places(run)
    most = min(most, room)
    beyond = 0 if "refusals" in lacks else 2
    limits = [room + 1 + beyond - most, 4 * run.demands.block_size + 2]
    if "chunks" in lacks:
        limits.append(sizes["max_num_batched_tokens"] - most)
    if sizes.get("max_model_len") is not None:
        limits.append(sizes["max_model_len"] - most)
    length = min(max(1, length), *limits)
    if length < 1:
        return
    name = f"r{run.arrivals}"
    names = [f"r{run.arrivals + number}" for number in range(1, children + 1)]
    run.add(name, prompt(run, length, family), most, children=names, **options)


def most_places(run: Run) -> int:
    free = run.demands.counts["free_blocks"]
    blocks = free if isinstance(free, int) else len(free) if free is not None else run.calls.sizes.get("num_blocks", 8)
    return blocks * run.demands.block_size


def prompt(run: Run, length: int, family: str) -> tuple[int, ...]:
    """Prompts that share much, and part near the borders of blocks."""
    size = run.demands.block_size
    shared = PROMPT * (1 + length // len(PROMPT))
    if family == "a dialogue goes on" and run.live:
        return (*list(run.live.values())[-1].tokens, *shared)[:length]
    other = {"last differs": 1, "a block differs": size + 1, "all differ": length}.get(family, 0)
    return (*shared[: max(0, length - other)], *(OTHER,) * min(other, length))


def of_those(fits: Callable[[Account], bool], call: Callable[..., None]) -> Callable[..., None]:
    """A call of the request with that index among the live ones that fit; none where there are none."""

    def carry(run: Run, index: int, *numbers: int) -> None:
        names = [each.name for each in run.live.values() if fits(each)]
        if names:
            call(run, names[index % len(names)], *numbers)

    return carry


def can_abort(account: Account) -> bool:
    return not (account.is_child_to_be or account.is_aborted)


def can_preempt(account: Account) -> bool:
    return account.is_running and not account.is_aborted


def can_fork(account: Account) -> bool:
    return account.is_running and account.num_outputs > 0 and not account.splits


def fork(run: Run, name: str, more: int) -> None:
    more = min(more, most_places(run) + 1 - len(run.live[name].tokens))
    if more > 0:
        run.fork(name, f"r{run.arrivals}", more)


CALLS: dict[str, Callable[..., None]] = {
    "nothing": lambda run: None,
    "add": add,
    "step": Run.step,
    "speculate": Run.speculate,
    "abort": of_those(can_abort, Run.abort),
    "abort_in_flight": of_those(can_abort, Run.abort_in_flight),
    "preempt": of_those(can_preempt, Run.preempt),
    "fork": of_those(can_fork, fork),
}
