"""The moments that a plan does not tell of: calls inside the scheduler are listened to, and held against the books.

A block is handed out, or published; a request enters, grows, or is split off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import scheduler
from internal_properties.state_machines.accounts import Account
from internal_properties.state_machines.compare import require, require_cells
from internal_properties.state_machines.pool_books import PoolBooks
from lfm2np.suite.schedulers.demands import Demands
from lfm2np.suite.schedulers.own import OwnScheduler
from scheduler import Move
from scheduler.prefix_cache import block_key
from scheduler.protocol import Request

ENDINGS = ("complete", "too short", "unknown", "evicted", "window", "disabled")  # why a prefix hit ended
PATIENCE = 1000  # steps of waiting that one level of priority is worth: see scheduler.policy


class Moments(OwnScheduler):
    """The scheduler behind its adapter, its books, and what is required at each moment."""

    demands: Demands  # of the run: names of prefixes, and the memory that the steps describe

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__(sizes, watermark=sizes.get("watermark", 0.01))
        self.policies = set()  # whatever is promised, the books require
        self.accounts: dict[str, Account] = {}  # all that ever came
        self.live: dict[str, Account] = {}  # those not finished
        self.prefixes: dict[bytes, list[int]] = {}  # key of a full block that was computed -> names in its cells
        self.steps = 0
        self.statistics: dict[str, Any] = {
            "queries": 0,
            "query_tokens": 0,
            "hit_tokens": 0,
            "ended": dict.fromkeys(ENDINGS, 0),
        }
        self._evicted: dict[bytes, None] = {}  # the latest, at most one a block
        self._may_publish = False
        memory = self.scheduler.memory
        self.windows = memory.groups[1] if memory.groups[1:] else None
        self.pool_books = PoolBooks(memory.pool, "pool", self._on_publish, self._on_evict)
        self.all_pool_books = [self.pool_books]
        if self.windows is not None:
            self.all_pool_books.append(PoolBooks(self.windows.pool, "pool of windowed layers", self._on_window_publish))
        self._enter, self._split = memory.enter, memory.split
        self._grow, self._grow_from_unused = memory.grow, memory.grow_from_unused
        for name in ("enter", "split", "grow", "grow_from_unused"):
            setattr(memory, name, getattr(self, f"_on_{name}"))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def open(self, request: Request, subject: scheduler.Request, tokens: Sequence[int]) -> Account:
        """The books of a request that has just come."""
        arrival = len(self.accounts)
        by_priority = self.config.policy == "priority"
        key = (self.steps + subject.priority * PATIENCE, arrival) if by_priority else (arrival, 0)
        account = Account(request, arrival, list(tokens), self.demands.names, subject=subject, key=key)
        account.min_tokens = subject.min_tokens
        self.accounts[subject.request_id] = self.live[subject.request_id] = account
        return account

    def _on_evict(self, block: int, key: bytes) -> None:
        self._evicted[key] = None
        if len(self._evicted) > self.config.num_blocks:
            del self._evicted[next(iter(self._evicted))]

    def _on_publish(self, block: int, key: bytes) -> None:
        """After the write, and only what was written."""
        if not self._may_publish:
            raise AssertionError(f"block {block}: published before update()")
        self._require_block("block", block, key)
        if key not in self.pool_books.block_of:
            self._evicted.pop(key, None)

    def _on_window_publish(self, block: int, key: bytes) -> None:
        if not self._may_publish:
            raise AssertionError(f"block {block} of windowed layers: published before update()")
        self._require_block("window block", block, key)

    def _on_enter(
        self, request: scheduler.Request, keys: list[bytes], stop: int, moves: list[Move], above_watermark: bool
    ) -> bool:
        account = self.accounts[request.request_id]
        hit, longest = tuple(self.pool_books.block_of[key] for key in keys), self.longest_prefix(account)
        # Counted before: to enter may evict what tells why the hit ends.
        computed, account.computed = account.computed, len(hit) * self.config.block_size
        statistics = {**self.statistics, "ended": {**self.statistics["ended"]}}
        self._count(account)
        if not self._enter(request, keys, stop, moves, above_watermark):
            account.computed, self.statistics = computed, statistics
            return False
        require(hit, longest, "blocks of the prefix hit", account.name)
        account.cached += account.computed
        self._note_blocks(request)
        return True

    def _on_grow(self, request: scheduler.Request, count: int, moves: list[Move]) -> bool:
        done = self._grow(request, count, moves)
        self._note_blocks(request)
        return done

    def _on_grow_from_unused(self, request: scheduler.Request, stop: int) -> int:
        reached = self._grow_from_unused(request, stop)
        self._note_blocks(request)
        return reached

    def _note_blocks(self, request: scheduler.Request) -> None:
        account = self.accounts[request.request_id]
        account.most_blocks = max(account.most_blocks, len(request.tables[0]))

    def _count(self, account: Account) -> None:
        """One more admission in the statistics of the prefix cache."""
        hits, most = account.computed // self.config.block_size, account.first_logits // self.config.block_size
        reason = "complete" if most else "too short"
        if not self.config.prefix_caching:
            reason = "disabled"
        elif hits < most:
            reason = "evicted" if self.keys(account, most)[hits] in self._evicted else "unknown"
        if self.config.prefix_caching and hits < len(self._published_prefix(account)):
            reason = "window"
        self.statistics["queries"] += 1
        self.statistics["query_tokens"] += len(account.tokens)
        self.statistics["hit_tokens"] += account.computed
        self.statistics["ended"][reason] += 1

    def _on_split(self, parent: scheduler.Request, child: scheduler.Request, moves: list[Move]) -> bool:
        """It shares whenever there is a slot, and, where blocks are reserved, room for all that it will need."""
        computed, memory = self.accounts[parent.request_id].computed, self.scheduler.memory
        reserves = memory.reserves
        needed = self.blocks_for(child.most_computed_tokens) - computed // self.config.block_size if reserves else 0
        room = bool(memory.free_slots) and needed <= memory.pool.num_free
        room = room and (self.windows is None or needed <= self.windows.pool.num_free)
        done = self._split(parent, child, moves)
        require(done, room and parent in self.scheduler.running, "shares:", child.request_id)
        if done:
            account = self.accounts[child.request_id]
            account.computed = account.furthest = account.inherited = computed
            account.awaits_moves = True
            held = self.blocks_for(child.most_computed_tokens if reserves else computed)
            require(len(child.tables[0]), held, "blocks", child.request_id)
            self._note_blocks(child)
        return done

    def longest_prefix(self, account: Account) -> tuple[int, ...]:
        """The published blocks that a request entering now can use: of the longest of which windowed layers still have
        whatever position the next row sees."""
        blocks, size = self._published_prefix(account), self.config.block_size
        if self.windows is None:
            return blocks
        cached = {
            index for index, key in enumerate(self.keys(account, len(blocks))) if key in self.windows.pool.block_of
        }
        for count in range(len(blocks), 0, -1):
            seen = {position // size for position in self.seen_before(count * size)}
            if seen <= cached:
                return blocks[:count]
        return ()

    def seen_before(self, num_computed: int) -> range:
        """The computed positions that the next row sees in windowed layers."""
        assert self.config.sliding_window is not None
        return range(max(0, num_computed + 1 - self.config.sliding_window), num_computed)

    def most_in_windows(self, num_tokens: int) -> int:
        """The most blocks of windowed layers that a request of that many positions can need at once."""
        size = self.config.block_size
        step = num_tokens if self.scheduler.policy.reserves else self.config.max_num_batched_tokens
        needed = [0]
        for start in range(num_tokens if self.config.sliding_window else 0):
            positions = {*self.seen_before(start), *range(start, min(num_tokens, start + step))}
            needed.append(len({position // size for position in positions}))
        return max(needed)

    def _published_prefix(self, account: Account) -> tuple[int, ...]:
        """The published blocks from the first on: full ones before the first logits that it wants."""
        blocks: list[int] = []
        most = account.first_logits // self.config.block_size if self.config.prefix_caching else 0
        for key in self.keys(account, most):
            if key not in self.pool_books.block_of:
                break
            blocks.append(self.pool_books.block_of[key])
        return tuple(blocks)

    def keys(self, account: Account, count: int) -> list[bytes]:
        """The keys of a request's first blocks, recomputed; each now stands for these tokens and no others."""
        size, known, salt = self.config.block_size, account.block_keys, account.subject.cache_salt
        while len(known) < count:
            stop = (len(known) + 1) * size
            known.append(block_key(known[-1] if known else b"", account.tokens[stop - size : stop], salt))
        return known[:count]

    def _note_computed(self, account: Account) -> None:
        """Every full block that is computed may be published."""
        size = self.config.block_size
        for index, key in enumerate(self.keys(account, account.computed // size)):
            names = [account.prefix(position) for position in range(index * size, (index + 1) * size)]
            require(self.prefixes.setdefault(key, names), names, "same key for other tokens", account.name)

    def _require_block(self, kind: str, block: int, key: bytes) -> None:
        """It holds what its key stands for; blocks of all layers have a checkpoint, too."""
        if key not in self.prefixes:
            raise AssertionError(f"{kind} {block}: published under a key that no computed full block has")
        names = self.prefixes[key]
        require_cells(self.cells(kind, [block]), names, "content", f"{kind} {block}, which is published")
        if kind == "block":
            require(self.state("checkpoint", block), names[-1], "checkpoint", f"{kind} {block}, which is published")

    # --- what stands in memory: names of prefixes

    def cells(self, kind: str, table: Sequence[int]) -> list[int | None]:
        blocks, empty = self.demands.memory.blocks, [None] * self.config.block_size
        written = [cell for block in table for cell in blocks.get((kind, block), empty)]
        return [None if cell is None else cell.prefix for cell in written]

    def state(self, kind: str, number: int) -> int | None:
        written = self.demands.memory.states.get((kind, number))
        return None if written is None else written.prefix
