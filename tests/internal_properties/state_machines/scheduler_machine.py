"""Rule-based state machines: the block pool against a plain model, the scheduler over fake_model.py.

    from hypothesis.stateful import run_state_machine_as_test
    run_state_machine_as_test(SchedulerMachine, settings=settings(max_examples=1000, stateful_step_count=15))

Hypothesis draws the rules and shrinks what fails to a short program of small integers. What is required stands in
books.py. The counters of a class say how much was compared since the process began.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from internal_properties.state_machines.accounts import Account
from internal_properties.state_machines.books import VOCAB_SIZE, Books
from internal_properties.state_machines.compare import require
from internal_properties.state_machines.fake_model import sample, truth
from internal_properties.state_machines.pool_machine import PoolMachine
from scheduler import (
    POLICIES,
    BatchPlan,
    FinishReason,
    PlanError,
    Request,
    RequestRefused,
    SchedulerConfig,
    TraceWriter,
    most_drafts,
    reasons,
    replay,
)
from scheduler.trace import Replay

__all__ = ["PoolMachine", "SchedulerMachine"]

PROMPT = (0, 1, 0, 0, 2, 1, 1, 0, 2, 2, 0, 1, 2, 0, 0, 1, 2, 1)
OTHER = 3  # a token that stands in no shared prefix
FAMILIES = ("same", "last differs", "a block differs", "all differ", "a dialogue goes on")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"prompt_logits": True},
    {"cache_salt": "x"},
    {"stop_token_ids": frozenset([1])},
    {"stop_token_ids": frozenset([2]), "min_tokens": 3},
    {"priority": 1},
    {"priority": -1},
)
which = st.integers(0, 5)
drafts = st.integers(0, 4)


class SchedulerMachine(RuleBasedStateMachine):
    """Scheduler and FakeModel under any calls in any order; then all that is left is run to its end."""

    schedules: ClassVar[int] = 0
    steps: ClassVar[int] = 0
    tokens: ClassVar[int] = 0  # rows of logits compared

    def __init__(self) -> None:
        super().__init__()
        self.is_sound = False  # the last rule and the invariant after it went through

    @initialize(
        block_size=st.sampled_from((1, 2, 3, 5)),
        num_blocks=st.integers(1, 6),
        max_num_seqs=st.sampled_from((3, 2, 1, 4, 5)),
        budget=st.integers(1, 12),
        policy=st.sampled_from(tuple(POLICIES)),
        watermark=st.sampled_from((0.0, 0.1, 0.3)),
        no_caching=st.sampled_from((False, False, True)),
        num_host_blocks=st.sampled_from((0, 3, 6)),
        taps=st.integers(2, 4),
        window=st.sampled_from((None, 3, 1, 2, 5, 8)),
        num_window_blocks=st.integers(1, 6),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        policy: str,
        watermark: float,
        no_caching: bool,
        num_host_blocks: int,
        taps: int,
        window: int | None = None,
        num_window_blocks: int = 6,
    ) -> None:
        SchedulerMachine.schedules += 1
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            policy=policy,
            watermark=watermark,
            prefix_caching=not no_caching,
            num_host_blocks=num_host_blocks,
            max_waiting_tokens=3,
            sliding_window=window,
            num_window_blocks=num_window_blocks if window else 0,
        )
        self.books = Books(config, taps)
        self.scheduler = self.books.scheduler
        self.file = io.StringIO()
        self.trace: TraceWriter | None = TraceWriter(self.file, config)
        self.num_requests = 0

    # --- requests come and go

    def _name(self) -> str:
        self.num_requests += 1
        return f"r{self.num_requests - 1}"

    def _prompt(self, length: int, family: str) -> tuple[int, ...]:
        """Prompts that share much, and part near the borders of blocks."""
        size = self.books.config.block_size
        if family == "a dialogue goes on" and self.books.accounts:
            return (*list(self.books.accounts.values())[-1].tokens, *PROMPT)[:length]
        other = {"last differs": 1, "a block differs": size + 1, "all differ": length}.get(family, 0)
        return (*PROMPT[: max(0, length - other)], *(OTHER,) * min(other, length))

    @rule(
        blocks=st.integers(0, 3),
        beyond=st.integers(-1, 2),
        family=st.integers(0, len(FAMILIES) - 1),
        most=st.integers(1, 6),
        options=st.integers(0, len(OPTIONS) - 1),
        forks=st.sampled_from((0, 0, 0, 1, 2)),
        more=st.integers(0, 2),
    )
    def add(self, blocks: int, beyond: int, family: int, most: int, options: int, forks: int, more: int) -> None:
        """A prompt that ends near the border of a block, and up to two more, each a little longer and different."""
        self.is_sound = False
        length = blocks * self.books.config.block_size + beyond
        self._add(length, FAMILIES[family], most, OPTIONS[options], forks)
        for number in range(1, more + 1):
            self._add(length + number, FAMILIES[(family + number) % len(FAMILIES)], most, {}, 0)

    def _add(self, length: int, family: str, most: int, options: dict[str, Any], forks: int) -> None:
        """What is far too long for the pool is cut to a bit too long, which must be refused."""
        books = self.books
        room = books.config.num_blocks * books.config.block_size
        most = min(most, room)
        length = max(1, min(length, room + 2 - most, len(PROMPT)))
        prompt = self._prompt(length, family)
        request = Request(self._name(), prompt, most, **options)
        children = [Request(self._name(), prompt, most, **{**options, "prompt_logits": False}) for _ in range(forks)]
        try:
            self.scheduler.add(request, children)
        except RequestRefused:
            in_windows = books.most_in_windows(length + most - 1) + 1  # where chunks may begin is not counted on
            too_long = length + most - 1 > room or in_windows > books.config.num_window_blocks > 0
            require(too_long, True, "was refused, though too long:", request.request_id)
            return
        require(length + most - 1 <= room, True, "was taken, though short enough:", request.request_id)
        if books.config.num_window_blocks:
            fits = books.most_in_windows(length + most - 1) <= books.config.num_window_blocks
            require(fits, True, "was taken, though its windows fit:", request.request_id)
        for one in (request, *children):
            books.open(one, prompt)
        if self.trace:
            self.trace.add(request, children)

    def _chosen(self, number: int) -> Account:
        return list(self.books.live.values())[number % len(self.books.live)]

    def _has_live(self) -> bool:
        return bool(self.books.live)

    def _has_running(self) -> bool:
        return bool(self.scheduler.running)

    @precondition(_has_live)
    @rule(which=which, reason=st.sampled_from((FinishReason.ABORT, FinishReason.STOP)))
    def finish(self, which: int, reason: FinishReason) -> None:
        """An abort, or a stop string."""
        self.is_sound = False
        name = self._chosen(which).name
        self.scheduler.finish(name, reason)
        if self.trace:
            self.trace.finish(name, reason)
        self.books.settle(name)

    @precondition(_has_running)
    @rule(which=which, most=st.integers(1, 4))
    def fork(self, which: int, most: int) -> None:
        """A child of a running request, of `most` tokens more."""
        self.is_sound = False
        books = self.books
        parent = self.scheduler.running[which % len(self.scheduler.running)]
        room = books.config.num_blocks * books.config.block_size - parent.num_prompt_tokens + 1
        most = min(parent.num_output_tokens + most, room)
        if most <= parent.num_output_tokens:
            return
        child = Request(self._name(), parent.prompt_token_ids, most, cache_salt=parent.cache_salt)
        if books.most_in_windows(child.most_computed_tokens) + 1 > books.config.num_window_blocks > 0:
            return  # it may be refused, as in `_add`
        books.open(child, books.accounts[parent.request_id].tokens)
        self.scheduler.fork(parent.request_id, child)
        if self.trace:
            self.trace.fork(parent.request_id, child)

    @precondition(_has_running)
    @rule(which=which)
    def preempt(self, which: int) -> None:
        self.is_sound = False
        name = self.scheduler.running[which % len(self.scheduler.running)].request_id
        self.scheduler.preempt(name)
        self.books.accounts[name].preemptions += 1
        if self.trace:
            self.trace.preempt(name)

    # --- steps

    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @precondition(_has_live)
    @rule(drafts=drafts, right=drafts)
    def speculate(self, drafts: int, right: int) -> None:
        self._step(drafts=drafts, right=right)

    @precondition(_has_live)
    @rule(which=which, drafts=drafts, early=st.booleans())
    def finish_in_flight(self, which: int, drafts: int, early: bool) -> None:
        self._step(drafts=drafts, right=2, aborted=self._chosen(which).name, early=early)

    @precondition(_has_live)
    @rule(which=which, drafts=drafts)
    def fail(self, which: int, drafts: int) -> None:
        """An error is reported for one request, if the step has anything to do with it."""
        self._step(drafts=drafts, right=2, failing=self._chosen(which).name)

    @rule(drafts=drafts, executed=st.booleans(), patience=st.integers(0, 4), aborted=st.booleans())
    def abandon(self, drafts: int, executed: bool, patience: int, aborted: bool) -> None:
        """A step breaks off, before or after the model has run: the next that preempts, or the last of a few."""
        self.is_sound = False
        plan, offered = self._plan(drafts, right=2)
        while patience and not plan.preempted:
            self._complete(plan, offered)
            plan, offered = self._plan(drafts, right=2)
            patience -= 1
        if executed:
            self.books.require_rows(plan, self.books.model.execute(plan))
        if aborted and plan.scheduled:
            self._abort_in_flight(plan.scheduled[-1].request_id)
        for request in self.scheduler.running:
            self.books.accounts[request.request_id].withdrawn += 1
        self.scheduler.abandon(plan)
        self.books.steps += 1
        if self.trace:
            self.trace.abandon(plan, offered)

    def _plan(
        self, drafts: int, right: int, aborted: str | None = None, early: bool = False
    ) -> tuple[BatchPlan, dict[str, list[int]]]:
        """A plan with drafts, of which the first `right` are what the model will say; one request may be aborted."""
        books, scheduler = self.books, self.scheduler
        ran = [request.request_id for request in scheduler.running]
        evictions = scheduler.pool.evictions
        plan = scheduler.schedule()
        # Decodes may have evicted what a hit had when admission was tried before them.
        if books.config.policy != "prefill-first" or scheduler.pool.evictions == evictions:
            books.require_no_rest(plan)
        waits = [books.accounts[request.request_id].key for request in scheduler.waiting]
        books.preempted += len(plan.preempted)
        for name in plan.preempted:
            books.accounts[name].preemptions += 1
        if early and aborted:
            self._abort_in_flight(aborted)
        offered = {}
        before = dict(books.published)
        for entry in plan.scheduled if drafts else ():
            if entry.samples == (entry.request_id,):
                offered[entry.request_id] = self._drafts(books.accounts[entry.request_id], drafts, right)
        if offered:
            bare, plan = plan, scheduler.add_drafts(plan, offered)
            without = tuple(entry.without_drafts(books.config.block_size) for entry in plan.scheduled)
            require(without, bare.scheduled, "the plan without its drafts", f"step {plan.step}")
            require(books.published, before, "after drafts, published blocks", f"step {plan.step}")
            for entry in plan.scheduled:
                require(list(entry.drafts), offered.get(entry.request_id, [])[: entry.num_drafts], "drafts", entry)
                most = max(0, most_drafts(books.accounts[entry.request_id].request))
                require(entry.num_drafts <= most, True, "drafts that may be kept:", entry)
        books.require_plan(plan, ran, waits)
        if not early and aborted:
            self._abort_in_flight(aborted)
        return plan, offered

    def _drafts(self, account: Account, count: int, right: int) -> list[int]:
        tokens = list(account.tokens)
        for index in range(count):
            row = truth(tokens, self.books.taps, self.books.config.sliding_window)
            token = sample(row, account.seed, VOCAB_SIZE)
            tokens.append(token if index < right else (token + 1) % VOCAB_SIZE)
        return tokens[len(account.tokens) :]

    def _abort_in_flight(self, name: str) -> None:
        """A trace can't say that it happened in flight, so it ends here."""
        self.scheduler.abort(name)
        self.books.settle(name)
        self.trace = None

    def _step(
        self,
        drafts: int = 0,
        right: int = 0,
        aborted: str | None = None,
        early: bool = False,
        failing: str | None = None,
    ) -> None:
        self.is_sound = False
        plan, offered = self._plan(drafts, right, aborted, early)
        self._complete(plan, offered, failing)

    def _complete(self, plan: BatchPlan, offered: dict[str, list[int]], failing: str | None = None) -> None:
        SchedulerMachine.steps += 1
        books, scheduler = self.books, self.scheduler
        rows = books.model.execute(plan)
        books.require_rows(plan, rows)
        concerned = {name for entry in plan.scheduled for name in (entry.request_id, *entry.samples)}
        failed: Sequence[str] = [failing] if failing in concerned and failing else []
        answers = books.answers(plan, rows, failed)
        books.record(plan, answers, failed)
        books.model.commit(plan, {name: len(tokens) for name, tokens in answers.items()}, failed)
        finished = books.update(plan, answers, failed)
        if self.trace:
            state = (len(scheduler.waiting), len(scheduler.running), scheduler.pool.num_free)
            self.trace.step(plan, offered, answers, list(failed), reasons(finished), state, None)

    @invariant()
    def holds_what_it_must(self) -> None:
        self.books.require_memory()
        self.is_sound = True

    # --- the end

    def teardown(self) -> None:
        if not self.is_sound:
            return  # it has failed already
        self._drain()
        self.books.require_all_free()
        SchedulerMachine.tokens += self.books.tokens
        if self.trace:
            self.trace.end()
            self._require_trace(self.file.getvalue().splitlines())

    def _require_trace(self, lines: Sequence[str]) -> None:
        """It replays, and counts what the books count."""
        books = self.books
        answered = {name: one.answered for name, one in books.accounts.items() if one.answered}
        counted = Replay(
            steps=len(books.endings),
            requests=len(books.accounts),
            tokens=sum(map(len, answered.values())),
            scheduled_tokens=books.scheduled_tokens,
            preemptions=books.preempted,
            outputs=answered,
        )
        require(asdict(replay(lines)), asdict(counted), "replay", "trace")
        steps = [(number, line) for number, line in enumerate(map(json.loads, lines), 1) if line["kind"] == "step"]
        require([line["finished"] for _, line in steps], books.endings, "endings", "trace")
        for number, line in steps[len(steps) // 2 :][:1]:  # a run that broke off there
            unfinished = replay(lines[:number], is_whole=False).unfinished
            require(unfinished, line["waiting"] + line["running"], "unfinished requests", "trace")

    def _drain(self) -> None:
        """At most 18 n m steps, for n requests of at most m positions each, none of which comes anew.

        A step serves the smallest key that runs (prefill-first: at least every ninth does), and no one preempts it, so
        it ends within m of those. Only if a smaller key is admitted meanwhile does it not; that one was the smallest of
        the queue, hence of all, and ends within m. So one request in 2 * 9 * m steps ends. Where blocks are reserved,
        nothing is computed twice, and n m steps are enough.
        """
        most = max((one.request.most_computed_tokens for one in self.books.live.values()), default=0)
        bound = 18 * len(self.books.live) * most
        steps = 0
        while self.books.live:
            if steps == bound:
                raise AssertionError(f"no progress: {list(self.books.live)} are unfinished after {bound} steps")
            self._step()
            self.books.require_memory()
            steps += 1
        if steps:
            try:
                self.scheduler.update(BatchPlan(0, (), (), (), ()), {})
            except PlanError:
                return
            raise AssertionError("update() for a plan that is not in flight was not refused")
