"""What SchedulerMachine demands: the machine's own books of a run, and the comparisons with them.

The books hold what each request was given and got, what of it was computed, and which prefixes were published where.
They are kept from the calls, the plans and the answers. Five calls inside the scheduler are listened to, since a plan
does not tell when they happen: a block is handed out, or published; a request enters, is split off, or swapped out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lfm2np.conformance.accounts import Account, Prefix
from lfm2np.conformance.compare import demand, demand_at_most, demand_cells
from lfm2np.conformance.fake_model import FakeModel, make_cache, sample, state_after, truth
from scheduler import BatchPlan, Move, Request, ScheduledTokens, Scheduler, SchedulerConfig, check
from scheduler.prefix_cache import block_key

VOCAB_SIZE = 4
ENDINGS = ("complete", "too short", "unknown", "evicted", "disabled")  # why a prefix hit ended
PATIENCE = 1000  # steps of waiting that one level of priority is worth: see scheduler.policy


class Books:
    """One scheduler, one fake model, and what the machine knows of both."""

    def __init__(self, config: SchedulerConfig, taps: int) -> None:
        self.config, self.taps = config, taps
        self.scheduler = Scheduler(config)
        self.cache = make_cache(config, taps)
        self.model = FakeModel(self.cache)
        self.accounts: dict[str, Account] = {}  # all that ever came
        self.live: dict[str, Account] = {}  # those not finished
        self.prefixes: dict[bytes, Prefix] = {}  # whatever has been computed, by key
        self.published: dict[bytes, int] = {}  # key -> block
        self.key_of: dict[int, bytes] = {}  # and back
        self.steps = 0
        self.tokens = 0
        self.statistics: dict[str, Any] = {
            "queries": 0,
            "query_tokens": 0,
            "hit_tokens": 0,
            "ended": dict.fromkeys(ENDINGS, 0),
        }
        self._evicted: dict[bytes, None] = {}  # the latest, at most one a block
        self._may_publish = False
        memory, pool = self.scheduler.memory, self.scheduler.pool
        self._allocate, self._publish = pool.allocate, pool.publish
        self._enter, self._split, self._swap_out = memory.enter, memory.split, memory.swap_out
        pool.allocate = self._on_allocate  # type: ignore[method-assign]
        pool.publish = self._on_publish  # type: ignore[method-assign]
        memory.enter = self._on_enter  # type: ignore[method-assign]
        memory.split = self._on_split  # type: ignore[method-assign]
        memory.swap_out = self._on_swap_out  # type: ignore[method-assign]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def open(self, request: Request, tokens: Sequence[int]) -> Account:
        """The books of a request that has just come."""
        arrival = len(self.accounts)
        by_priority = self.config.policy == "priority"
        key = (self.steps + request.priority * PATIENCE, arrival) if by_priority else (arrival, 0)
        account = Account(request, seed=arrival, key=key, tokens=list(tokens))
        self.accounts[request.request_id] = self.live[request.request_id] = account
        return account

    # --- the five moments

    def _on_allocate(self) -> tuple[int, bytes | None]:
        block, evicted = self._allocate()
        expected = self.key_of.pop(block, None)
        if expected is not None:
            del self.published[expected]
            self._evicted[expected] = None
            if len(self._evicted) > self.config.num_blocks:
                del self._evicted[next(iter(self._evicted))]
        demand(evicted, expected, "evicted key", f"block {block}")
        return block, evicted

    def _on_publish(self, block: int, key: bytes) -> bool:
        """After the write, and only what was written."""
        if not self._may_publish:
            raise AssertionError(f"block {block}: published before update()")
        self._require_block(key, block)
        done = self._publish(block, key)
        demand(done, key not in self.published, "publish()", f"block {block}")
        if done:
            self.published[key], self.key_of[block] = block, key
            self._evicted.pop(key, None)
        return done

    def _on_enter(self, request: Request, hit: tuple[int, ...], needed: int, moves: list[Move]) -> None:
        account = self.accounts[request.request_id]
        if not request.host_blocks:
            demand(hit, self.longest_prefix(account), "blocks of the prefix hit", account.name)
            account.computed = len(hit) * self.config.block_size
            account.cached += account.computed
            self._count(account)
        self._enter(request, hit, needed, moves)

    def _count(self, account: Account) -> None:
        """One more admission in the statistics of the prefix cache."""
        found, most = account.computed // self.config.block_size, account.first_logits // self.config.block_size
        reason = "complete" if most else "too short"
        if not self.config.prefix_caching:
            reason = "disabled"
        elif found < most:
            reason = "evicted" if self.keys(account, most)[found] in self._evicted else "unknown"
        self.statistics["queries"] += 1
        self.statistics["query_tokens"] += len(account.tokens)
        self.statistics["hit_tokens"] += account.computed
        self.statistics["ended"][reason] += 1

    def _on_split(self, parent: Request, child: Request, reserves: bool, moves: list[Move]) -> bool:
        """It shares whenever there is a slot, and, where blocks are reserved, room for all that it will need."""
        computed, memory = self.accounts[parent.request_id].computed, self.scheduler.memory
        own = self.blocks_for(child.most_computed_tokens) - computed // self.config.block_size if reserves else 0
        room = bool(memory.free_slots) and own <= memory.pool.num_free
        done = self._split(parent, child, reserves, moves)
        demand(done, room and computed > 0 and parent in self.scheduler.running, "shares:", child.request_id)
        if done:
            account = self.accounts[child.request_id]
            account.computed = account.furthest = account.inherited = computed
            held = self.blocks_for(child.most_computed_tokens if reserves else computed)
            demand(len(child.block_table), held, "blocks", child.request_id)
        return done

    def _on_swap_out(self, request: Request, moves: list[Move]) -> bool:
        """It goes to the host whenever something is computed and there is room for all of it."""
        host = self.scheduler.memory.host_pool
        room = host.num_free if host else 0
        done = self._swap_out(request, moves)
        used = self.blocks_for(request.num_computed_tokens)
        demand(done, 0 < used <= room, "is swapped out:", request.request_id)
        demand(len(request.host_blocks), used if done else 0, "host blocks", request.request_id)
        return done

    def longest_prefix(self, account: Account) -> tuple[int, ...]:
        """The published blocks that a request entering now can use: full ones before the first logits it wants."""
        blocks: list[int] = []
        most = account.first_logits // self.config.block_size if self.config.prefix_caching else 0
        for key in self.keys(account, most):
            if key not in self.published:
                break
            blocks.append(self.published[key])
        return tuple(blocks)

    def keys(self, account: Account, count: int) -> list[bytes]:
        """The keys of a request's first blocks, recomputed; each now stands for these tokens and no others."""
        size, known, salt = self.config.block_size, account.block_keys, account.request.cache_salt
        while len(known) < count:
            stop = (len(known) + 1) * size
            known.append(block_key(known[-1] if known else b"", account.tokens[stop - size : stop], salt))
        return known[:count]

    def _note_computed(self, account: Account) -> None:
        """Every full block that is computed may be published."""
        size, salt = self.config.block_size, account.request.cache_salt
        for index, key in enumerate(self.keys(account, account.computed // size)):
            tokens = tuple(account.tokens[: (index + 1) * size])
            if key not in self.prefixes:
                cells = list(enumerate(tokens))
                self.prefixes[key] = Prefix(salt, tokens, cells[-size:], state_after(cells, self.taps))
            known = self.prefixes[key]
            demand((salt, tokens), (known.salt, known.tokens), "same key for other tokens", account.name)

    # --- a plan

    def require_plan(self, plan: BatchPlan, ran: Sequence[str]) -> None:
        """`ran`: the requests that ran before it, in order."""
        step = f"step {plan.step}"
        demand(plan.step, self.steps, "its number", step)
        demand_at_most(plan.num_tokens, self.config.max_num_batched_tokens, "tokens", step)
        demand_at_most(len(plan.scheduled), self.config.max_num_seqs, "requests", step)
        if not plan.scheduled and any(not one.request.is_finished for one in self.live.values()):
            raise AssertionError(f"{step}: no progress: nothing is scheduled, but {list(self.live)} are unfinished")
        running = self.scheduler.running
        owners = Counter(block for one in running for block in one.block_table)
        seen = Counter(block for entry in plan.scheduled for block in entry.block_table)
        counts = {entry.request_id: len(entry.token_ids) for entry in plan.scheduled}
        demand(len(counts), len(plan.scheduled), "different requests", step)
        for entry in plan.scheduled:
            self._require_entry(entry, owners, seen)
        if not self.scheduler.policy.reserves:
            for one in running:
                needed = self.blocks_for(self.accounts[one.request_id].computed + counts.get(one.request_id, 0))
                demand_at_most(len(one.block_table), needed, "blocks held", one.request_id)
        self._require_order(plan, ran)

    def _require_entry(self, entry: ScheduledTokens, owners: Counter[int], seen: Counter[int]) -> None:
        account, size, name = self.accounts[entry.request_id], self.config.block_size, entry.request_id
        known = entry.stop - entry.num_drafts
        demand(entry.start, account.computed, "start", name)
        demand(entry.token_ids[: known - entry.start], tuple(account.tokens[entry.start : known]), "tokens", name)
        demand(entry.start < known <= len(account.tokens), True, "tokens scheduled that are known:", name)
        demand(entry.samples[:1] == (name,), known == len(account.tokens), "a token comes of it:", name)
        demand(entry.block_table, account.request.block_table[: self.blocks_for(entry.stop)], "block table", name)
        demand(len(entry.block_table), self.blocks_for(entry.stop), "blocks of the table", name)
        demand(entry.first_logits, min(known, max(entry.start, account.first_logits)), "first logits", name)
        ends = range(entry.start // size + 1, entry.stop // size + 1) if self.config.prefix_caching else ()
        demand(entry.checkpoints, tuple((end * size, entry.block_table[end - 1]) for end in ends), "checkpoints", name)
        for index in range(entry.start // size, len(entry.block_table)):
            block = entry.block_table[index]
            facts = (owners[block], seen[block], self.key_of.get(block))
            demand(facts, (1, 1, None), "owners, users in this step and key", f"{name}: block {block}, to be written")

    def _require_order(self, plan: BatchPlan, ran: Sequence[str]) -> None:
        """Admitted in the policy's order, none overtaken; preempted from the end. No policy is excepted."""
        step, reserves = f"step {plan.step}", self.scheduler.policy.reserves
        order = [self.accounts[name].key for name in plan.admitted]
        demand(order, sorted(order), "order of admission", step)
        waiting = [self.accounts[one.request_id].key for one in self.scheduler.waiting]
        if order and waiting and min(waiting) < order[-1]:
            raise AssertionError(f"{step}: admitted {order[-1]} while {min(waiting)} waits")
        if not reserves:
            demand(set(plan.admitted) <= {one.request_id for one in plan.scheduled}, True, "admitted to work:", step)
            self._require_no_rest(plan)
        if plan.preempted:
            demand(reserves, False, "preemption though blocks are reserved:", step)
            least = min(self.accounts[name].key for name in plan.preempted)
            for name in set(ran) - set(plan.preempted):
                if self.accounts[name].key > least:
                    raise AssertionError(f"{step}: {plan.preempted} preempted, but {name} behind them runs on")
            if self.config.policy != "prefill-first":
                demand(plan.admitted, (), "admitted though blocks ran out:", step)

    def _require_no_rest(self, plan: BatchPlan) -> None:
        """While there are tokens, slots and blocks, the first that waits is admitted; who runs has work to do."""
        scheduler, left = self.scheduler, self.config.max_num_batched_tokens - plan.num_tokens
        left += sum(entry.num_drafts for entry in plan.scheduled)
        first = next(iter(scheduler.waiting), None)
        if plan.preempted or not left or first is None or not scheduler.memory.free_slots:
            return
        account = self.accounts[first.request_id]
        hit = () if first.host_blocks else self.longest_prefix(account)
        start = account.computed if first.host_blocks else len(hit) * self.config.block_size
        needed = self.blocks_for(min(len(account.tokens), start + left)) - len(hit)
        free = set(scheduler.pool.free_order()) - set(hit)
        spare = int(self.config.watermark * self.config.num_blocks) if scheduler.running else 0
        demand_at_most(len(free) - spare, needed - 1, f"blocks left while {first.request_id} waits", plan.step)

    # --- what comes of it

    def require_rows(self, plan: BatchPlan, rows: Mapping[str, list[int]]) -> None:
        """The logits of every row are the truth of the tokens before it, drafts included."""
        for entry in plan.scheduled:
            account = self.accounts[entry.request_id]
            sequence = [*account.tokens[: entry.stop - entry.num_drafts], *entry.drafts]
            found = rows[entry.request_id]
            demand(len(found) > entry.num_drafts or not entry.samples, True, "has the rows it needs:", account.name)
            for position, row in enumerate(found, start=entry.first_logits):
                demand(row, truth(sequence[: position + 1], self.taps), f"logits at {position}:", account.name)
            self.tokens += len(found)

    def _advances(self, entry: ScheduledTokens, failed: Collection[str]) -> bool:
        """Neither failed nor aborted in flight."""
        return entry.request_id not in failed and not self.accounts[entry.request_id].request.is_finished

    def answers(self, plan: BatchPlan, rows: Mapping[str, list[int]], failed: Collection[str]) -> dict[str, list[int]]:
        """Drafts as long as they are what the model says, then one token more."""
        answers: dict[str, list[int]] = {}
        for entry in plan.scheduled:
            if not self._advances(entry, failed):
                continue
            last = rows[entry.request_id][-1 - entry.num_drafts :]
            for name in entry.samples:
                account = self.accounts[name]
                if name in failed or account.request.is_finished:
                    continue
                tokens = answers[name] = []
                for row, draft in zip(last, (*entry.drafts, None), strict=True):
                    tokens.append(sample(row, account.seed, VOCAB_SIZE))
                    if tokens[-1] != draft or account.ends_with(tokens[-1], account.num_outputs + len(tokens)):
                        break
        return answers

    def record(self, plan: BatchPlan, answers: Mapping[str, list[int]], failed: Collection[str]) -> None:
        """Before commit() and update()."""
        for name, tokens in answers.items():
            self.accounts[name].tokens += tokens
            self.accounts[name].answered += tokens
        for entry in plan.scheduled:
            account = self.accounts[entry.request_id]
            if not self._advances(entry, failed):
                continue
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
            if account.request.prompt_logits and entry.request_id in answers:
                wanted = len(account.request.prompt_token_ids)
                demand(min(account.prompt_rows, wanted), wanted, "prompt positions with logits", account.name)
            self._note_computed(account)

    def update(self, plan: BatchPlan, answers: Mapping[str, list[int]], failed: Collection[str]) -> list[Request]:
        """scheduler.update(), and whether those finish that must."""
        ended = {name for name in failed if name in self.live}
        for name, tokens in answers.items():
            if self.accounts[name].ends_with(tokens[-1], self.accounts[name].num_outputs):
                ended.add(name)
        advancing = [entry for entry in plan.scheduled if self._advances(entry, failed)]
        evictions, self._may_publish = self.scheduler.pool.evictions, True
        finished = self.scheduler.update(plan, answers, list(failed))
        self._may_publish = False
        if self.config.prefix_caching and self.scheduler.pool.evictions == evictions:
            for entry in advancing:
                account, size = self.accounts[entry.request_id], self.config.block_size
                for key in self.keys(account, account.computed // size)[entry.start // size :]:
                    demand(key in self.published, True, "each block that it filled is published:", account.name)
        self.steps += 1
        demand({one.request_id for one in finished}, ended, "finished", f"step {plan.step}")
        for one in finished:
            self.settle(one.request_id)
        return finished

    def settle(self, name: str) -> None:
        """The request has ended. Every scheduled token that was kept is accounted for:

        kept = furthest - inherited - skipped + recomputed, and for one that ran without interruption, more simply,
        kept = computed at the end - inherited - cached at its admission.
        """
        account = self.live.pop(name)
        request = account.request
        demand(request.token_ids, account.tokens, "tokens at its end", name)
        total = request.furthest_computed - account.inherited - account.skipped + request.num_recomputed_tokens
        demand(account.kept, total, "kept scheduled tokens", name)
        if not account.preemptions and not account.withdrawn:
            demand(account.kept, account.computed - account.inherited - account.cached, "tokens of one run", name)
        demand(request.num_recomputed_tokens, account.recomputed, "recomputed tokens", name)
        demand(request.num_cached_tokens, account.cached, "cached tokens", name)
        demand(request.num_preemptions, account.preemptions, "preemptions", name)
        demand(request.num_steps, account.steps, "steps", name)

    # --- between steps

    def require_memory(self) -> None:
        """Conservation; and every block, state and checkpoint that stands for something holds it."""
        check(self.scheduler)
        demand(self.scheduler.requests.keys(), self.live.keys(), "unfinished requests", f"step {self.steps}")
        for account in self.live.values():
            demand(account.request.token_ids, account.tokens, "tokens", account.name)
            if account.request.host_blocks:
                self._require_swapped(account)
        for request in self.scheduler.running:
            self._require_running(self.accounts[request.request_id])
        demand(self.scheduler.pool.block_of, self.published, "published blocks", f"step {self.steps}")
        for key, block in self.published.items():
            self._require_block(key, block)

    def _require_running(self, account: Account) -> None:
        request, stop = account.request, account.computed
        demand(request.num_computed_tokens, stop, "computed tokens", account.name)
        expected = list(enumerate(account.tokens[:stop]))
        assert request.slot is not None
        if not self.scheduler.awaits_moves(request):
            demand(self.cache.states[request.slot], state_after(expected, self.taps), "live state", account.name)
        elif self.scheduler.policy.reserves:
            expected = expected[: stop - stop % self.config.block_size]  # the rest is yet to be copied
        demand_cells(self.cache.read(request.block_table, len(expected)), expected, "its blocks", account.name)

    def _require_swapped(self, account: Account) -> None:
        host = account.request.host_blocks
        expected = list(enumerate(account.tokens[: account.computed]))
        found = [cell for block in host for cell in self.cache.host_blocks[block]][: account.computed]
        demand_cells(found, expected, "its host blocks", account.name)
        demand(self.cache.host_states[host[-1]], state_after(expected, self.taps), "state on the host", account.name)

    def _require_block(self, key: bytes, block: int) -> None:
        if key not in self.prefixes:
            raise AssertionError(f"block {block}: published under a key that no computed full block has")
        prefix = self.prefixes[key]
        if self.cache.blocks[block] != prefix.cells or self.cache.checkpoints[block] != prefix.checkpoint:
            where = f"block {block}, published for {prefix.tokens}"
            demand_cells(self.cache.blocks[block], prefix.cells, "content", where)
            demand(self.cache.checkpoints[block], prefix.checkpoint, "checkpoint", where)

    def require_all_free(self) -> None:
        scheduler = self.scheduler
        demand(
            asdict(scheduler.prefix_cache.statistics), self.statistics, "statistics of the prefix cache", "at the end"
        )
        demand(scheduler.pool.num_free, self.config.num_blocks, "free blocks", "at the end")
        demand(sorted(scheduler.memory.free_slots), list(range(self.config.max_num_seqs)), "free slots", "at the end")
        demand((len(scheduler.waiting), scheduler.running), (0, []), "waiting and running", "at the end")
        host_pool = scheduler.memory.host_pool
        demand(host_pool.num_free if host_pool else 0, self.config.num_host_blocks, "free host blocks", "at the end")
