"""What SchedulerMachine requires: its books of a run, and the comparisons with them.

The books hold what each request was given and got, what of it was computed, and which prefixes were published where.
They are kept from the calls, the plans and the answers, and by moments.py from what a plan does not tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

from internal_properties.state_machines.accounts import Account
from internal_properties.state_machines.compare import require, require_at_most, require_cells
from internal_properties.state_machines.fake_model import sample, state_after, truth
from internal_properties.state_machines.moments import Moments
from scheduler import FREED, BatchPlan, Request, ScheduledTokens, check

VOCAB_SIZE = 4


class Books(Moments):
    """One scheduler, one fake model, and what the machine knows of both."""

    # --- a plan

    def require_plan(self, plan: BatchPlan, ran: Sequence[str], waits: Sequence[tuple[int, int]]) -> None:
        """`ran`: the requests that ran before it, in order; `waits`: the keys of those that it left waiting."""
        step = f"step {plan.step}"
        require(plan.step, self.steps, "its number", step)
        require_at_most(plan.num_tokens, self.config.max_num_batched_tokens, "tokens", step)
        require_at_most(len(plan.scheduled), self.config.max_num_seqs, "requests", step)
        if not plan.scheduled and any(not one.request.is_finished for one in self.live.values()):
            raise AssertionError(f"{step}: no progress: nothing is scheduled, but {list(self.live)} are unfinished")
        for account in self.accounts.values():
            account.awaits_moves = False
        running = self.scheduler.running
        owners = Counter(block for one in running for block in one.block_table)
        seen = Counter(block for entry in plan.scheduled for block in entry.block_table)
        counts = {entry.request_id: len(entry.token_ids) for entry in plan.scheduled}
        require(len(counts), len(plan.scheduled), "different requests", step)
        for entry in plan.scheduled:
            self._require_entry(entry, owners, seen)
        if not self.scheduler.policy.reserves:
            for one in running:
                needed = self.blocks_for(self.accounts[one.request_id].computed + counts.get(one.request_id, 0))
                require_at_most(len(one.block_table), needed, "blocks held", one.request_id)
        self._require_order(plan, ran, waits)

    def _require_entry(self, entry: ScheduledTokens, owners: Counter[int], seen: Counter[int]) -> None:
        account, size, name = self.accounts[entry.request_id], self.config.block_size, entry.request_id
        known = entry.stop - entry.num_drafts
        require(entry.start, account.computed, "start", name)
        require(entry.token_ids[: known - entry.start], tuple(account.tokens[entry.start : known]), "tokens", name)
        require(entry.start < known <= len(account.tokens), True, "tokens scheduled that are known:", name)
        require(entry.samples[:1] == (name,), known == len(account.tokens), "a token comes of it:", name)
        require(entry.block_table, account.request.block_table[: self.blocks_for(entry.stop)], "block table", name)
        require(len(entry.block_table), self.blocks_for(entry.stop), "blocks of the table", name)
        require(entry.first_logits, min(known, max(entry.start, account.first_logits)), "first logits", name)
        ends = range(entry.start // size + 1, entry.stop // size + 1) if self.config.prefix_caching else ()
        require(entry.checkpoints, tuple((end * size, entry.block_table[end - 1]) for end in ends), "checkpoints", name)
        self._require_windows(entry)
        for index in range(entry.start // size, len(entry.block_table)):
            block = entry.block_table[index]
            facts = (owners[block], seen[block], self.key_of.get(block))
            require(facts, (1, 1, None), "owners, users in this step and key", f"{name}: block {block}, to be written")

    def _require_windows(self, entry: ScheduledTokens) -> None:
        """Of windowed layers it holds every block that its rows see or write, and while none is reserved no other."""
        windows, size, name = self.windows, self.config.block_size, entry.request_id
        request = self.accounts[name].request
        if windows.pool is None:
            require((entry.window_table, request.window_table), ((), ()), "tables of windowed layers", name)
            return
        require(len(entry.window_table), len(entry.block_table), "blocks of the table of windowed layers", name)
        require(entry.window_table, request.window_table[: len(entry.window_table)], "table of windowed layers", name)
        positions = {*self.seen_before(entry.start), *range(entry.start, entry.stop)}
        needed = {position // size for position in positions}
        held = {index for index, block in enumerate(entry.window_table) if block != FREED}
        require(sorted(held), sorted(needed), "blocks held in windowed layers", name)
        for index in range(entry.start // size, len(entry.window_table)):
            block = entry.window_table[index]
            owners = sum(one.window_table.count(block) for one in self.scheduler.running)
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
            require(set(plan.admitted) <= {one.request_id for one in plan.scheduled}, True, "admitted to work:", step)
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
        hit = () if first.host_blocks else self.longest_prefix(account)
        start = account.computed if first.host_blocks else len(hit) * self.config.block_size
        most = self.config.max_num_batched_tokens  # what was left when admission was tried is not known
        needed = self.blocks_for(min(len(account.tokens), start + most)) - len(hit)
        free = set(scheduler.pool.free_order()) - set(hit)
        spare = int(self.config.watermark * self.config.num_blocks) if scheduler.running else 0
        if self.windows.pool is not None:  # enough in windowed layers, even if no block of a hit were there
            left_over = int(self.config.watermark * self.config.num_window_blocks) if scheduler.running else 0
            positions = {*self.seen_before(start), *range(start, min(len(account.tokens), start + most))}
            in_windows = len({position // self.config.block_size for position in positions})
            if self.windows.pool.num_free - left_over < in_windows:
                return
        require_at_most(len(free) - spare, needed - 1, f"blocks left while {first.request_id} waits", plan.step)

    # --- what comes of it

    def require_rows(self, plan: BatchPlan, rows: Mapping[str, list[int]]) -> None:
        """The logits of every row are the truth of the tokens before it, drafts included."""
        for entry in plan.scheduled:
            account = self.accounts[entry.request_id]
            sequence = [*account.tokens[: entry.stop - entry.num_drafts], *entry.drafts]
            found = rows[entry.request_id]
            require(len(found) > entry.num_drafts or not entry.samples, True, "has the rows it needs:", account.name)
            for position, row in enumerate(found, start=entry.first_logits):
                expected = truth(sequence[: position + 1], self.taps, self.config.sliding_window)
                require(row, expected, f"logits at {position}:", account.name)
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
                require(min(account.prompt_rows, wanted), wanted, "prompt positions with logits", account.name)
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
                    require(key in self.published, True, "each block that it filled is published:", account.name)
        self.steps += 1
        require({one.request_id for one in finished}, ended, "finished", f"step {plan.step}")
        self.endings.append({one.request_id: str(one.finish_reason) for one in finished})
        self.scheduled_tokens += plan.num_tokens
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
        require(request.token_ids, account.tokens, "tokens at its end", name)
        total = request.furthest_computed - account.inherited - account.skipped + request.num_recomputed_tokens
        require(account.kept, total, "kept scheduled tokens", name)
        if not account.preemptions and not account.withdrawn:
            require(account.kept, account.computed - account.inherited - account.cached, "tokens of one run", name)
        require(request.num_recomputed_tokens, account.recomputed, "recomputed tokens", name)
        require(request.num_cached_tokens, account.cached, "cached tokens", name)
        require(request.num_preemptions, account.preemptions, "preemptions", name)
        require(request.num_steps, account.steps, "steps", name)
        require(request.most_blocks, account.most_blocks, "most blocks", name)
        require(request.arrival, account.seed, "its number in the order of arrival", name)

    # --- between steps

    def require_memory(self) -> None:
        """Conservation; and every block, state and checkpoint that stands for something holds it."""
        check(self.scheduler)
        require(self.scheduler.requests.keys(), self.live.keys(), "unfinished requests", f"step {self.steps}")
        for account in self.live.values():
            require(account.request.token_ids, account.tokens, "tokens", account.name)
            if account.request.host_blocks:
                self._require_swapped(account)
            elif account.request not in self.scheduler.running:
                require(account.request.num_computed_tokens, 0, "computed tokens of one that waits:", account.name)
        for request in self.scheduler.running:
            self._require_running(self.accounts[request.request_id])
        require(self.scheduler.pool.block_of, self.published, "published blocks", f"step {self.steps}")
        for key, block in self.published.items():
            self._require_block(key, block)
        for key, block in self.windows.pool.block_of.items() if self.windows.pool else ():
            self._require_window_block(key, block)

    def _require_running(self, account: Account) -> None:
        request, stop = account.request, account.computed
        require(request.num_computed_tokens, stop, "computed tokens", account.name)
        decodes = stop == len(account.tokens) - 1 and account.num_outputs > 0
        require(request.is_decoding, decodes, "is decoding:", account.name)
        expected = list(enumerate(account.tokens[:stop]))
        assert request.slot is not None
        require(self.scheduler.awaits_moves(request), account.awaits_moves, "awaits moves:", account.name)
        if not account.awaits_moves:
            require(self.cache.states[request.slot], state_after(expected, self.taps), "live state", account.name)
        elif self.scheduler.policy.reserves:
            expected = expected[: stop - stop % self.config.block_size]  # the rest is yet to be copied
        require_cells(self.cache.read(request.block_table, len(expected)), expected, "its blocks", account.name)
        if self.windows.pool is not None:
            freed = request.window_table.count(FREED) * self.config.block_size
            held = self.cache.read_windows(request.window_table, len(expected))
            require_cells(held, expected[freed:], "its blocks of windowed layers", account.name)

    def _require_swapped(self, account: Account) -> None:
        host = account.request.host_blocks
        expected = list(enumerate(account.tokens[: account.computed]))
        found = [cell for block in host for cell in self.cache.host_blocks[block]][: account.computed]
        require_cells(found, expected, "its host blocks", account.name)
        if self.windows.pool is not None:
            found = [cell for block in host for cell in self.cache.host_window_blocks[block]]
            for position in self.seen_before(account.computed):
                require(found[position], expected[position], f"position {position} in windowed layers", account.name)
        require(self.cache.host_states[host[-1]], state_after(expected, self.taps), "state on the host", account.name)

    def require_all_free(self) -> None:
        scheduler = self.scheduler
        require(
            asdict(scheduler.prefix_cache.statistics), self.statistics, "statistics of the prefix cache", "at the end"
        )
        require(scheduler.pool.num_free, self.config.num_blocks, "free blocks", "at the end")
        windows = scheduler.memory.windows.pool
        require(
            windows.num_free if windows else 0, self.config.num_window_blocks, "free in windowed layers", "at the end"
        )
        require(sorted(scheduler.memory.free_slots), list(range(self.config.max_num_seqs)), "free slots", "at the end")
        require((len(scheduler.waiting), scheduler.running), (0, []), "waiting and running", "at the end")
        preemptions = sum(account.preemptions for account in self.accounts.values())
        require(scheduler.num_preemptions, preemptions, "preemptions", "at the end")
        host_pool = scheduler.memory.host_pool
        require(host_pool.num_free if host_pool else 0, self.config.num_host_blocks, "free host blocks", "at the end")
