"""The adapter of our own scheduler with what it alone promises, beside what the suite demands of any.

The books hold what each request was given and got, what of it was computed, and which prefixes were published where.
They are kept from the calls, the plans and the answers, and by moments.py from what a plan does not tell. Each call is
a line of a trace, which is replayed at the end.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import scheduler
from internal_properties.state_machines.accounts import Account
from internal_properties.state_machines.compare import require, require_at_most, require_cells
from internal_properties.state_machines.moments import Moments
from scheduler import FREED, BatchPlan, FinishReason, ScheduledTokens, TraceWriter, most_drafts, reasons, replay
from scheduler.protocol import Refused, Request, Step
from scheduler.trace import Replay


class StrictScheduler(Moments):
    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__(sizes)
        self.options: dict[str, Any] = {}  # of the next request: what the protocol has not
        self.aborts_early: str | None = None  # in flight, before drafts are added
        self.failing: str | None = None  # in the step in flight
        self.offered: Mapping[str, Sequence[int]] = {}
        self.endings: list[dict[str, str]] = []  # by step that was completed
        self.scheduled_tokens = 0  # of those
        self.preempted = 0  # by plans
        self.file = io.StringIO()
        self.trace: TraceWriter | None = TraceWriter(self.file, self.config)

    # --- requests come and go

    def add(self, request: Request) -> None:
        subjects = [self._request(request, name) for name in (request.request_id, *request.children)]
        self._refusable(request, self.scheduler.add, subjects[0], subjects[1:])
        for subject in subjects:
            self.open(request, subject, request.prompt_token_ids)
        if self.trace:
            self.trace.add(subjects[0], subjects[1:])

    def _request(self, request: Request, name: str) -> scheduler.Request:
        subject = super()._request(request, name)
        subject.min_tokens = self.options.get("min_tokens", 0)
        subject.prompt_logits = self.options.get("prompt_logits", False) and name == request.request_id
        return subject

    def fork(self, parent_id: str, child: Request) -> None:
        subject = self._request(child, child.request_id)
        self.open(child, subject, self.accounts[parent_id].tokens)
        try:
            self._refusable(child, self.scheduler.fork, parent_id, subject)
        except Refused:
            del self.accounts[child.request_id], self.live[child.request_id]
            raise
        if self.trace:
            self.trace.fork(parent_id, subject)

    def _refusable(self, request: Request, call: Any, *arguments: Any) -> None:
        """Refused is what is larger than the pool, or whose windows are, and nothing else."""
        config, positions = self.config, len(request.prompt_token_ids) + request.max_tokens - 1
        windows, most = self.most_in_windows(positions), config.num_window_blocks
        try:
            call(*arguments)
        except scheduler.RequestRefused as refusal:
            # where chunks may begin is not counted on: one block more
            too_long = positions > config.num_blocks * config.block_size or windows + 1 > most > 0
            require(too_long, True, "was refused, though too long:", request.request_id)
            raise Refused(str(refusal)) from None
        require_at_most(positions, config.num_blocks * config.block_size, "accepted positions", request.request_id)
        if most:
            require_at_most(windows, most, "accepted blocks of windowed layers", request.request_id)

    def abort(self, request_id: str) -> None:
        if request_id == self.aborts_early:  # which it was
            self.aborts_early = None
        else:
            self._finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str) -> None:
        """At a stop string, which the scheduler does not see."""
        self._finish(request_id, FinishReason.STOP)

    def fail(self, request_id: str) -> None:
        """An error is reported for it: with the step, if that has anything to do with it."""
        scheduled = self.plan.scheduled if self.plan is not None else ()
        if any(request_id in (entry.request_id, *entry.samples) for entry in scheduled):
            self.failing = request_id
        else:
            self._finish(request_id, FinishReason.ERROR)

    def _finish(self, request_id: str, reason: FinishReason) -> None:
        self.scheduler.finish(request_id, reason)
        if self.scheduler.in_flight is not None:
            self.trace = None  # which can't say that it happened in flight
        elif self.trace:
            self.trace.finish(request_id, reason)
        self.settle(request_id)

    def preempt(self, request_id: str) -> None:
        super().preempt(request_id)
        self.accounts[request_id].preemptions += 1
        if self.trace:
            self.trace.preempt(request_id)

    # --- a plan

    def step(self) -> Step:
        ran = [request.request_id for request in self.scheduler.running]
        pool, evictions = self.scheduler.pool, self.scheduler.pool.evictions
        plan = self.scheduler.schedule()
        # Decodes may have evicted what a hit had when admission was tried before them.
        if self.config.policy != "prefill-first" or pool.evictions == evictions:
            self.require_no_rest(plan)
        waits = [self.accounts[request.request_id].key for request in self.scheduler.waiting]
        self.preempted += len(plan.preempted)
        for name in plan.preempted:
            self.accounts[name].preemptions += 1
        if self.aborts_early is not None:
            self._finish(self.aborts_early, FinishReason.ABORT)
        takers = {entry.request_id for entry in plan.scheduled if entry.samples == (entry.request_id,)}
        self.offered = {name: list(tokens) for name, tokens in self.drafts.items() if name in takers}
        self.drafts = {}
        if self.offered:
            plan = self._with_drafts(plan)
        self.plan = plan
        self.require_plan(plan, ran, waits)
        return self._step(plan)

    def _with_drafts(self, bare: BatchPlan) -> BatchPlan:
        before, step = dict(self.pool_books.block_of), f"step {bare.step}"
        plan = self.scheduler.add_drafts(bare, self.offered)
        without = tuple(entry.without_drafts(self.config.block_size) for entry in plan.scheduled)
        require(without, bare.scheduled, "the plan without its drafts", step)
        require(self.pool_books.block_of, before, "after drafts, published blocks", step)
        for entry in plan.scheduled:
            name = entry.request_id
            require(list(entry.drafts), list(self.offered.get(name, ()))[: entry.num_drafts], "drafts", name)
            require_at_most(entry.num_drafts, max(0, most_drafts(self.accounts[name].subject)), "drafts", name)
        return plan

    def require_plan(self, plan: BatchPlan, ran: Sequence[str], waits: Sequence[tuple[int, int]]) -> None:
        """`ran`: the requests that ran before it, in order; `waits`: the keys of those that it left waiting."""
        step = f"step {plan.step}"
        require(plan.step, self.steps, "its number", step)
        if not plan.scheduled and any(not account.subject.is_finished for account in self.live.values()):
            raise AssertionError(f"{step}: no progress: nothing is scheduled, but {list(self.live)} are unfinished")
        for account in self.accounts.values():
            account.awaits_moves = False
        running = self.scheduler.running
        owners = Counter(block for request in running for block in request.tables[0])
        seen = Counter(block for entry in plan.scheduled for block in entry.block_table)
        counts = {entry.request_id: len(entry.token_ids) for entry in plan.scheduled}
        for entry in plan.scheduled:
            self._require_entry(entry, owners, seen)
        if not self.scheduler.policy.reserves:
            for request in running:
                name = request.request_id
                needed = self.blocks_for(self.accounts[name].computed + counts.get(name, 0))
                require_at_most(len(request.tables[0]), needed, "blocks held", name)
        self._require_order(plan, ran, waits)

    def _require_entry(self, entry: ScheduledTokens, owners: Counter[int], seen: Counter[int]) -> None:
        account, size, name = self.accounts[entry.request_id], self.config.block_size, entry.request_id
        known = entry.stop - entry.num_drafts
        require(entry.start, account.computed, "start", name)
        require(entry.block_table, account.subject.tables[0][: self.blocks_for(entry.stop)], "block table", name)
        require(len(entry.block_table), self.blocks_for(entry.stop), "blocks of the table", name)
        require(entry.first_logits, min(known, max(entry.start, account.first_logits)), "first logits", name)
        ends = range(entry.start // size + 1, entry.stop // size + 1) if self.config.prefix_caching else ()
        require(entry.checkpoints, tuple((end * size, entry.block_table[end - 1]) for end in ends), "checkpoints", name)
        self._require_windows(entry)
        for index in range(entry.start // size, len(entry.block_table)):
            block = entry.block_table[index]
            facts = (owners[block], seen[block], self.pool_books.key_of.get(block))
            require(facts, (1, 1, None), "owners, users in this step and key", f"{name}: block {block}, to be written")

    def _require_windows(self, entry: ScheduledTokens) -> None:
        """Of windowed layers it holds every block that its rows see or write, and while none is reserved no other."""
        windows, size, name = self.windows, self.config.block_size, entry.request_id
        request = self.accounts[name].subject
        if windows is None:
            require((entry.window_table, request.tables[1]), ((), ()), "tables of windowed layers", name)
            return
        require(len(entry.window_table), len(entry.block_table), "blocks of the table of windowed layers", name)
        require(entry.window_table, request.tables[1][: len(entry.window_table)], "table of windowed layers", name)
        positions = {*self.seen_before(entry.start), *range(entry.start, entry.stop)}
        needed = {position // size for position in positions}
        held = {index for index, block in enumerate(entry.window_table) if block != FREED}
        require(sorted(held), sorted(needed), "blocks held in windowed layers", name)
        for index in range(entry.start // size, len(entry.window_table)):
            block = entry.window_table[index]
            owners = sum(other.tables[1].count(block) for other in self.scheduler.running)
            facts = (owners, windows.pool.key_of[block])
            require(facts, (1, None), "owners and key", f"{name}: block {block} of windowed layers, to be written")

    def _require_order(self, plan: BatchPlan, ran: Sequence[str], waits: Sequence[tuple[int, int]]) -> None:
        """Admitted in the policy's order, none overtaken; preempted from the end. No policy is excepted."""
        step, reserves = f"step {plan.step}", self.scheduler.policy.reserves
        order = [self.accounts[name].key for name in plan.admitted]
        require(order, sorted(order), "order of admission", step)
        if order and waits and min(waits) < order[-1]:
            raise AssertionError(f"{step}: admitted {order[-1]} while {min(waits)} waits")
        if not reserves:
            scheduled = {entry.request_id for entry in plan.scheduled}
            require(set(plan.admitted) <= scheduled, True, "admitted to work:", step)
        if plan.preempted:
            require(reserves, False, "preemption though blocks are reserved:", step)
            least = min(self.accounts[name].key for name in plan.preempted)
            for name in set(ran) - set(plan.preempted):
                if self.accounts[name].key > least:
                    raise AssertionError(f"{step}: {plan.preempted} preempted, but {name} behind them runs on")
            if self.config.policy != "prefill-first":
                require(plan.admitted, (), "admitted though blocks ran out:", step)

    def require_no_rest(self, plan: BatchPlan) -> None:
        """While there are tokens, slots and blocks, the first that waits is admitted. Right after schedule()."""
        if self.scheduler.policy.reserves:
            return
        scheduler, left = self.scheduler, self.config.max_num_batched_tokens - plan.num_tokens
        first = next(iter(scheduler.waiting), None)
        if plan.preempted or not left or first is None or not scheduler.memory.free_slots:
            return
        account = self.accounts[first.request_id]
        hit = self.longest_prefix(account)
        start = len(hit) * self.config.block_size
        most = self.config.max_num_batched_tokens  # what was left when admission was tried is not known
        needed = self.blocks_for(min(len(account.tokens), start + most)) - len(hit)
        free = set(scheduler.pool.free_order()) - set(hit)
        spare = int(self.config.watermark * self.config.num_blocks) if scheduler.running else 0
        if self.windows is not None:  # enough in windowed layers, even if no block of a hit were there
            left_over = int(self.config.watermark * self.config.num_window_blocks) if scheduler.running else 0
            positions = {*self.seen_before(start), *range(start, min(len(account.tokens), start + most))}
            in_windows = len({position // self.config.block_size for position in positions})
            if self.windows.pool.num_free - left_over < in_windows:
                return
        require_at_most(len(free) - spare, needed - 1, f"blocks left while {first.request_id} waits", plan.step)

    # --- what comes of it

    def update(self, tokens: Mapping[str, Sequence[int]]) -> Collection[str]:
        """Whoever failed is left out: the suite has counted it as aborted."""
        assert self.plan is not None
        plan, self.plan, failing, self.failing = self.plan, None, self.failing, None
        failed = [] if failing is None else [failing]
        advancing = [entry for entry in plan.scheduled if entry.request_id in self.live and entry.request_id != failing]
        self._record(advancing, tokens)
        evictions, self._may_publish = self.scheduler.pool.evictions, True
        finished = self.scheduler.update(plan, tokens, failed)
        self._may_publish = False
        if self.config.prefix_caching and self.scheduler.pool.evictions == evictions:
            for entry in advancing:
                account, first = self.accounts[entry.request_id], entry.start // self.config.block_size
                for key in self.keys(account, account.computed // self.config.block_size)[first:]:
                    require(key in self.pool_books.block_of, True, "each full block is published:", account.name)
        self.steps += 1
        names = [request.request_id for request in finished]
        require([name for name in names if name in failed], failed, "failed", f"step {plan.step}")
        self.endings.append({request.request_id: str(request.finish_reason) for request in finished})
        self.scheduled_tokens += plan.num_tokens
        for name in names:
            self.settle(name)
        if self.trace:
            state = (len(self.scheduler.waiting), len(self.scheduler.running), self.scheduler.pool.num_free)
            self.trace.step(plan, self.offered, tokens, failed, reasons(finished), state, None)
        return [name for name in names if name not in failed]

    def _record(self, advancing: Sequence[ScheduledTokens], answers: Mapping[str, Sequence[int]]) -> None:
        for name, tokens in answers.items():
            self.accounts[name].tokens += tokens
            self.accounts[name].answered += tokens
        for entry in advancing:
            account = self.accounts[entry.request_id]
            accepted = max(0, len(answers.get(entry.request_id, ())) - 1)
            stop = entry.stop - entry.num_drafts + accepted
            account.steps += 1
            account.kept += stop - entry.start
            account.skipped += max(0, entry.start - account.furthest)
            account.recomputed += max(0, min(stop, account.furthest) - entry.start)
            account.furthest = max(account.furthest, stop)
            account.computed = stop
            if entry.first_logits <= account.prompt_rows:
                account.prompt_rows = max(account.prompt_rows, entry.stop)
            if account.subject.prompt_logits and entry.request_id in answers:
                wanted = len(account.subject.prompt_token_ids)
                require(min(account.prompt_rows, wanted), wanted, "prompt positions with logits", account.name)
            self._note_computed(account)

    def settle(self, name: str) -> None:
        """The request has ended. Every scheduled token that was kept is accounted for:

        kept = furthest - inherited - skipped + recomputed, and for one that ran without interruption, more simply,
        kept = computed at the end - inherited - cached at its admission.
        """
        account = self.live.pop(name)
        request = account.subject
        require(request.token_ids, account.tokens, "tokens at its end", name)
        total = request.furthest_computed - account.inherited - account.skipped + request.num_recomputed_tokens
        require(account.kept, total, "kept scheduled tokens", name)
        if not account.preemptions:
            require(account.kept, account.computed - account.inherited - account.cached, "tokens of one run", name)
        require(request.num_recomputed_tokens, account.recomputed, "recomputed tokens", name)
        require(request.num_cached_tokens, account.cached, "cached tokens", name)
        require(request.num_preemptions, account.preemptions, "preemptions", name)
        require(request.num_steps, account.steps, "steps", name)
        require(request.most_blocks, account.most_blocks, "most blocks", name)
        require(request.arrival, account.arrival, "its number in the order of arrival", name)

    # --- between steps

    def verify(self) -> None:
        """Conservation; and every block, state and checkpoint that stands for something holds it."""
        super().verify()
        for books in self.all_pool_books:
            books.verify()
        require(self.scheduler.requests.keys(), self.live.keys(), "unfinished requests", f"step {self.steps}")
        for account in self.live.values():
            request = account.subject
            require(request.token_ids, account.tokens, "tokens", account.name)
            if request not in self.scheduler.running:
                require(request.num_computed_tokens, 0, "computed tokens of one that waits:", account.name)
        for request in self.scheduler.running:
            self._require_running(self.accounts[request.request_id])
        for key, block in self.pool_books.block_of.items():
            self._require_block("block", block, key)
        for key, block in self.windows.pool.block_of.items() if self.windows else ():
            self._require_block("window block", block, key)

    def _require_running(self, account: Account) -> None:
        request, stop = account.subject, account.computed
        require(request.num_computed_tokens, stop, "computed tokens", account.name)
        decodes = stop == len(account.tokens) - 1 and account.num_outputs > 0
        require(request.is_decoding, decodes, "is decoding:", account.name)
        assert request.slot is not None
        require(self.scheduler.awaits_moves(request), account.awaits_moves, "awaits moves:", account.name)
        if not account.awaits_moves:
            require(self.state("state", request.slot), account.state(stop), "live state", account.name)
        elif self.scheduler.policy.reserves:
            stop -= stop % self.config.block_size  # the rest is yet to be copied
        names = account.prefixes_with((), stop)
        require_cells(self.cells("block", request.tables[0])[:stop], names, "its blocks", account.name)
        if self.windows is not None:
            freed = request.tables[1].count(FREED) * self.config.block_size
            held = [block for block in request.tables[1] if block != FREED]
            actual = self.cells("window block", held)[: max(0, stop - freed)]
            require_cells(actual, names[freed:], "its blocks of windowed layers", account.name)

    # --- the end

    def require_end(self) -> None:
        """All is free, and the counts are those of the books. The trace replays, and counts the same."""
        subject, memory = self.scheduler, self.scheduler.memory
        require(
            asdict(subject.prefix_cache.statistics), self.statistics, "statistics of the prefix cache", "at the end"
        )
        for books in self.all_pool_books:
            books.verify()
            require(books.pool.num_free, books.pool.num_blocks, "free blocks", books.name)
        require(sorted(memory.free_slots), list(range(self.config.max_num_seqs)), "free slots", "at the end")
        require((len(subject.waiting), subject.running), (0, []), "waiting and running", "at the end")
        preemptions = sum(account.preemptions for account in self.accounts.values())
        require(subject.num_preemptions, preemptions, "preemptions", "at the end")
        if self.trace:
            self.trace.end()
            self._require_trace(self.file.getvalue().splitlines())

    def _require_trace(self, lines: Sequence[str]) -> None:
        answered = {name: account.answered for name, account in self.accounts.items() if account.answered}
        counted = Replay(
            steps=len(self.endings),
            requests=len(self.accounts),
            tokens=sum(map(len, answered.values())),
            scheduled_tokens=self.scheduled_tokens,
            preemptions=self.preempted,
            outputs=answered,
        )
        require(asdict(replay(lines)), asdict(counted), "replay", "trace")
        steps = [(number, line) for number, line in enumerate(map(json.loads, lines), 1) if line["kind"] == "step"]
        require([line["finished"] for _, line in steps], self.endings, "endings", "trace")
        for number, line in steps[len(steps) // 2 :][:1]:  # a run that broke off there
            unfinished = replay(lines[:number], is_whole=False).unfinished
            require(unfinished, line["waiting"] + line["running"], "unfinished requests", "trace")
