"""The bugs that faulty.py puts into any scheduler, each a function with a sentence; and whether the suite sees one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lfm2np.suite.schedulers.adapter_calls import Factory, Violation
from lfm2np.suite.schedulers.faulty import (
    FAULTS,
    Faulty,
    SchedulerFault,
    exceeding,
    fault_of,
    of_add,
    of_ends,
    of_entry,
    of_free,
    of_step,
    with_fault,
)
from lfm2np.suite.schedulers.named_memory import STATES
from lfm2np.suite.schedulers.programs import Call
from lfm2np.suite.schedulers.suite import Outcome, attempt, drawn, script, sentences
from scheduler.protocol import Entry, Refused, Request, Step

__all__ = ["FAULTS", "Trial", "faults_for", "try_fault", "with_fault"]


def later(each: Entry, count: int) -> Entry:
    """Without its first `count` tokens."""
    window = each.window
    if window is not None:
        window = replace(window, writes=list(window.writes)[count:])
    ids, writes = list(each.token_ids)[count:], list(each.writes)[count:]
    return replace(each, start=each.start + count, token_ids=ids, writes=writes, window=window, num_drafts=0)


def exchanged(step: Step, rows: Sequence[int], change: Callable[[Entry, Entry], Entry]) -> Step:
    """The first two of these rows changed, each by the other; nothing where there are fewer."""
    if min(len(rows), len(step.entries)) < 2:
        return step
    entries, (first, second) = list(step.entries), rows[:2]
    entries[first] = change(step.entries[first], step.entries[second])
    entries[second] = change(step.entries[second], step.entries[first])
    return replace(step, entries=entries)


# --- reads


@of_entry("Every cached token is read one place behind its own.", seen=("vLLM 27547",))
def reads_one_place_late(self: Faulty, each: Entry) -> Entry:
    return replace(each, reads=[place + 1 for place in each.reads[: each.start]] + list(each.reads[each.start :]))


@of_step("Each row attends to the blocks of the next row of the batch.", seen=("mlx-lm 1169", "mlx-lm 1736"))
def reads_the_neighbours_table(self: Faulty, step: Step) -> Step:
    entries = list(step.entries)
    for index, each in enumerate(step.entries):
        other = step.entries[(index + 1) % len(step.entries)]
        cached = list(other.reads[: each.start])
        if other is not each and len(cached) == each.start:
            entries[index] = replace(each, reads=cached + list(each.reads[each.start :]))
    return replace(step, entries=entries)


@of_entry("The first block is one that an ended request had.", seen=("mini-sglang 142", "vLLM 45357"))
def reads_a_block_of_an_ended_request(self: Faulty, each: Entry) -> Entry:
    size = self.block_size
    places = self.ended[-1].reads[:size] if self.ended else ()
    if each.start < size or len(places) < size:
        return each
    return replace(each, reads=[*places, *each.reads[size:]])


# --- writes


@of_entry(
    "The place of writing is not advanced: a decode overwrites the token before it.",
    seen=("vmlx-swift 211", "nntrainer 3998"),
)
def writes_over_the_token_before(self: Faulty, each: Entry) -> Entry:
    return replace(each, writes=[each.reads[each.start - 1]]) if self.is_decode(each) else each


@of_entry("What a chunk has beyond its first block goes into this block again.", seen=("ssd 23",))
def writes_only_the_first_block_of_a_chunk(self: Faulty, each: Entry) -> Entry:
    size = self.block_size
    if len(each.writes) <= size:
        return each
    return replace(each, writes=[each.writes[index % size] for index in range(len(each.writes))])


# --- tokens and positions


@of_step("Two decodes of a batch compute each other's last token.", seen=("vLLM 5639", "R-KV 25"))
def rows_get_each_others_tokens(self: Faulty, step: Step) -> Step:
    decodes = [index for index, each in enumerate(step.entries) if self.is_decode(each)]
    return exchanged(step, decodes, lambda each, other: replace(each, token_ids=other.token_ids))


@of_entry("Each chunk's positions begin at 0.")
def positions_start_again(self: Faulty, each: Entry) -> Entry:
    window = each.window
    if window is not None:
        window = replace(window, reads=[] if window.is_ring else list(window.reads)[-len(each.token_ids) :], first=0)
    return replace(each, start=0, reads=list(each.reads[each.start :]), window=window) if each.start else each


@of_entry(
    "The second chunk of a prompt leaves a gap of one token behind the first.",
    needs=("chunks",),
    seen=("transformers 45513",),
)
def chunk_ends_early(self: Faulty, each: Entry) -> Entry:
    return later(each, 1) if not self.is_new(each) and len(each.token_ids) > 1 else each


# --- the prefix cache


@of_entry("A hit takes one block more than is cached.", needs=("prefix-caching",), seen=("vLLM 56525", "SGLang 38319"))
def hit_of_a_block_not_yet_written(self: Faulty, each: Entry) -> Entry:
    size = self.block_size
    return later(each, size) if self.is_new(each) and each.start and len(each.token_ids) > size else each


@of_entry(
    "A prompt that is cached as a whole leaves nothing to compute.", needs=("prefix-caching",), seen=("vLLM 3239",)
)
def hit_covers_the_last_token(self: Faulty, each: Entry) -> Entry:
    return later(each, len(each.token_ids)) if self.is_new(each) and each.start else each


@of_entry(
    "The first block of a hit is another request's: its hash says too little.",
    needs=("prefix-caching",),
    seen=("vLLM 12621", "vLLM 44701"),
)
def hit_of_another_prompt(self: Faulty, each: Entry) -> Entry:
    size = self.block_size
    others = [entry for name, entry in self.last.items() if name != each.request_id and len(entry.reads) >= size]
    if not (self.is_new(each) and each.start >= size and others):
        return each
    return replace(each, reads=[*others[-1].reads[:size], *each.reads[size:]])


# --- limits


@of_step("The first request of a step stands in it once more.", seen=("SGLang 24252",))
def request_scheduled_twice(self: Faulty, step: Step) -> Step:
    return replace(step, entries=[*step.entries, *step.entries[:1]])


@exceeding("A step takes more tokens than max_num_batched_tokens.", needs=("budget",), max_num_batched_tokens=8)
def budget_ignored(self: Faulty, step: Step) -> bool:
    most: int = self.sizes["max_num_batched_tokens"]
    return sum(len(each.token_ids) for each in step.entries) > most


@exceeding("A step takes more requests than max_num_seqs.", max_num_seqs=2)
def slots_ignored(self: Faulty, step: Step) -> bool:
    most: int = self.sizes["max_num_seqs"]
    return len(step.entries) > most


# --- ends


@of_step("A request that has ended is in one more step.")
def ended_request_runs_on(self: Faulty, step: Step) -> Step:
    return replace(step, entries=[*step.entries, self.ended[-1]]) if self.ended else step


@of_ends("The last request to end in a step is not said to have ended.")
def end_not_reported(self: Faulty, ended: list[str], tokens: Mapping[str, Sequence[int]]) -> list[str]:
    return ended[:-1]


@of_ends("Whoever got a token is said to have ended.")
def end_reported_early(self: Faulty, ended: list[str], tokens: Mapping[str, Sequence[int]]) -> list[str]:
    return list(tokens)


@fault_of("abort", "An abort does nothing.", needs=("abort",), seen=("vLLM 14326", "vLLM 46283"))
def abort_forgotten(self: Faulty, request_id: str) -> None:
    self.applied += 1


@of_add("A third request is accepted, and never run.", seen=("SGLang 24252",))
def request_forgotten(self: Faulty, request: Request) -> None:
    self.added += 1
    if self.added == 3:
        self.applied += 1
    else:
        self.inner.add(request)


@of_add("What can never run is accepted.", seen=("nano-vllm 274",))
def too_large_accepted(self: Faulty, request: Request) -> None:
    try:
        self.inner.add(request)
    except ValueError:
        self.applied += 1


@of_add("A prompt of more than one block is refused.")
def fitting_refused(self: Faulty, request: Request) -> None:
    if len(request.prompt_token_ids) > self.block_size:
        self.applied += 1
        raise Refused("too long")
    self.inner.add(request)


# --- memory that is free


@of_free("A block of a request that ended is never free again.", seen=("vLLM 18485", "SGLang 16067"))
def block_leaked(self: Faulty, free: list[int] | int) -> list[int] | int:
    if isinstance(free, int):
        return free - bool(self.ended)
    leaked = self.ended[0].reads[0] // self.block_size if self.ended else None
    return [block for block in free if block != leaked]


@of_free("A block of a request that ended is put on the free list twice.", seen=("sglang-jax 982", "mistral.rs 2306"))
def block_freed_twice(self: Faulty, free: list[int] | int) -> list[int] | int:
    if isinstance(free, int):
        return free + bool(self.ended)
    return [*free, *free[: len(self.ended[:1])]]


@of_free("The first block of a request that runs is free.", seen=("vLLM 45357", "SGLang 35049"))
def block_freed_while_in_use(self: Faulty, free: list[int] | int) -> list[int] | int:
    if isinstance(free, int) or not self.last:
        return free
    return [*free, next(iter(self.last.values())).reads[0] // self.block_size]


# --- copies


@of_step(
    "Nothing is copied before a step: no copy on write, no swap, no restored state.",
    needs=("fork",),
    seen=("vLLM 417", "xLLM 1984"),
)
def copies_dropped(self: Faulty, step: Step) -> Step:
    return replace(step, copies=())


# --- states


@of_step("The first two rows of a step read each other's state.", needs=("states",), seen=("SGLang 23975",))
def states_of_two_rows_exchanged(self: Faulty, step: Step) -> Step:
    return exchanged(step, (0, 1), lambda each, other: replace(each, state_from=other.state_from))


@of_step(
    "A new request's state is not set to zeros, and the slot is read as it is.",
    needs=("states",),
    seen=("SGLang 24717", "vLLM 32118"),
)
def state_of_the_tenant_before(self: Faulty, step: Step) -> Step:
    copies = [each for each in step.copies if each.source is not None or each.destination[0] not in STATES]
    entries = [replace(each, state_from=each.state_to) if each.start == 0 else each for each in step.entries]
    return replace(step, copies=copies, entries=entries)


@of_entry(
    "The state of a block is taken one token before its end.", needs=("states",), seen=("SGLang 34760", "vLLM 55178")
)
def checkpoint_one_token_off(self: Faulty, each: Entry) -> Entry:
    return replace(
        each, checkpoints=[(tokens - 1, slot) for tokens, slot in each.checkpoints if tokens - 1 > each.start]
    )


@of_entry(
    "After a prefix hit a recurrent layer begins with no state.",
    needs=("states", "prefix-caching"),
    seen=("vLLM 43090", "vLLM 47861"),
)
def hit_without_its_state(self: Faulty, each: Entry) -> Entry:
    return replace(each, state_from=None) if self.is_new(each) and each.start else each


# --- windows


@of_entry("A windowed layer has lost the oldest block that its rows still see.", needs=("windows",))
def window_freed_one_block_early(self: Faulty, each: Entry) -> Entry:
    window, size = each.window, self.block_size
    if window is None or each.start - window.first < size:
        return each
    return replace(each, window=replace(window, reads=list(window.reads)[size:], first=window.first + size))


@of_entry("Windowed layers use the block table of the others.", needs=("windows",))
def window_reads_the_other_table(self: Faulty, each: Entry) -> Entry:
    window = each.window
    most = self.sizes.get("num_window_blocks", 0) * self.block_size
    if window is None or max(each.reads, default=0) >= most:
        return each
    return replace(
        each, window=replace(window, reads=list(each.reads)[window.first : window.first + len(window.reads)])
    )


# --- is each caught


@dataclass
class Trial:
    """What the suite says of a scheduler with a fault."""

    fault: SchedulerFault
    by: str = ""  # the demand that caught it; "": none did
    programs: int = 0  # until then, that one included
    applied: int = 0  # programs in which the fault changed anything
    message: str = ""  # how it was caught, and a script that shows it again

    def line(self) -> str:
        """For the summary of a run."""
        seen_in = f" ({', '.join(self.fault.seen_in)})" if self.fault.seen_in else ""
        how = f"caught by {self.by}" if self.by else "survives" if self.applied else "changed nothing"
        return f"{self.fault.name}{seen_in}: {how} after {self.programs} programs"


def faults_for(lacks: frozenset[str]) -> list[SchedulerFault]:
    """Those that a scheduler can have that lacks this."""
    return [fault for fault in FAULTS.values() if not lacks & set(fault.needs)]


def try_fault(factory: Factory | str, fault: SchedulerFault, bare: Outcome, profile: str) -> Trial:
    """`bare` is of the scheduler as it is: a demand that it breaks is not judged with a fault, as that is no catch."""
    trial, faulty = Trial(fault), with_fault(factory, fault.name)
    judged = frozenset(sentences()) - bare.broken.keys()

    def judge(sizes: dict[str, Any], program: list[Call]) -> None:
        trial.programs += not trial.by
        run, violation = attempt(faulty, sizes, program, judged)
        trial.applied += run is not None and bool(run.calls.adapted.applied)
        if violation is not None and not trial.by:
            trial.by = violation.demand
            name = f"with_fault({factory!r}, {fault.name!r})"
            trial.message = f"{violation}\n{script(name, sizes, run)}"
        if violation is not None:
            raise violation

    with contextlib.suppress(Violation):
        drawn(judge, bare.lacks, profile, shrinks=False)
    return trial
