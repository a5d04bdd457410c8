"""One scheduler under a program of calls: what it reports is carried out on a memory of names, and judged.

    run = Run("module:factory", {"num_blocks": 4, "block_size": 2, "max_num_seqs": 2, "max_num_batched_tokens": 8})
    run.add("r0", [0, 1, 0], max_tokens=3)
    run.step(2)
    run.drain()

raises Violation, with the demand's name, at the first call that breaks one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lfm2np.suite.schedulers.adapter_calls import Calls, Factory
from lfm2np.suite.schedulers.demands import Demands
from lfm2np.suite.schedulers.ledger import Account, next_token
from lfm2np.suite.schedulers.reports import checked_copies, checked_ids, checked_step
from scheduler.protocol import Entry, Request, Step

IDLE_STEPS = 10  # steps in a row that may compute nothing while requests are unfinished


class Run:
    """A scheduler, the memory that its steps describe, and an account of each request."""

    def __init__(
        self, factory: Factory | str, sizes: Mapping[str, Any] | None = None, judged: Collection[str] = ()
    ) -> None:
        """judged: the demands and policies that raise; none: all demands, and the policies that it declares."""
        self.calls = Calls(factory, dict(sizes or {}))
        self.demands = Demands(self.calls, frozenset(judged))
        self.live: dict[str, Account] = {}  # not finished, in the order of arrival
        self.offered: dict[str, list[int]] = {}  # drafts for the next step that the request is in
        self.met: Counter[str] = Counter()  # what happened, for the statistics
        self.log: list[str] = []  # the calls so far, as text
        self.steps = 0
        self.idle = 0
        self.arrivals = 0

    # --- calls of a program

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stop: Collection[int] = (),
        priority: int = 0,
        salt: str = "",
        children: Sequence[str] = (),
    ) -> bool:
        """False if it was refused."""
        options = {"stop": sorted(stop), "priority": priority, "salt": salt, "children": list(children)}
        given = "".join(f", {key}={value!r}" for key, value in options.items() if value)
        self.log.append(f"add({name!r}, {list(prompt)}, {max_tokens}{given})")
        request = Request(name, tuple(prompt), max_tokens, frozenset(stop), priority, salt, tuple(children))
        _ = self.demands.counts  # before anything is allocated
        accepted, _ = self.calls.refusable("add", request)
        self.demands.require_refusal(request, accepted)
        if not accepted:
            self.met["refused"] += 1
            return False
        for each in (name, *children):
            account = self._open(replace(request, request_id=each, children=() if each != name else request.children))
            account.is_child_to_be = each != name
        self.demands.verify()
        return True

    def step(self, count: int = 1) -> None:
        self.log.append(f"step({count})")
        for _ in range(count):
            self._step()

    def speculate(self, drafts: int, right: int) -> None:
        """A step with that many drafts proposed for each request, the first `right` of them as the model says."""
        self.log.append(f"speculate({drafts}, {right})")
        self._step(drafts, right)

    def abort(self, name: str, by: str = "abort") -> None:
        """`by`: the adapter's method, which some schedulers have more than one of."""
        self.log.append(f"abort({name!r})" if by == "abort" else f"abort({name!r}, {by!r})")
        self._abort(name, by)
        self.demands.verify()

    def abort_in_flight(self, name: str, drafts: int = 0, by: str = "abort") -> None:
        """The step is planned, then the request is aborted, then the model's tokens come."""
        given = f"{name!r}, {drafts}, {by!r}" if drafts or by != "abort" else repr(name)
        self.log.append(f"abort_in_flight({given})")
        step = self._plan(drafts, right=2)
        computed = self._compute(step)
        self._abort(name, by, {entry.request_id for entry in step.entries})
        self._complete(step, computed)

    def preempt(self, name: str) -> None:
        self.log.append(f"preempt({name!r})")
        self.calls.call("preempt", name)
        self._lose(self.live[name])
        self.demands.verify()

    def fork(self, parent: str, name: str, more: int) -> None:
        """A child of a running request, of `more` tokens more."""
        self.log.append(f"fork({parent!r}, {name!r}, {more})")
        account = self.live[parent]
        request = replace(account.request, request_id=name, max_tokens=account.num_outputs + more, children=())
        accepted, copies = self.calls.refusable("fork", parent, request)
        if not accepted:
            self.met["refused"] += 1
            return
        self.demands.memory.copy(checked_copies(copies or (), "fork()", self.demands.fail))
        self._split(account, self._open(request))
        self.met["forks"] += 1
        self.demands.verify()

    def drain(self) -> None:
        """Steps until nothing is left; then all memory must be free.

        Bound: in 20 n m steps, n requests of at most m positions could each be computed twenty times, one token a step.
        """
        self.log.append("drain()")
        bound = 20 * len(self.live) * max((each.most_positions for each in self.live.values()), default=0) + 20
        for _ in range(bound):
            if self.live:
                self._step()
        if self.live:
            self.demands.fail("progress", f"{', '.join(self.live)}: unfinished after {bound} more steps")
        self.demands.require_all_free()

    # --- one step

    def _step(self, drafts: int = 0, right: int = 0) -> None:
        step = self._plan(drafts, right)
        self._complete(step, self._compute(step))

    def _plan(self, drafts: int, right: int) -> Step:
        if drafts:
            self.offered |= self._propose(drafts, right)
        step = checked_step(self.calls.call("step"), self.calls.sizes, self.demands.fail)
        demands = self.demands
        self._part(step.parted)
        self._preempted(step)
        self._require_progress(step)
        for entry in step.entries:
            demands.require_unfinished(entry, self.live)
        demands.require_limits(step)
        demands.require_order(step, self.live)
        for entry in step.entries:
            demands.require_tokens(entry, self.live[entry.request_id], self.offered)
        return step

    def _compute(self, step: Step) -> dict[str, Account]:
        """Who is computed, even if it is aborted before the step is complete."""
        self.demands.carry_out(step, self.live, self.steps)
        return dict(self.live)

    def _complete(self, step: Step, computed: Mapping[str, Account]) -> None:
        demands = self.demands
        entries = [entry for entry in step.entries if entry.request_id in self.live]
        answers = self._answers(entries)
        demands.commit(step.entries, computed, answers, self.steps)
        self._advance(entries, answers)
        finished = self.calls.call("update", answers)
        if finished is not None:
            finished = checked_ids(finished, "update()", demands.fail)
        self.steps += 1
        self._end(finished)
        demands.verify()

    def _propose(self, count: int, right: int) -> dict[str, list[int]]:
        offered = {}
        for account in self.live.values():
            tokens = list(account.tokens)
            for index in range(min(count, self._most_drafts(account))):
                token = next_token(tokens, account.arrival)
                tokens.append(token if index < right else (token + 1) % 4)
            if len(tokens) > len(account.tokens):
                offered[account.name] = tokens[len(account.tokens) :]
        if offered:
            self.calls.call("propose", offered)
        return offered

    def _part(self, children: Collection[str]) -> None:
        """Earlier than their parent's prompt is computed: each computes the rest of its prompt itself."""
        for name in children:
            if name not in self.live:
                self.demands.fail("reports", f"step(): parted: {name!r}, which has ended or is unknown")
            self.live[name].is_child_to_be = False

    def _most_drafts(self, account: Account) -> int:
        decodes = account.is_running and not account.splits and account.computed == len(account.tokens) - 1
        return account.request.max_tokens - account.num_outputs - 1 if decodes else 0

    def _preempted(self, step: Step) -> None:
        for name in step.preempted:
            account = self.live.get(name)
            if account is None:
                self.demands.fail("reports", f"step(): preempted: {name!r}, which has ended or is unknown")
            self.demands.require_victim(account, self.live, step.preempted)
            self._lose(account)
        self.met["copies"] += len(step.copies)

    def _lose(self, account: Account) -> None:
        self.met["preemptions"] += 1
        account.is_running, account.was_preempted = False, True

    def _require_progress(self, step: Step) -> None:
        self.idle = 0 if step.entries or step.preempted or not self.live else self.idle + 1
        if self.idle > IDLE_STEPS:
            self.demands.fail("progress", f"{', '.join(self.live)}: unfinished, and {self.idle} steps computed nothing")

    def _answers(self, entries: Sequence[Entry]) -> dict[str, list[int]]:
        """By request the drafts that are what the model says, as long as they are, then one token more."""
        answers: dict[str, list[int]] = {}
        for entry in entries:
            account = self.live[entry.request_id]
            if entry.start + len(entry.token_ids) - entry.num_drafts != len(account.tokens):
                continue
            for each in (account, *(self._children(account) if account.splits else ())):
                answers[each.name] = accepted(each, entry)
        return answers

    def _advance(self, entries: Sequence[Entry], answers: Mapping[str, Sequence[int]]) -> None:
        for entry in entries:
            account = self.live[entry.request_id]
            new = answers.get(entry.request_id, ())
            stop = entry.start + len(entry.token_ids) - entry.num_drafts
            self._count(entry, account, new)
            account.is_running, account.was_preempted = True, False
            if account.first_scheduled < 0:
                account.first_scheduled = self.steps
            account.computed = stop + max(0, len(new) - 1)
            if new and account.splits:
                account.splits = False
                for child in self._children(account):
                    self._split(account, child)
        for name, tokens in answers.items():
            self.live[name].tokens += tokens
            self.offered.pop(name, None)

    def _children(self, parent: Account) -> list[Account]:
        """Those that have not parted from it."""
        children = [self.live[name] for name in parent.request.children if name in self.live]
        return [child for child in children if child.is_child_to_be]

    def _split(self, parent: Account, child: Account) -> None:
        child.tokens, child.prefixes = list(parent.tokens), list(parent.prefixes[: len(parent.tokens)])
        child.is_child_to_be = False
        child.first_scheduled = self.steps

    def _count(self, entry: Entry, account: Account, new: Sequence[int]) -> None:
        self.met["scheduled tokens"] += len(entry.token_ids)
        self.met["chunks"] += not new and entry.start + len(entry.token_ids) < len(account.tokens)
        self.met["hits"] += not account.is_running and entry.start > 0
        self.met["accepted drafts"] += max(0, len(new) - 1)
        self.met["rejected drafts"] += entry.num_drafts - max(0, len(new) - 1)

    # --- requests

    def _open(self, request: Request) -> Account:
        account = Account(request, self.arrivals, list(request.prompt_token_ids), self.demands.names)
        account.splits = bool(request.children)
        self.live[request.request_id] = account
        self.arrivals += 1
        self.met["requests"] += 1
        self.met["children"] += len(request.children)
        return account

    def _abort(self, name: str, by: str, in_flight: Collection[str] = ()) -> None:
        self.calls.call(by, name)
        self.met["aborts"] += 1
        account = self.live[name]
        if "abort-at-once" in self.calls.lacks and (account.is_running or name in in_flight):
            account.is_aborted = True
            return
        self._leave(name)
        for child in account.request.children:  # which have not parted from it go on by themselves
            if child in self.live:
                self.live[child].is_child_to_be = False

    def _leave(self, name: str) -> None:
        del self.live[name]
        self.demands.ends[name] = self.steps

    def _end(self, finished: list[str] | None) -> None:
        ended = {name for name, account in self.live.items() if account.has_ended}
        ended |= {name for name in finished or () if name in self.live and self.live[name].is_aborted}
        self.demands.require_endings(finished, ended, self.live)
        for name in ended:
            self._leave(name)
            self.met["finished"] += 1


def accepted(account: Account, entry: Entry) -> list[int]:
    tokens = list(account.tokens)
    new: list[int] = []
    drafts = list(entry.token_ids)[len(entry.token_ids) - entry.num_drafts :]
    for draft in (*drafts, None):
        new.append(next_token([*tokens, *new], account.arrival))
        if new[-1] != draft or account.ends_with(new[-1], account.num_outputs + len(new)):
            break
    return new
