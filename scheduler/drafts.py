"""Drafts fill what a planned step leaves over.

A draft is a guess at a token that is not known yet. It gets a token of the budget, and a block, only if nothing else
wants it: no request gets less, none is preempted, no cached block is evicted for a guess. So when all drafts are
rejected, the next plan is, block for block, the one that would have been made without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from scheduler.config import SchedulerConfig
from scheduler.errors import PlanError
from scheduler.memory import Memory
from scheduler.plan import BatchPlan, ScheduledTokens
from scheduler.request import Request


def with_drafts(
    plan: BatchPlan,
    drafts: Mapping[str, Sequence[int]],
    requests: Mapping[str, Request],
    memory: Memory,
    config: SchedulerConfig,
) -> BatchPlan:
    """The plan with as many of the drafts, by request id, as fit; its order is the order of service.

    PlanError for drafts of a request that samples nothing in this step, or whose samples are yet to be split off.
    """
    takers = {entry.request_id for entry in plan.scheduled if entry.samples == (entry.request_id,)}
    for name in drafts:
        if name not in takers:
            raise PlanError(f"step {plan.step}: drafts for {name!r}, which can't take any")
    budget = config.max_num_batched_tokens - plan.num_tokens
    entries = []
    for entry in plan.scheduled:
        request = requests[entry.request_id]
        fitting = min(len(drafts.get(entry.request_id, ())), budget, most_drafts(request))
        if fitting > 0 and not request.is_finished:
            entry = _extend(entry, tuple(drafts[entry.request_id][:fitting]), request, memory, config)
            budget -= entry.num_drafts
        entries.append(entry)
    return replace(plan, scheduled=tuple(entries))


def most_drafts(request: Request) -> int:
    """How many make sense: one token comes without any, and the last one needs no place in the cache."""
    return request.max_tokens - request.num_output_tokens - 1


def _extend(
    entry: ScheduledTokens, drafts: tuple[int, ...], request: Request, memory: Memory, config: SchedulerConfig
) -> ScheduledTokens:
    size = config.block_size
    stop = memory.grow_from_unused(request, entry.stop + len(drafts))
    table, windows = (table[: memory.blocks_for(stop)] for table in request.tables)
    ends = range(entry.stop // size + 1, stop // size + 1) if config.prefix_caching else ()
    return replace(
        entry,
        token_ids=entry.token_ids + drafts[: stop - entry.stop],
        num_drafts=stop - entry.stop,
        block_table=table,
        window_table=windows,
        checkpoints=entry.checkpoints + tuple((end * size, table[end - 1]) for end in ends),
    )
