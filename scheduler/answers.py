"""What update() may be told about a plan: checked before anything changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler.errors import PlanError
from scheduler.plan import BatchPlan, ScheduledTokens
from scheduler.request import Request


def require_answers(
    plan: BatchPlan, requests: Mapping[str, Request], tokens: Mapping[str, Sequence[int]], errors: Sequence[str]
) -> None:
    """PlanError unless each request that samples, lives and did not fail got tokens that the plan allows."""
    asked: set[str] = set()
    for entry in plan.scheduled:
        asked.update(entry.samples)
        if entry.request_id in errors or requests[entry.request_id].is_finished:
            continue
        for name in entry.samples:
            if name not in errors and name in requests and not requests[name].is_finished:
                _require_tokens(plan, entry, requests[name], tokens.get(name, ()))
    for name in tokens:
        if name not in asked:
            raise PlanError(f"step {plan.step}: tokens for {name!r}, which was not asked for any")


def _require_tokens(plan: BatchPlan, entry: ScheduledTokens, request: Request, answer: Sequence[int]) -> None:
    """Accepted drafts, in order, then one token more; none behind the one that ends the request."""
    where = f"step {plan.step}: request {request.request_id!r} got {tuple(answer)}"
    if not 1 <= len(answer) <= 1 + entry.num_drafts:
        most = f"1 to {1 + entry.num_drafts} tokens" if entry.num_drafts else "1 token"
        raise PlanError(f"{where}, expected {most}")
    accepted = tuple(answer[:-1])
    if accepted != entry.drafts[: len(accepted)]:
        raise PlanError(f"{where}, expected all but the last to be its first drafts {entry.drafts}")
    for count, token in enumerate(accepted, start=1):
        if request.reason_to_end(token, request.num_output_tokens + count) is not None:
            raise PlanError(f"{where}, but token {token} ends it: expected none after that")
