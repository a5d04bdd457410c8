"""The adapter of our own scheduler with what it alone promises, beside what the suite demands of any.

Accounts hold what each request was given and got, and what of it was computed; `prefixes`, which tokens a block's key
stands for. They are kept from the calls, the plans and the answers. Each call is a line of a trace, which is replayed
at the end.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import scheduler
from internal_properties.internal import require, require_at_most
from lfm2np.suite.schedulers import ledger
from lfm2np.suite.schedulers.demands import Demands
from lfm2np.suite.schedulers.own import OwnScheduler
from scheduler import (
    BatchPlan,
    BlockPool,
    FinishReason,
    ScheduledTokens,
    TraceWriter,
    most_drafts,
    reasons,
    replay,
)
from scheduler.prefix_cache import REASONS, block_key
from scheduler.protocol import Refused, Request, Step
from scheduler.trace import Replay

PATIENCE = 1000  # steps of waiting that one level of priority is worth: see scheduler.policy
KINDS = ("block", "window block")  # of the suite's memory, by pool


@dataclass(eq=False)
class Account(ledger.Account):
    """`computed` counts positions in the cache, while it runs."""

    subject: scheduler.Request = field(kw_only=True)  # as the scheduler has it
    key: tuple[int, int] = field(kw_only=True)  # its place in the policy's order
    answered: list[int] = field(default_factory=list)  # outputs of its own: a fork begins with its parent's
    block_keys: list[bytes] = field(default_factory=list)
    furthest: int = 0  # most that were ever computed, or taken over with a fork
    recomputed: int = 0
    cached: int = 0  # positions covered by hits, over all admissions
    steps: int = 0
    most_blocks: int = 0  # seen after a plan
    awaits_moves: bool = False  # split off since the last plan
    preemptions: int = 0

    @property
    def first_logits(self) -> int:
        if self.subject.prompt_logits and self.furthest < len(self.subject.prompt_token_ids):
            return self.furthest
        return len(self.tokens) - 1


class StrictScheduler(OwnScheduler):
    demands: Demands  # of the run: names of prefixes, and the memory that the steps describe

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__(sizes, watermark=sizes.get("watermark", 0.01))
        self.policies = set()  # whatever is promised, the accounts require
        self.accounts: dict[str, Account] = {}  # all that ever came
        self.live: dict[str, Account] = {}  # those not finished
        self.prefixes: dict[bytes, list[int]] = {}  # key of a full block that was computed -> names in its cells
        self.pools: list[BlockPool] = [group.pool for group in self.scheduler.memory.groups]
        self.published: list[set[bytes]] = [set() for _ in self.pools]  # when update() was last done
        self.options: dict[str, Any] = {}  # of the next request: what the protocol has not
        self.aborts_early: str | None = None  # in flight, before drafts are added
        self.failing: str | None = None  # in the step in flight
        self.offered: Mapping[str, Sequence[int]] = {}
        self.endings: list[dict[str, str]] = []  # by step that was completed
        self.scheduled_tokens = 0  # of those
        self.preempted = 0  # by plans
        self.statistics = Counter(dict.fromkeys(("queries", "query_tokens", "hit_tokens", *REASONS), 0))
        cache = self.scheduler.prefix_cache
        self._find, self._count = cache.find, cache.count
        cache.find, cache.count = self._on_find, self._on_count  # type: ignore[method-assign]
        self.file = io.StringIO()
        self.trace: TraceWriter | None = TraceWriter(self.file, self.config)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    # --- requests come and go

    def add(self, request: Request) -> None:
        subjects = [self._request(request, name) for name in (request.request_id, *request.children)]
        self._refusable(request, self.scheduler.add, subjects[0], subjects[1:])
        for subject in subjects:
            self._open(request, subject, request.prompt_token_ids)
        if self.trace:
            self.trace.add(subjects[0], subjects[1:])

    def _request(self, request: Request, name: str) -> scheduler.Request:
        subject = super()._request(request, name)
        subject.min_tokens = self.options.get("min_tokens", 0)
        subject.prompt_logits = self.options.get("prompt_logits", False) and name == request.request_id
        return subject

    def _open(self, request: Request, subject: scheduler.Request, tokens: Sequence[int]) -> Account:
        arrival = len(self.accounts)
        by_priority = self.config.policy == "priority"
        key = (len(self.endings) + subject.priority * PATIENCE, arrival) if by_priority else (arrival, 0)
        account = Account(request, arrival, list(tokens), self.demands.names, subject=subject, key=key)
        self.accounts[subject.request_id] = self.live[subject.request_id] = account
        return account

    def fork(self, parent_id: str, child: Request) -> None:
        """It shares whenever there is a slot, and, where blocks are reserved, room for all that it will need."""
        subject, parent, memory = (
            self._request(child, child.request_id),
            self.accounts[parent_id],
            self.scheduler.memory,
        )
        whole = self.blocks_for(subject.most_computed_tokens) - parent.computed // self.config.block_size
        fits = all((whole if memory.reserves else 0) <= pool.num_free for pool in self.pools)
        room = bool(memory.free_slots) and fits and parent.subject in self.scheduler.running
        shares = self._refusable(child, self.scheduler.fork, parent_id, subject)
        account = self._open(child, subject, parent.tokens)
        require(shares, room, "shares:", child.request_id)
        if shares:
            self._share(account, parent)
        if self.trace:
            self.trace.fork(parent_id, subject)

    def _share(self, child: Account, parent: Account) -> None:
        child.computed = child.furthest = parent.computed
        child.awaits_moves = True
        held = child.subject.most_computed_tokens if self.scheduler.policy.reserves else parent.computed
        child.most_blocks = self.blocks_for(held)
        if not child.subject.is_finished:
            require(len(child.subject.tables[0]), child.most_blocks, "blocks", child.subject.request_id)

    def _refusable(self, request: Request, call: Any, *arguments: Any) -> Any:
        """Refused is what is larger than the pool, or whose windows are, and nothing else."""
        config, positions = self.config, len(request.prompt_token_ids) + request.max_tokens - 1
        windows, most = self._most_in_windows(positions), config.num_window_blocks
        try:
            accepted = call(*arguments)
        except scheduler.RequestRefused as refusal:
            # where chunks may begin is not counted on: one block more
            too_long = positions > config.num_blocks * config.block_size or windows + 1 > most > 0
            require(too_long, True, "was refused, though too long:", request.request_id)
            raise Refused(str(refusal)) from None
        require_at_most(positions, config.num_blocks * config.block_size, "accepted positions", request.request_id)
        if most:
            require_at_most(windows, most, "accepted blocks of windowed layers", request.request_id)
        return accepted

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
        self._settle(request_id)

    def preempt(self, request_id: str) -> None:
        super().preempt(request_id)
        self.accounts[request_id].preemptions += 1
        if self.trace:
            self.trace.preempt(request_id)

    # --- prefix hits: listened to when they happen

    def _on_find(self, request: scheduler.Request) -> tuple[list[bytes], str]:
        keys, reason = self._find(request)
        hit = len(keys), reason
        require(hit, self._expected_hit(self.accounts[request.request_id]), "hit and its end", request.request_id)
        return keys, reason

    def _on_count(self, request: scheduler.Request, num_blocks: int, reason: str) -> None:
        """It has entered."""
        self._count(request, num_blocks, reason)
        account, hit = self.accounts[request.request_id], num_blocks * self.config.block_size
        account.computed = hit
        account.cached += hit
        self.statistics.update({"queries": 1, "query_tokens": len(account.tokens), "hit_tokens": hit, reason: 1})

    def _expected_hit(self, account: Account) -> tuple[int, str]:
        """Its blocks, and why it ends."""
        most = account.first_logits // self.config.block_size
        if not self.config.prefix_caching:
            return 0, "disabled"
        if not most:
            return 0, "too short"
        keys, hits = self._keys(account, most), len(self._longest_prefix(account))
        cached = next((count for count, key in enumerate(keys) if key not in self.pools[0].block_of), most)
        if hits < cached:
            return hits, "window"
        if cached == most:
            return hits, "complete"
        return hits, "evicted" if keys[cached] in self.scheduler.memory.groups[0].evicted else "unknown"

    def _longest_prefix(self, account: Account) -> tuple[int, ...]:
        """The published blocks from the first on, before the first logits that it wants; in windowed layers those that
        the next row sees must be cached, too."""
        size, blocks = self.config.block_size, []
        keys = self._keys(account, account.first_logits // size if self.config.prefix_caching else 0)
        for key in keys:
            if key not in self.pools[0].block_of:
                break
            blocks.append(self.pools[0].block_of[key])
        for count in range(len(blocks), 0, -1):
            seen = {position // size for position in self._seen_before(count * size)}
            if all(keys[index] in pool.block_of for pool in self.pools[1:] for index in seen):
                return tuple(blocks[:count])
        return ()

    def _seen_before(self, num_computed: int) -> range:
        """The computed positions that the next row sees in windowed layers."""
        return range(max(0, num_computed + 1 - (self.config.sliding_window or 1)), num_computed)

    def _most_in_windows(self, num_tokens: int) -> int:
        """The most blocks of windowed layers that a request of that many positions can need at once."""
        step = num_tokens if self.scheduler.policy.reserves else self.config.max_num_batched_tokens
        starts = range(num_tokens if self.config.sliding_window else 0)
        return max((self._in_windows(start, min(num_tokens, start + step)) for start in starts), default=0)

    def _in_windows(self, start: int, stop: int) -> int:
        """The blocks of windowed layers that the rows of these positions see or write."""
        return len(
            {position // self.config.block_size for position in (*self._seen_before(start), *range(start, stop))}
        )

    def _keys(self, account: Account, count: int) -> list[bytes]:
        """The keys of a request's first blocks, recomputed; each now stands for these tokens and no others."""
        size, known, salt = self.config.block_size, account.block_keys, account.subject.cache_salt
        while len(known) < count:
            stop = (len(known) + 1) * size
            known.append(block_key(known[-1] if known else b"", account.tokens[stop - size : stop], salt))
        return known[:count]

    # --- a plan

    def step(self) -> Step:
        ran = [request.request_id for request in self.scheduler.running]
        pool, evictions = self.scheduler.pool, self.scheduler.pool.evictions
        plan = self.scheduler.schedule()
        self._note_blocks()
        # Decodes may have evicted what a hit had when admission was tried before them.
        if self.config.policy != "prefill-first" or pool.evictions == evictions:
            self._require_no_rest(plan)
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
            self._note_blocks()
        self.plan = plan
        self._require_plan(plan)
        self._require_order(plan, ran, waits)
        return self._step(plan)

    def _note_blocks(self) -> None:
        for request in self.scheduler.running:
            account = self.accounts[request.request_id]
            account.most_blocks = max(account.most_blocks, len(request.tables[0]))

    def _with_drafts(self, bare: BatchPlan) -> BatchPlan:
        before, step = dict(self.scheduler.pool.block_of), f"step {bare.step}"
        plan = self.scheduler.add_drafts(bare, self.offered)
        without = tuple(entry.without_drafts(self.config.block_size) for entry in plan.scheduled)
        require(without, bare.scheduled, "the plan without its drafts", step)
        require(self.scheduler.pool.block_of, before, "after drafts, published blocks", step)
        for entry in plan.scheduled:
            name = entry.request_id
            require(list(entry.drafts), list(self.offered.get(name, ()))[: entry.num_drafts], "drafts", name)
            require_at_most(entry.num_drafts, max(0, most_drafts(self.accounts[name].subject)), "drafts", name)
        return plan

    def _require_plan(self, plan: BatchPlan) -> None:
        step = f"step {plan.step}"
        require(plan.step, len(self.endings), "its number", step)
        if not plan.scheduled and any(not account.subject.is_finished for account in self.live.values()):
            raise AssertionError(f"{step}: no progress: nothing is scheduled, but {list(self.live)} are unfinished")
        for account in self.accounts.values():
            account.awaits_moves = False
        running = self.scheduler.running
        owners = [
            Counter(block for request in running for block in request.tables[index]) for index in range(len(self.pools))
        ]
        seen = Counter(block for entry in plan.scheduled for block in entry.block_table)
        stops = {entry.request_id: entry.stop for entry in plan.scheduled}
        for entry in plan.scheduled:
            self._require_entry(entry, owners, seen)
        for request in running:
            if not self.scheduler.policy.reserves:
                name = request.request_id
                needed = self.blocks_for(stops.get(name, self.accounts[name].computed))
                require_at_most(len(request.tables[0]), needed, "blocks held", name)

    def _require_entry(self, entry: ScheduledTokens, owners: Sequence[Counter[int]], seen: Counter[int]) -> None:
        account, size, name = self.accounts[entry.request_id], self.config.block_size, entry.request_id
        known, num_blocks = entry.stop - entry.num_drafts, self.blocks_for(entry.stop)
        require(entry.first_logits, min(known, max(entry.start, account.first_logits)), "first logits", name)
        ends = range(entry.start // size + 1, entry.stop // size + 1) if self.config.prefix_caching else ()
        require(entry.checkpoints, tuple((end * size, entry.block_table[end - 1]) for end in ends), "checkpoints", name)
        tables = (entry.block_table, entry.window_table)
        for index, table in enumerate(tables):
            require(table, account.subject.tables[index][: num_blocks if index < len(self.pools) else 0], "table", name)
        for kind, pool, table, owned in zip(KINDS, self.pools, tables, owners, strict=False):
            for block in table[entry.start // size :]:
                facts = (owned[block], seen[block] if kind == "block" else 1, pool.key_of[block])
                require(facts, (1, 1, None), f"{kind} {block} to be written: owners, users in this step and key", name)

    def _require_order(self, plan: BatchPlan, ran: Sequence[str], waits: Sequence[tuple[int, int]]) -> None:
        """Admitted in the policy's order, none overtaken; preempted from the end. No policy is excepted.

        `ran`: the requests that ran before it, in order; `waits`: the keys of those that it left waiting.
        """
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

    def _require_no_rest(self, plan: BatchPlan) -> None:
        """While there are tokens, slots and blocks, the first that waits is admitted. Right after schedule()."""
        subject, config = self.scheduler, self.config
        first = next(iter(subject.waiting), None)
        is_full = plan.num_tokens == config.max_num_batched_tokens or not subject.memory.free_slots
        if subject.policy.reserves or plan.preempted or is_full or first is None:
            return
        account = self.accounts[first.request_id]
        hit = self._longest_prefix(account)
        start = len(hit) * config.block_size
        # what was left of the step when admission was tried is not known
        stop = min(len(account.tokens), start + config.max_num_batched_tokens)
        spare = [int(config.watermark * pool.num_blocks) if subject.running else 0 for pool in self.pools]
        for pool, kept in zip(self.pools[1:], spare[1:], strict=True):
            if pool.num_free - kept < self._in_windows(start, stop):  # even if no block of a hit were there
                return
        free = len(set(subject.pool.free_order()) - set(hit)) - spare[0]
        needed = self.blocks_for(stop) - len(hit)
        require_at_most(free, needed - 1, f"blocks left while {first.request_id} waits", plan.step)

    # --- what comes of it

    def update(self, tokens: Mapping[str, Sequence[int]]) -> Collection[str]:
        """Whoever failed is left out: the suite has counted it as aborted."""
        assert self.plan is not None
        plan, self.plan, failing, self.failing = self.plan, None, self.failing, None
        failed = [] if failing is None else [failing]
        advancing = [entry for entry in plan.scheduled if entry.request_id in self.live and entry.request_id != failing]
        self._record(advancing, tokens)
        evictions = self.scheduler.pool.evictions
        finished = self.scheduler.update(plan, tokens, failed)
        self._require_published(advancing, self.scheduler.pool.evictions == evictions)
        for entry in advancing:
            for name in entry.samples[1:]:
                if (child := self.live.get(name)) is not None and child.subject.furthest_computed:
                    self._share(child, self.accounts[entry.request_id])
        names = [request.request_id for request in finished]
        require([name for name in names if name in failed], failed, "failed", f"step {plan.step}")
        self.endings.append({request.request_id: str(request.finish_reason) for request in finished})
        self.scheduled_tokens += plan.num_tokens
        for name in names:
            self._settle(name)
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
            account.recomputed += max(0, min(stop, account.furthest) - entry.start)
            account.furthest = max(account.furthest, stop)
            account.computed = stop
            size = self.config.block_size
            for index, key in enumerate(self._keys(account, stop // size)):
                names = [account.prefix(position) for position in range(index * size, (index + 1) * size)]
                require(self.prefixes.setdefault(key, names), names, "same key for other tokens", account.name)

    def _require_published(self, advancing: Sequence[ScheduledTokens], none_is_lost: bool) -> None:
        """After the write every full block is, unless it was evicted since."""
        self.published = [set(pool.block_of) for pool in self.pools]
        for entry in advancing if self.config.prefix_caching and none_is_lost else ():
            account, first = self.accounts[entry.request_id], entry.start // self.config.block_size
            for key in self._keys(account, account.computed // self.config.block_size)[first:]:
                require(key in self.pools[0].block_of, True, "each full block is published:", account.name)

    def _settle(self, name: str) -> None:
        """The request has ended: what it counted. Blocks of a step that preempted it no plan shows."""
        account = self.live.pop(name)
        request = account.subject
        require(request.token_ids, account.tokens, "tokens at its end", name)
        require(request.num_recomputed_tokens, account.recomputed, "recomputed tokens", name)
        require(request.num_cached_tokens, account.cached, "cached tokens", name)
        require(request.num_preemptions, account.preemptions, "preemptions", name)
        require(request.num_steps, account.steps, "steps", name)
        require(request.arrival, account.arrival, "its number in the order of arrival", name)
        require_at_most(account.most_blocks, request.most_blocks, "most blocks", name)
        if not account.preemptions:
            require(request.most_blocks, account.most_blocks, "most blocks", name)

    # --- between steps

    def verify(self) -> None:
        """Conservation; and every published block and checkpoint holds what its key stands for."""
        super().verify()
        require(self.scheduler.requests.keys(), self.live.keys(), "unfinished requests", f"step {len(self.endings)}")
        for account in self.live.values():
            request, is_running = account.subject, account.subject in self.scheduler.running
            require(request.token_ids, account.tokens, "tokens", account.name)
            stop = account.computed if is_running else 0
            require(request.num_computed_tokens, stop, "computed tokens", account.name)
            decodes = stop == len(account.tokens) - 1 and account.num_outputs > 0
            require(request.is_decoding, decodes, "is decoding:", account.name)
            if is_running:
                require(self.scheduler.awaits_moves(request), account.awaits_moves, "awaits moves:", account.name)
        for kind, pool, published in zip(KINDS, self.pools, self.published, strict=False):
            require(pool.block_of.keys() - published, set(), "published before update():", kind)
            for key, block in pool.block_of.items():
                self._require_block(kind, block, key)

    def _require_block(self, kind: str, block: int, key: bytes) -> None:
        """Blocks of all layers have a checkpoint, too."""
        if key not in self.prefixes:
            raise AssertionError(f"{kind} {block}: published under a key that no computed full block has")
        memory, names = self.demands.memory, self.prefixes[key]
        cells = memory.blocks.get((kind, block), [None] * len(names))
        require([cell and cell.prefix for cell in cells], names, "content", f"{kind} {block}, which is published")
        if kind == "block":
            state = memory.states.get(("checkpoint", block))
            require(state and state.prefix, names[-1], "checkpoint", f"{kind} {block}, which is published")

    def require_end(self) -> None:
        """The counts are those of the accounts. The trace replays, and counts the same."""
        statistics = asdict(self.scheduler.prefix_cache.statistics)
        ended = statistics.pop("ended")
        require({**statistics, **ended}, dict(self.statistics), "statistics of the prefix cache", "at the end")
        preemptions = sum(account.preemptions for account in self.accounts.values())
        require(self.scheduler.num_preemptions, preemptions, "preemptions", "at the end")
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
