"""Plans of a run in which everything happens that a step's time may depend on."""

from __future__ import annotations

import io
from functools import cache

from scheduler import BatchPlan, Request, Scheduler, SchedulerConfig, TraceWriter


@cache
def planned_run() -> tuple[list[BatchPlan], str]:
    """Plans of a small pool with chunks, hits, forks and drafts; and their trace, step n taking n seconds."""
    config = SchedulerConfig(num_blocks=14, block_size=4, max_num_seqs=5, max_num_batched_tokens=12)
    scheduler, plans, file = Scheduler(config), [], io.StringIO()
    trace = TraceWriter(file, config)
    for index in range(8):
        request = Request(str(index), tuple(range(3 + 4 * (index % 5))), max_tokens=20, prompt_logits=index == 3)
        forks = [Request("fork", request.prompt_token_ids, max_tokens=9)] if index == 1 else []
        scheduler.add(request, forks)
        trace.add(request, forks)
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        offered = {entry.request_id: (7, 7, 7) for entry in plan.scheduled if entry.samples == (entry.request_id,)}
        plan = scheduler.add_drafts(plan, offered)
        tokens = {name: [7] for entry in plan.scheduled for name in entry.samples}
        scheduler.update(plan, tokens)
        plans.append(plan)
        trace.step(plan, offered, tokens, [], {}, (0, 0, 0), float(len(plans)))
    trace.end()
    return plans, file.getvalue()
