"""The block pool, call by call; and what requests hold, read off the memory."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st

from internal_properties.internal import internal, require
from scheduler import BlockPool, Move, Request, Scheduler, SchedulerConfig
from scheduler.memory import Memory
from scheduler.plan import MoveKind

KEYS = (b"a", b"b", b"c")
CALLS = ("allocate", "allocate_unused", "share", "release", "release_table", "publish", "publish")


@internal(
    "pool-is-a-list",
    "Blocks are handed out in the order of a list: what is given back goes to its front, what is cached behind it.",
    5,
    lambda: st.tuples(
        st.integers(1, 5), st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 4), st.sampled_from(KEYS)))
    ),
    weight=20.0,
)
def pool_is_a_list(example: tuple[int, list[tuple[str, int, bytes]]]) -> None:
    """Each call that may be made, on the pool and on a list and two dictionaries; others: wrong_calls.py."""
    num_blocks, calls = example
    pool, owners, keys, twins = BlockPool(num_blocks), Counter[int](), dict[int, bytes](), dict[int, bytes]()
    order, evictions = list(range(num_blocks)), 0  # of those that no one owns, the next to be handed out first
    for call, number, key in calls:
        owned = sorted(owners.elements())
        block = owned[number % len(owned)] if owned else -1
        arguments: tuple[object, ...] = ()
        expected: object = None
        if call.startswith("allocate"):
            if call == "allocate_unused" and (not order or order[0] in keys):
                require(pool.allocate_unused(), None, "block without a key", order)
                continue
            if not order:
                continue
            owners[order[0]] = 1
            evicted = keys.pop(order[0], None)
            evictions += evicted is not None
            if heir := [twin for twin, key in twins.items() if key == evicted][:1]:
                keys[heir[0]] = twins.pop(heir[0])
                evicted = None
            expected = order.pop(0) if call == "allocate_unused" else (order.pop(0), evicted)
        elif call == "share" and (known := sorted({*owned, *keys})):
            block = known[number % len(known)]
            arguments = (block,)
            order = [other for other in order if other != block]
            owners[block] += 1
        elif call.startswith("release") and owned:
            table = (block,) if call == "release" else tuple(owners)
            arguments = (block if call == "release" else table,)
            for each in reversed(table):
                owners[each] -= 1
                if not owners[each]:
                    del owners[each]
                    twins.pop(each, None)
                    order.insert(len(order) if each in keys else 0, each)
        elif call == "publish" and owned and block not in {*keys, *twins}:
            arguments, expected = (block, key), key not in keys.values()
            (keys if expected else twins)[block] = key
        else:
            continue
        require(getattr(pool, call)(*arguments), expected, f"{call}{arguments}", example)
        require(pool.free_order(), order, "free order", example)
        require((pool.num_free, pool.evictions), (len(order), evictions), "free, and evictions", example)
        blocks = range(num_blocks)
        require(pool.references, [owners[each] for each in blocks], "references", example)
        require(pool.key_of, [keys.get(each) for each in blocks], "keys", example)
        require(pool.block_of, {key: each for each, key in keys.items()}, "blocks of keys", example)
        require([pool.is_shared(each) for each in blocks], [owners[each] > 1 for each in blocks], "shared", example)


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
    "moves-are-awaited",
    "Exactly those that were split off since the last step wait for their state, whatever block is copied.",
    7,
    lambda: st.tuples(st.integers(1, 4), st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 8)),
    weight=10.0,
)
def moves_are_awaited(example: tuple[int, list[int], int]) -> None:
    """A first request has left blocks 0 to 11; the copy goes to the one that is next, whose number may be a slot's."""
    size, prompts, skipped = example
    subject = Scheduler(SchedulerConfig(num_blocks=60, block_size=size, policy="static", prefix_caching=False))
    subject.add(Request("first", (0,) * (12 * size), 1))
    for index, length in enumerate(prompts):
        subject.add(Request(str(index), (index,) * length, 3))
    plan = subject.schedule()
    subject.update(plan, {name: [9] for entry in plan.scheduled for name in entry.samples})
    while subject.pool.num_free > 12 - skipped:
        subject.pool.allocate()
    require(subject.fork("0", Request("child", (0,) * prompts[0], 3)), True, "shares:", f"child, {example}")
    for request in subject.running:
        awaits = subject.awaits_moves(request)
        require(awaits, request.request_id == "child", "awaits moves:", f"{request.request_id}, {example}")
