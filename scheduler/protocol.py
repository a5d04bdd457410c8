"""What a scheduler reports, so that it can be tested without a model.

Standard library only, and nothing of any engine: an adapter imports this module and what it adapts.

A **scheduler** is any object with the methods of `Scheduler`; the first three are needed, the rest are levels of
their own. It is made by a factory, `factory(sizes)`, with sizes by the names of SIZES: hints, of which it ignores those
that it has not. What it uses instead it reports in `sizes`, a mapping by the same names. `lacks` is a set of names of
FEATURES: programs are then drawn without these. `policies` is a set of names of POLICIES: what it promises beside what
every scheduler must do.

A **place** is one integer: where the keys and values of one token are. In blocks of P tokens, offset o of block b is
place b * P + o; without blocks it is the slot's index. Layers with a sliding window may have a memory of their own,
with places of their own (`Window`). A state is what a recurrent layer (a convolution, Mamba) keeps of all tokens so
far; its place is the number of a slot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

SIZES = (
    "block_size",  # tokens of a block
    "num_blocks",  # blocks of the cache
    "max_num_seqs",  # requests in a step
    "max_num_batched_tokens",  # tokens of a step
    "num_host_blocks",  # where preempted requests may be swapped to
    "prefix_caching",  # bool
    "sliding_window",  # tokens that a row sees in a windowed layer, itself included; None: there is none
    "num_window_blocks",  # blocks of windowed layers
    "max_model_len",  # most tokens of a request
    "policy",  # a name of the scheduler's own
    "seed",  # for what it draws
)
FEATURES = {
    "abort": "abort() of a request that waits or runs",
    "abort-at-once": "a running request that is aborted is in no further step; else until update() names it",
    "abort-in-flight": "abort() between step() and update()",
    "budget": "no more than max_num_batched_tokens tokens in a step",
    "chunks": "requests of more tokens than max_num_batched_tokens",
    "children": "requests that share a prompt and part when it is computed (n > 1)",
    "drafts": "propose(): drafts to be verified",
    "fork": "fork() of a running request",
    "free": "free_blocks() with the blocks' numbers",
    "preempt": "preempt() from outside",
    "preemptions": "requests that lose their memory while they run",
    "prefix-caching": "prefixes of earlier requests are found again",
    "priorities": "priorities other than 0",
    "refusals": "a request that can never run is refused when it is added",
    "salts": "cache_salt",
    "states": "recurrent states",
    "stops": "stop_token_ids",
    "verify": "verify(): checks of the scheduler's own",
    "windows": "layers with a sliding window",
}
POLICIES = {
    "fcfs": "Requests that have never run are admitted in the order of arrival.",
    "priority": "Requests that have never run are admitted by priority, the smallest first, then by arrival.",
    "preempts-last": "Of those that run, the one that was added last is preempted first.",
    "resumes-first": "A preempted request is admitted again before any that came after it.",
    "finds-prefixes": "Whoever begins with the first block of a request that runs does not compute this block.",
}


@dataclass(frozen=True)
class Request:
    """One request. It ends after max_tokens, or with one of stop_token_ids; that token is its last output."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str = ""
    children: tuple[str, ...] = ()  # ids of further samples, which part from it when its prompt is computed


@dataclass(frozen=True)
class Copy:
    """Contents that are copied before the step computes: in the order of the step's list, one after another.

    Both ends are (memory, number). Memories of keys and values are counted in blocks: "block", "window block", "host
    block", "host window block"; memories of states in slots: "state", "checkpoint", "host state". `source` None: zeros.
    """

    source: tuple[str, int] | None
    destination: tuple[str, int]


@dataclass(frozen=True)
class Window:
    """Where one entry's keys and values are in layers with a sliding window; see Entry.

    A ring writes over what its first rows still see. So it is read before the step writes, and the entry's own tokens
    are not read from it: they come from the inputs.
    """

    writes: Sequence[int | None]  # None: of a token that is not kept
    reads: Sequence[int]  # places of positions `first` to the entry's last; of a ring: to the one before its `start`
    first: int = 0
    is_ring: bool = False


@dataclass(frozen=True)
class Entry:
    """The tokens of one request in one step. All writes of a step come before its reads."""

    request_id: str
    start: int  # position of the first token
    token_ids: Sequence[int]  # drafts at the end, and behind them -1 for a row that is computed and never accepted
    writes: Sequence[int]  # one place for each token
    reads: Sequence[int]  # places of positions 0 to start + len(token_ids) - 1, which the last row attends to
    window: Window | None = None
    state_from: int | None = None  # state slot read: the tokens before `start`; None where start is 0: a state of zeros
    state_to: int | None = None  # state slot written: after the last token that is kept
    checkpoints: Sequence[tuple[int, int]] = ()  # (tokens, checkpoint): the state after that many is written there
    num_drafts: int = 0  # of token_ids, the last


@dataclass(frozen=True)
class Step:
    """One step: the copies, then one forward pass over all entries."""

    entries: Sequence[Entry]
    copies: Sequence[Copy] = ()
    preempted: Collection[str] = ()  # requests that lost their memory, or had it copied to the host
    parted: Collection[str] = ()  # children that go on by themselves from this step on, before the prompt is computed


class Refused(ValueError):
    """add(): the request can never run. Any ValueError says the same."""


class Scheduler(Protocol):
    """Only add, step and update are needed."""

    def add(self, request: Request) -> None:
        """Refused if it can never run."""

    def step(self) -> Step:
        """Plans the next step. One without entries computes nothing."""

    def update(self, tokens: Mapping[str, Sequence[int]]) -> Collection[str] | None:
        """What the step's rows gave: a token for each request whose last known token was computed, and before it the
        drafts that were accepted. Returns the ids of those that ended; None: it does not say."""

    def abort(self, request_id: str) -> None: ...

    def fork(self, parent_id: str, child: Request) -> Sequence[Copy] | None:
        """A running request becomes two; the copies are done now. The child has the parent's prompt and its outputs so
        far, which its max_tokens counts. Refused if it can never run."""

    def preempt(self, request_id: str) -> None:
        """The running request waits again; no step reports it."""

    def propose(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """For the next step that computes the last known token of the request: its prompt's last chunk, or a decode."""

    def free_blocks(self) -> Collection[int] | int:
        """The numbers of the blocks that no request owns (cached ones too), or how many they are."""

    def free_window_blocks(self) -> Collection[int] | int: ...

    def free_states(self) -> Collection[int] | int: ...

    def verify(self) -> None:
        """The scheduler's own checks, after each call: raises if anything is wrong."""


def flat_places(block_table: Sequence[int], block_size: int, start: int, stop: int) -> list[int]:
    """The places of positions start to stop - 1; IndexError if the table is too short."""
    return [block_table[position // block_size] * block_size + position % block_size for position in range(start, stop)]


def entry(request_id: str, token_ids: Sequence[int], start: int, stop: int, table: Sequence[int], size: int) -> Entry:
    """Positions start to stop - 1 of a request whose blocks of `size` tokens stand in `table`; token_ids: all of it."""
    places = flat_places(table, size, 0, stop)
    return Entry(request_id, start, tuple(token_ids[start:stop]), places[start:], places)
