"""The moments that a plan does not tell of: calls inside the scheduler are listened to, and held against the books.

A block is handed out, or published; a request enters, grows, is split off, or swapped out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from internal_properties.state_machines.accounts import Account, Prefix
from internal_properties.state_machines.compare import require, require_cells
from internal_properties.state_machines.fake_model import FakeModel, make_cache, state_after
from scheduler import Move, Request, Scheduler, SchedulerConfig
from scheduler.prefix_cache import block_key

ENDINGS = ("complete", "too short", "unknown", "evicted", "window", "disabled")  # why a prefix hit ended
PATIENCE = 1000  # steps of waiting that one level of priority is worth: see scheduler.policy


class Moments:
    """One scheduler, one fake model, the books of both, and what is required at each moment."""

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
        self.endings: list[dict[str, str]] = []  # by step that was completed
        self.scheduled_tokens = 0  # of those
        self.preempted = 0  # by plans
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
        self._grow, self._grow_from_unused = memory.grow, memory.grow_from_unused
        self.windows = memory.windows
        if self.windows.pool is not None:
            self._publish_in_windows = self.windows.pool.publish
            self.windows.pool.publish = self._on_publish_in_windows  # type: ignore[method-assign]
        pool.allocate = self._on_allocate  # type: ignore[method-assign]
        pool.publish = self._on_publish  # type: ignore[method-assign]
        memory.enter = self._on_enter  # type: ignore[method-assign]
        memory.split = self._on_split  # type: ignore[method-assign]
        memory.swap_out = self._on_swap_out  # type: ignore[method-assign]
        memory.grow = self._on_grow  # type: ignore[method-assign]
        memory.grow_from_unused = self._on_grow_from_unused  # type: ignore[method-assign]

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

    def _on_allocate(self) -> tuple[int, bytes | None]:
        block, evicted = self._allocate()
        expected = self.key_of.pop(block, None)
        if expected is not None:
            del self.published[expected]
            self._evicted[expected] = None
            if len(self._evicted) > self.config.num_blocks:
                del self._evicted[next(iter(self._evicted))]
        require(evicted, expected, "evicted key", f"block {block}")
        return block, evicted

    def _on_publish(self, block: int, key: bytes) -> bool:
        """After the write, and only what was written."""
        if not self._may_publish:
            raise AssertionError(f"block {block}: published before update()")
        self._require_block(key, block)
        done = self._publish(block, key)
        require(done, key not in self.published, "publish()", f"block {block}")
        if done:
            self.published[key], self.key_of[block] = block, key
            self._evicted.pop(key, None)
        return done

    def _on_publish_in_windows(self, block: int, key: bytes) -> bool:
        if not self._may_publish:
            raise AssertionError(f"block {block} of windowed layers: published before update()")
        self._require_window_block(key, block)
        return self._publish_in_windows(block, key)

    def _on_enter(self, request: Request, hit: tuple[int, ...], needed: int, moves: list[Move]) -> None:
        account = self.accounts[request.request_id]
        if not request.host_blocks:
            require(hit, self.longest_prefix(account), "blocks of the prefix hit", account.name)
            account.computed = len(hit) * self.config.block_size
            account.cached += account.computed
            self._count(account)
        self._enter(request, hit, needed, moves)
        self._note_blocks(request)

    def _on_grow(self, request: Request, count: int, moves: list[Move]) -> bool:
        done = self._grow(request, count, moves)
        self._note_blocks(request)
        return done

    def _on_grow_from_unused(self, request: Request, stop: int) -> int:
        reached = self._grow_from_unused(request, stop)
        self._note_blocks(request)
        return reached

    def _note_blocks(self, request: Request) -> None:
        account = self.accounts[request.request_id]
        account.most_blocks = max(account.most_blocks, len(request.block_table))

    def _count(self, account: Account) -> None:
        """One more admission in the statistics of the prefix cache."""
        found, most = account.computed // self.config.block_size, account.first_logits // self.config.block_size
        reason = "complete" if most else "too short"
        if not self.config.prefix_caching:
            reason = "disabled"
        elif found < most:
            reason = "evicted" if self.keys(account, most)[found] in self._evicted else "unknown"
        if self.config.prefix_caching and found < len(self._published_prefix(account)):
            reason = "window"
        self.statistics["queries"] += 1
        self.statistics["query_tokens"] += len(account.tokens)
        self.statistics["hit_tokens"] += account.computed
        self.statistics["ended"][reason] += 1

    def _on_split(self, parent: Request, child: Request, reserves: bool, moves: list[Move]) -> bool:
        """It shares whenever there is a slot, and, where blocks are reserved, room for all that it will need."""
        computed, memory = self.accounts[parent.request_id].computed, self.scheduler.memory
        own = self.blocks_for(child.most_computed_tokens) - computed // self.config.block_size if reserves else 0
        room = bool(memory.free_slots) and own <= memory.pool.num_free
        room = room and (self.windows.pool is None or own <= self.windows.pool.num_free)
        done = self._split(parent, child, reserves, moves)
        require(done, room and parent in self.scheduler.running, "shares:", child.request_id)
        if done:
            account = self.accounts[child.request_id]
            account.computed = account.furthest = account.inherited = computed
            account.awaits_moves = True
            held = self.blocks_for(child.most_computed_tokens if reserves else computed)
            require(len(child.block_table), held, "blocks", child.request_id)
            self._note_blocks(child)
        return done

    def _on_swap_out(self, request: Request, moves: list[Move]) -> bool:
        """It goes to the host whenever something is computed and there is room for all of it."""
        host = self.scheduler.memory.host_pool
        room = host.num_free if host else 0
        done = self._swap_out(request, moves)
        used = self.blocks_for(request.num_computed_tokens)
        require(done, 0 < used <= room, "is swapped out:", request.request_id)
        require(len(request.host_blocks), used if done else 0, "host blocks", request.request_id)
        return done

    def longest_prefix(self, account: Account) -> tuple[int, ...]:
        """The published blocks that a request entering now can use: of the longest of which windowed layers still have
        whatever position the next row sees."""
        blocks, size = self._published_prefix(account), self.config.block_size
        if self.windows.pool is None:
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
            require((salt, tokens), (known.salt, known.tokens), "same key for other tokens", account.name)

    def _require_window_block(self, key: bytes, block: int) -> None:
        if key not in self.prefixes:
            raise AssertionError(f"block {block} of windowed layers: published under a key of no computed full block")
        prefix = self.prefixes[key]
        where = f"block {block} of windowed layers, published for {prefix.tokens}"
        require_cells(self.cache.window_blocks[block], prefix.cells, "content", where)

    def _require_block(self, key: bytes, block: int) -> None:
        if key not in self.prefixes:
            raise AssertionError(f"block {block}: published under a key that no computed full block has")
        prefix = self.prefixes[key]
        if self.cache.blocks[block] != prefix.cells or self.cache.checkpoints[block] != prefix.checkpoint:
            where = f"block {block}, published for {prefix.tokens}"
            require_cells(self.cache.blocks[block], prefix.cells, "content", where)
            require(self.cache.checkpoints[block], prefix.checkpoint, "checkpoint", where)
