"""The scheduler of continuous batching: integers and plain data, standard library only.

scheduler = Scheduler(SchedulerConfig(num_blocks=64))
scheduler.add(Request("a", (1, 17, 42), max_tokens=8))
while scheduler.has_unfinished:
    plan = scheduler.schedule()                              # what to compute
    tokens = {name: [7] for entry in plan.scheduled for name in entry.samples}
    scheduler.update(plan, tokens)                           # what came of it
"""

from scheduler.block_pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.conservation import check
from scheduler.errors import PlanError, PoolError, RequestRefused, SchedulerError, TraceError
from scheduler.groups import FREED
from scheduler.plan import BatchPlan, Move, ScheduledTokens
from scheduler.policy import POLICIES
from scheduler.prefix_cache import PrefixCache
from scheduler.request import FinishReason, Request, Status
from scheduler.scheduler import Scheduler, most_drafts
from scheduler.trace import TraceWriter, read_lines, reasons, replay

__all__ = [
    "FREED",
    "POLICIES",
    "BatchPlan",
    "BlockPool",
    "FinishReason",
    "Move",
    "PlanError",
    "PoolError",
    "PrefixCache",
    "Request",
    "RequestRefused",
    "ScheduledTokens",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerError",
    "Status",
    "TraceError",
    "TraceWriter",
    "check",
    "most_drafts",
    "read_lines",
    "reasons",
    "replay",
]
