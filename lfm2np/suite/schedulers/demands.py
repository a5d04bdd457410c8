"""What every scheduler must do, and what one may promise beside it; each demand by its name.

A step is judged in the order in which it happens: is the report whole, does it keep the limits, does it compute the
right tokens; then the copies, all writes, all reads. Whoever reads is shown what should be there and what is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from lfm2np.suite.schedulers.adapter_calls import Calls, Unjudged, Violation
from lfm2np.suite.schedulers.ledger import Account
from lfm2np.suite.schedulers.named_memory import ZEROS, Memory, Names, Written
from lfm2np.suite.schedulers.reports import checked_free
from scheduler.protocol import Entry, Request, Step

DEMANDS = {
    "calls": "No call raises, and each returns.",
    "reports": "A step's report is whole, and its numbers are in range.",
    "tokens": "Each token of a request is computed once, at its own position, with no gap.",
    "reads": "Attention reads the keys and values of the request's own tokens, all of them, in order.",
    "ownership": "No place is written twice in a step, and no free block is read or written.",
    "windows": "A windowed layer reads every token that its rows see, and nothing else.",
    "states": "A recurrent layer goes on from the state after the tokens before.",
    "limits": "No step has more tokens or requests than it may, nor a request twice.",
    "ends": "A request ends with its last token or its abort: neither earlier nor later, once.",
    "refusals": "What can never run is refused when it is added, and nothing else.",
    "progress": "Every request ends.",
    "leaks": "When no request is left, all memory is free.",
    "verify": "The scheduler's own checks pass after each call.",
}
PADDING = -1  # in the place of a draft
ALWAYS = ("calls", "reports")  # where one of these is broken, no other demand can be judged


class Demands:
    """The memory that the steps describe, and what is demanded of them."""

    def __init__(self, calls: Calls, judged: frozenset[str]) -> None:
        self.calls = calls
        self.judged = judged or frozenset({*DEMANDS, *calls.policies})
        calls.failed = self.fail
        self.names = Names()
        self.block_size = calls.sizes.get("block_size") or 1
        self.window = calls.sizes.get("sliding_window") if "windows" not in calls.lacks else None
        self.memory = Memory(self.block_size)
        self.ends: dict[str, int] = {}  # of requests that ended, the step

    @cached_property
    def counts(self) -> dict[str, int | list[int] | None]:
        """What is free before the first request."""
        return {name: self._free(name) for name in ("free_blocks", "free_window_blocks", "free_states")}

    def fail(self, demand: str, message: str) -> NoReturn:
        if demand in self.judged:
            raise Violation(demand, message)
        raise Unjudged(f"{demand}: {message}")

    def _is_judged(self, policy: str) -> bool:
        return policy in self.calls.policies and policy in self.judged

    # --- limits, order, tokens

    def require_limits(self, step: Step) -> None:
        sizes, lacks = self.calls.sizes, self.calls.lacks
        tokens = sum(len(entry.token_ids) for entry in step.entries)
        for name, count, what in (
            ("max_num_batched_tokens", tokens, "tokens"),
            ("max_num_seqs", len(step.entries), "requests"),
        ):
            most = sizes.get(name)
            if most is not None and count > most and not (what == "tokens" and "budget" in lacks):
                self.fail("limits", f"a step of {count} {what}: {name} is {most}")
        for name, count in Counter(entry.request_id for entry in step.entries).items():
            if count > 1:
                self.fail("limits", f"{name}: {count} entries in one step")

    def require_order(self, step: Step, live: Mapping[str, Account]) -> None:
        """The policies that are declared and judged: fcfs and priority of those that have never run, as not every
        scheduler that promises them lets a preempted request go first."""
        scheduled = [live[each.request_id] for each in step.entries]
        new = [account for account in scheduled if account.first_scheduled < 0]
        for account in new if self._is_judged("resumes-first") else ():
            for other in live.values():
                waits = other.was_preempted and not other.is_aborted and other not in scheduled
                if waits and other.arrival < account.arrival:
                    self.fail(
                        "resumes-first", f"{account.name} is admitted while {other.name}, preempted before, waits"
                    )
        for policy, key in (("fcfs", by_arrival), ("priority", by_priority)):
            if not self._is_judged(policy):
                continue
            for account in new:
                for other in live.values():
                    waits = other.first_scheduled < 0 and other not in new and not other.is_child_to_be
                    if waits and key(other) < key(account):
                        self.fail(policy, f"{account.name} is admitted while {other.name} waits")
        if self._is_judged("finds-prefixes"):
            for entry in step.entries:
                self._require_hit(entry, step, live)

    def _require_hit(self, entry: Entry, step: Step, live: Mapping[str, Account]) -> None:
        account, size = live[entry.request_id], self.block_size
        if account.is_running or entry.start or len(account.tokens) <= size:
            return
        for other in live.values():
            goes_on = other.is_running and not other.is_aborted and other.name not in step.preempted
            has_block = goes_on and other.computed >= size
            if has_block and other.prefix(size - 1) == account.prefix(size - 1):
                self.fail("finds-prefixes", f"{account.name} computes its first block, which {other.name} has, too")

    def require_victim(self, victim: Account, live: Mapping[str, Account], preempted: Collection[str]) -> None:
        """Of those that one step preempts, no order is known."""
        if self._is_judged("preempts-last"):
            for other in live.values():
                if other.is_running and other.arrival > victim.arrival and other.name not in preempted:
                    self.fail(
                        "preempts-last", f"{victim.name} is preempted, and {other.name}, which came later, runs on"
                    )

    def require_unfinished(self, entry: Entry, live: Mapping[str, Account]) -> None:
        name = entry.request_id
        if name not in live:
            state = f"it ended in step {self.ends[name]}" if name in self.ends else "no such request was added"
            self.fail("ends", f"{name} is scheduled: {state}")

    def require_tokens(self, entry: Entry, account: Account, offered: Mapping[str, Sequence[int]]) -> None:
        name, start, ids = entry.request_id, entry.start, list(entry.token_ids)
        if not ids:
            self.fail("tokens", f"{name}: an entry without tokens, at position {start} of {len(account.tokens)}")
        if account.is_running and start != account.computed:
            kind = "twice" if start < account.computed else "never"
            first, last = sorted((start, account.computed))
            self.fail(
                "tokens",
                f"{name}: starts at position {start}, expected {account.computed}: positions {first} to {last - 1} are "
                f"computed {kind} (it was not preempted)",
            )
        known = start + len(ids) - entry.num_drafts
        if not start < known <= len(account.tokens):
            self.fail("tokens", f"{name}: positions {start} to {known - 1}, of {len(account.tokens)} known tokens")
        expected = account.tokens[start:known]
        if ids[: known - start] != expected:
            self.fail(
                "tokens", f"{name}: token ids {ids[: known - start]} from position {start} on, expected {expected}"
            )
        given = ids[known - start :]
        while given and given[-1] == PADDING:
            given.pop()
        drafts = list(offered.get(name, ()))[: len(given)]
        if given != drafts:
            self.fail("tokens", f"{name}: drafts {given}, proposed were {drafts}")
        if entry.num_drafts and known != len(account.tokens):
            self.fail("tokens", f"{name}: drafts behind position {known - 1}, of {len(account.tokens)} known tokens")

    # --- memory

    def carry_out(self, step: Step, live: Mapping[str, Account], number: int) -> None:
        """Copies, then what is read from rings, then writes, then all other reads."""
        self.memory.copy(step.copies)
        self._require_owned(step)
        for entry in step.entries:
            if entry.window is not None and entry.window.is_ring:
                self._require_window(entry, live[entry.request_id])
        for entry in step.entries:
            self._write(entry, live[entry.request_id], number)
        for entry in step.entries:
            self._require_reads(entry, live[entry.request_id])
            self._require_state(entry, live[entry.request_id])

    def _require_owned(self, step: Step) -> None:
        free = self._free("free_blocks")
        if isinstance(free, list):
            for block, count in Counter(free).items():
                if count > 1:
                    self.fail("ownership", f"block {block} is free {count} times: freed twice")
            numbers = set(free)
            for entry in step.entries:
                for what, places in (("writes to", entry.writes), ("reads", entry.reads)):
                    for place in places:
                        block = place // self.block_size
                        if block in numbers:
                            text = f"{entry.request_id} {what} place {place}: block {block} is free"
                            self.fail("ownership", text)
        users: dict[tuple[str, int], str] = {}
        for entry in step.entries:
            written = [("block", place) for place in entry.writes]
            if entry.window is not None:
                written += [("window block", place) for place in entry.window.writes if place is not None]
            for pair in written:
                if pair in users:
                    self.fail("ownership", f"{entry.request_id} and {users[pair]} both write to place {pair[1]}")
                users[pair] = entry.request_id

    def _write(self, entry: Entry, account: Account, number: int) -> None:
        prefixes = account.prefixes_of(entry)
        for index, token in enumerate(entry.token_ids):
            position = entry.start + index
            written = Written(prefixes[position], position, token, account.name, number)
            self.memory.write("block", entry.writes[index], written)
            place = entry.window.writes[index] if entry.window is not None else None
            if place is not None:
                self.memory.write("window block", place, written)

    def _require_reads(self, entry: Entry, account: Account) -> None:
        self._require_cells("reads", "block", entry.reads, 0, entry, account)
        if entry.window is None or not entry.window.is_ring:
            self._require_window(entry, account)

    def _require_cells(
        self, demand: str, memory: str, places: Sequence[int], first: int, entry: Entry, account: Account
    ) -> None:
        """Places of positions from `first` on hold the request's own tokens."""
        prefixes = account.prefixes_of(entry)
        for position, place in enumerate(places, start=first):
            cell = self.memory.read(memory, place)
            if cell is None or cell.prefix != prefixes[position]:
                where = f"place {place}" if memory == "block" else f"place {place} of windowed layers"
                self.fail(demand, self._misread(account, position, where, cell))

    def _require_window(self, entry: Entry, account: Account) -> None:
        if self.window is None:
            return
        if entry.window is None:
            self.fail("windows", f"{account.name}: no window in its entry, though the layers have one of {self.window}")
        needed = max(0, entry.start - self.window + 1)
        if entry.window.first > needed:
            self.fail(
                "windows",
                f"{account.name}: reads from position {entry.window.first} on; the row of position {entry.start} sees "
                f"those from {needed} on (window {self.window})",
            )
        seen = entry.window.reads[needed - entry.window.first :]
        self._require_cells("windows", "window block", seen, needed, entry, account)

    def _misread(self, account: Account, position: int, where: str, cell: Written | None) -> str:
        """What stands where the request's own token should."""
        reads = f"{account.name}: reads position {position} at {where}"
        if cell is None:
            return f"{reads}: nothing was written there"
        when = f"in step {cell.step}"
        if cell.request_id == account.name and cell.position == position:
            return f"{reads}: a stale token {cell.token}, which was written {when}"
        if cell.request_id == account.name:
            return f"{reads}: its own position {cell.position}, written {when}"
        ended = f", which ended in step {self.ends[cell.request_id]}" if cell.request_id in self.ends else ""
        other = "" if cell.position != position else ", after other tokens or under another salt"
        return f"{reads}: position {cell.position} of {cell.request_id}{ended}, written {when}{other}"

    def _require_state(self, entry: Entry, account: Account) -> None:
        if "states" in self.calls.lacks:
            return
        if entry.state_to is None:
            self.fail("states", f"{account.name}: no state_to in its entry")
        if entry.state_from is None:
            if entry.start:
                self.fail("states", f"{account.name}: starts at position {entry.start}, and reads no state")
            return
        state = self.memory.states.get(("state", entry.state_from))
        expected = account.state(entry.start)
        prefix = ZEROS if state is not None and state.position == 0 else None if state is None else state.prefix
        if prefix != expected:
            what = "nothing was written there" if state is None else state_text(state)
            self.fail(
                "states",
                f"{account.name}: goes on at position {entry.start} from state slot {entry.state_from}: {what}; "
                f"expected the state after {entry.start} of its tokens",
            )

    def commit(
        self, entries: Sequence[Entry], live: Mapping[str, Account], answers: Mapping[str, Sequence[int]], number: int
    ) -> None:
        """The states after the tokens that are kept: all but the rejected drafts."""
        if "states" in self.calls.lacks:
            return
        for entry in entries:
            account = live[entry.request_id]
            accepted = max(0, len(answers.get(entry.request_id, ())) - 1)
            kept = entry.start + len(entry.token_ids) - entry.num_drafts + accepted
            prefixes = account.prefixes_of(entry)
            places = [(kept, ("state", entry.state_to))] if entry.state_to is not None else []
            places += [(tokens, ("checkpoint", slot)) for tokens, slot in entry.checkpoints if tokens <= kept]
            for tokens, place in places:
                prefix = prefixes[tokens - 1] if tokens else ZEROS
                self.memory.states[place] = Written(prefix, tokens, -1, account.name, number)

    # --- ends

    def require_endings(
        self, finished: Collection[str] | None, ended: Collection[str], live: Mapping[str, Account]
    ) -> None:
        if finished is None:
            return
        for name, count in Counter(finished).items():
            if count > 1:
                self.fail("ends", f"update() says {count} times that {name} ends")
        for name in sorted(set(finished) - set(ended)):
            state = f"it ended in step {self.ends[name]}" if name in self.ends else "it is unknown"
            if name in live:
                account = live[name]
                state = f"it has {account.num_outputs} of {account.request.max_tokens} tokens, and none that stops it"
            self.fail("ends", f"update() says that {name} ends: {state}")
        for name in sorted(set(ended) - set(finished)):
            account = live[name]
            self.fail(
                "ends",
                f"update() does not say that {name} ends: it has {account.num_outputs} of {account.request.max_tokens} "
                f"tokens, the last {account.tokens[-1]}",
            )

    def require_refusal(self, request: Request, accepted: bool) -> None:
        """Blocks for all positions but the last token's; what needs one of the last two blocks or one token more may be
        treated either way, as some schedulers keep one, and round the prompt up."""
        free = self.counts["free_blocks"]
        if free is None or "refusals" in self.calls.lacks:
            if not accepted:
                self.fail("refusals", f"{request.request_id} is refused")
            return
        capacity = (free if isinstance(free, int) else len(set(free))) * self.block_size
        needed = len(request.prompt_token_ids) + request.max_tokens - 1
        if accepted and needed > capacity:
            self.fail("refusals", f"{request.request_id}: needs {needed} places, is accepted: there are {capacity}")
        if not accepted and needed + 1 + 2 * self.block_size <= capacity and self.window is None:
            self.fail("refusals", f"{request.request_id}: needs {needed} of {capacity} places, and is refused")

    def require_all_free(self) -> None:
        for name, before in self.counts.items():
            now = self._free(name)
            if before is None or now is None:
                continue
            missing, what = size(before) - size(now), name.removeprefix("free_").replace("_", " ")
            if missing < 0:
                self.fail("leaks", f"no request is left, and {size(now)} {what} are free, of {size(before)}")
            if missing:
                lost = "" if isinstance(now, int) or isinstance(before, int) else f": {sorted(set(before) - set(now))}"
                self.fail("leaks", f"no request is left, and {missing} of {size(before)} {what} are not free{lost}")

    def verify(self) -> None:
        if self.calls.has("verify"):
            self.calls.call("verify")

    def _free(self, name: str) -> int | list[int] | None:
        if not self.calls.has(name):
            return None
        return checked_free(self.calls.call(name), name, name != "free_blocks", self.fail)


def size(free: Any) -> int:
    return free if isinstance(free, int) else len(free)


def by_arrival(account: Account) -> tuple[int, int]:
    return (0, account.arrival)


def by_priority(account: Account) -> tuple[int, int]:
    return (account.request.priority, account.arrival)


def state_text(state: Written) -> str:
    if state.position == 0:
        return "zeros"
    return f"the state after {state.position} tokens of {state.request_id}, written in step {state.step}"
