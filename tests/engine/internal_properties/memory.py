"""What requests hold, read off the memory: who fits, who grows, which evicted keys are remembered."""

from __future__ import annotations

from hypothesis import strategies as st

from internal_properties.internal import internal
from internal_properties.state_machines.compare import require
from scheduler import Move, Request, Scheduler, SchedulerConfig
from scheduler.memory import Memory
from scheduler.plan import MoveKind


@internal(
    "whole-batches-are-counted",
    "Requests fit together exactly if their blocks do, and their tokens unless one is alone.",
    7,
    lambda: st.tuples(
        st.integers(1, 3),
        st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=4),
        st.integers(1, 12),
        st.integers(0, 30),
    ),
    weight=20.0,
)
def fit_is_counted(example: tuple[int, list[tuple[int, int]], int, int]) -> None:
    """Whole requests, counted at once: blocks for all of it, and a place among the tokens unless it is alone."""
    size, wishes, most_tokens, free = example
    memory = Memory(SchedulerConfig(num_blocks=4, block_size=size), reserves=False)
    requests = [Request(str(index), (1,) * prompt, most) for index, (prompt, most) in enumerate(wishes)]
    blocks = sum(-(-(prompt + most - 1) // size) for prompt, most in wishes)
    tokens = sum(prompt for prompt, _ in wishes)
    expected = blocks <= free and (len(wishes) < 2 or tokens <= most_tokens)
    require(memory.fit_together(requests, most_tokens, free), expected, "fit together:", f"{wishes}")


@internal(
    "growth-is-counted",
    "A request grows exactly if the blocks that it needs are free, the copy of a shared one included.",
    7,
    lambda: st.tuples(*(st.integers(*ends) for ends in ((1, 4), (1, 8), (1, 8), (0, 1), (0, 6), (0, 1)))),
    weight=20.0,
)
def growth_is_counted(example: tuple[int, int, int, int, int, int]) -> None:
    """Blocks for the tokens to come, and one more for the copy of a half-filled one that others share; in the group of
    full attention and in that of windowed layers, of which one is short of blocks."""
    size, computed, count, is_shared, free, short = example
    config = SchedulerConfig(num_blocks=24, block_size=size, sliding_window=99, num_window_blocks=24)
    memory = Memory(config, reserves=False)
    request = Request("a", (1,) * (computed + 1), 9)
    request.num_computed_tokens = computed
    for group in memory.groups:
        request.tables[group.index] = tuple(group.allocate(-(-computed // size)))
    pool, table = memory.groups[short].pool, request.tables[short]
    for block in table if is_shared else ():
        pool.share(block)
    while pool.num_free > free:
        pool.allocate()
    copies = bool(is_shared and computed % size)
    more = -(-(computed + count) // size) - len(table)
    moves: list[Move] = []
    done = memory.grow(request, count, moves)
    require(done, more + copies <= free, "grows:", f"{example}")
    grown = request.tables[short]
    require(pool.num_free, free - (more + copies if done else 0), "free blocks", f"{example}")
    require(len(grown), len(table) + (more if done else 0), "blocks", f"{example}")
    kept = len(table) - (copies and done)
    require(grown[:kept], table[:kept], "blocks that stay", f"{example}")
    kind: MoveKind = "copy_window_block" if short else "copy_block"
    copied = [Move(kind, table[-1], grown[len(table) - 1])] if copies and done else []
    require(moves, copied, "moves", f"{example}")


@internal(
    "drafts-are-counted",
    "A plan takes as many drafts as free blocks hold in which nothing is cached, from the first on.",
    7,
    lambda: st.tuples(*(st.integers(*ends) for ends in ((1, 4), (0, 3), (1, 8), (1, 16), (0, 2)))),
    weight=3.0,
)
def drafts_are_counted(example: tuple[int, int, int, int, int]) -> None:
    """Of the free blocks, the last `cached` ones hold a cached prefix."""
    size, free, prompt, wanted, cached = example
    subject = Scheduler(SchedulerConfig(num_blocks=40, block_size=size, prefix_caching=False))
    subject.add(Request("a", (1,) * prompt, 40 - prompt))
    subject.update(subject.schedule(), {"a": [2]})
    plan = subject.schedule()
    taken = [subject.pool.allocate()[0] for _ in range(subject.pool.num_free)]
    for number, block in enumerate(taken[: free + cached]):
        if number < cached:
            subject.pool.publish(block, bytes([number]))
        subject.pool.release(block)
    drafts = tuple(range(3, 3 + wanted))
    (entry,) = subject.add_drafts(plan, {"a": drafts}).scheduled
    in_last_block = -(prompt + 1) % size
    fitting = drafts[: in_last_block + free * size]
    require(entry.token_ids, (2, *fitting), "tokens", f"{example}")
    require(entry.num_drafts, len(fitting), "drafts", f"{example}")
    require(len(entry.block_table), -(-entry.stop // size), "blocks", f"{example}")


@internal(
    "evictions-are-remembered",
    "Of the keys that were evicted, the latest are known, as many as there are blocks.",
    7,
    lambda: st.tuples(st.integers(1, 6), st.integers(1, 20)),
)
def evictions_are_remembered(example: tuple[int, int]) -> None:
    """Why a prefix is not found: the last evicted keys, one a block of the pool, are told from those never seen."""
    num_blocks, count = example
    subject = Scheduler(SchedulerConfig(num_blocks=num_blocks, block_size=1, watermark=0.0))
    for token in range(count):
        subject.add(Request(str(token), (token,), 1))
        subject.update(subject.schedule(), {str(token): [0]})
    expected = []
    for token in range(count):
        newer = count - 1 - token
        reason = "complete" if newer < num_blocks else "evicted" if newer < 2 * num_blocks else "unknown"
        expected.append(reason)
    actual = [subject.prefix_cache.find(Request("new", (token, 0), 1))[1] for token in range(count)]
    require(actual, expected, "why prefix hits end", f"{num_blocks} blocks")


@internal(
    "hits-are-counted",
    "A request enters exactly if what it needs beside cached blocks is free.",
    7,
    lambda: st.tuples(
        st.sampled_from(("fcfs", "waiting-served", "static")),
        st.integers(1, 4),
        st.integers(1, 12),
        st.booleans(),
        st.integers(-2, 2),
    ),
    weight=10.0,
)
def hits_are_counted(example: tuple[str, int, int, bool, int]) -> None:
    """A request enters if what no cached block gives it fits into what is free without those blocks.

    The blocks are a running request's, or free and kept; the policy asks for the prompt's, or for the whole length's.
    """
    policy, size, prompt, is_running, spare = example
    config = SchedulerConfig(
        num_blocks=24,
        block_size=size,
        policy=policy,
        watermark=0.0,
        waiting_served_ratio=1.0,
        max_num_batched_tokens=64,
    )
    subject = Scheduler(config)
    ids = tuple(range(prompt))
    subject.add(Request("first", ids, 9))
    subject.update(subject.schedule(), {"first": [7]})
    if not is_running:
        subject.abort("first")
    hits = (prompt - 1) // size
    tokens = prompt + 3 if subject.policy.reserves else prompt
    needed = -(-tokens // size) - hits
    cached = 0 if is_running else prompt // size  # free blocks that hold something
    while subject.pool.num_free > max(cached, needed + spare + (0 if is_running else hits)):
        subject.pool.allocate()
    free = subject.pool.num_free - (0 if is_running else hits)
    if is_running and policy == "fcfs":
        free -= -(-(prompt + 1) // size) - -(-prompt // size)  # for its own next token; none left: it is preempted
    subject.add(Request("second", ids, 4))
    admitted = 0 <= free >= needed and not (is_running and policy == "static")
    require(subject.schedule().admitted, ("second",) if admitted else (), "admitted", f"{example}")


@internal(
    "moves-are-awaited",
    "Exactly those that were split off since the last step wait for their state.",
    7,
    lambda: st.tuples(
        st.sampled_from(("fcfs", "waiting-served", "static")),
        st.integers(1, 4),
        st.lists(st.integers(1, 6), min_size=1, max_size=5),
        st.integers(0, 4),
        st.integers(0, 8),
    ),
    weight=10.0,
)
def moves_are_awaited(example: tuple[str, int, list[int], int, int]) -> None:
    """Who was split off since the last step waits for its state, and nobody else, whatever block is copied.

    A first request has left blocks 0 to 11; the copy goes to the one that is next, whose number may be a slot's.
    """
    policy, size, prompts, which, skipped = example
    subject = Scheduler(SchedulerConfig(num_blocks=60, block_size=size, policy=policy, prefix_caching=False))
    subject.add(Request("first", (0,) * (12 * size), 1))
    for index, length in enumerate(prompts):
        subject.add(Request(str(index), (index,) * length, 3, cache_salt="xy"))
    plan = subject.schedule()
    subject.update(plan, {name: [9] for entry in plan.scheduled for name in entry.samples})
    while subject.pool.num_free > 12 - skipped:
        subject.pool.allocate()
    parent = subject.running[which % len(subject.running)]
    salt = "".join(("x", "y"))  # equal, but another object
    shares = subject.fork(parent.request_id, Request("child", parent.prompt_token_ids, 3, cache_salt=salt))
    require(shares, True, "shares:", f"child, {example}")
    for request in subject.running:
        awaits = subject.awaits_moves(request)
        require(awaits, request.request_id == "child", "awaits moves:", f"{request.request_id}, {example}")
