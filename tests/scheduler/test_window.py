"""Blocks of layers with a window: `can_grow` says yes just where `grow` finds the blocks that it takes."""

from __future__ import annotations

import pytest

from scheduler import PoolError, Request, SchedulerConfig
from scheduler.groups import Group, groups_of
from scheduler.plan import Move


def windows_with(num_free: int, is_shared: bool) -> tuple[Group, Request]:
    """A request that has computed 5 tokens, in blocks of 4; another may own its second block, too."""
    config = SchedulerConfig(num_blocks=9, block_size=4, sliding_window=8, num_window_blocks=2 + num_free)
    blocks = groups_of(config)[1]
    request = Request("a", (1, 2, 3, 4, 5), 9)
    request.num_computed_tokens = 5
    request.tables[1] = (blocks.pool.allocate()[0], blocks.pool.allocate()[0])
    if is_shared:
        blocks.pool.share(request.tables[1][1])
    return blocks, request


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("num_free", range(4))
@pytest.mark.parametrize("stop", [6, 8, 9, 13])
def test_a_request_can_grow_just_where_growing_succeeds(stop: int, num_free: int, is_shared: bool) -> None:
    blocks, request = windows_with(num_free, is_shared)
    shared = request.tables[1][1]
    needed = -(-stop // 4) - 2 + is_shared  # new blocks, and a copy
    moves: list[Move] = []
    assert blocks.can_grow(request, stop) == (needed <= num_free)
    if needed > num_free:
        with pytest.raises(PoolError, match="no block is free"):
            blocks.grow(request, stop, moves)
        return
    blocks.grow(request, stop, moves)
    assert (len(request.tables[1]), blocks.pool.num_free) == (-(-stop // 4), num_free - needed)
    assert [(move.source, move.destination) for move in moves] == [(shared, request.tables[1][1])] * is_shared
    blocks.pool.require_writable(request.tables[1][1])
