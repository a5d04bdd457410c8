"""The errors of the scheduler. Each names the thing, its value and what was expected."""


class SchedulerError(Exception):
    """Base class."""


class RequestRefused(SchedulerError):
    """A request that can't be met: known id, no tokens, larger than the pool. No other request is touched."""


class PoolError(SchedulerError):
    """A block used against the rules: freed twice, used after it was freed, written while shared or published."""


class PlanError(SchedulerError):
    """schedule() and update() out of turn, or tokens that do not answer the plan."""


class TraceError(SchedulerError):
    """A trace that can't be read, or whose replay differs from it."""
