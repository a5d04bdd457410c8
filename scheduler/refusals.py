"""Requests that can't be met, and answers that no plan asked for: refused when they come, before anything changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler.errors import PlanError, RequestRefused
from scheduler.memory import Memory
from scheduler.plan import BatchPlan, ScheduledTokens
from scheduler.request import Request


def require_new(requests: Mapping[str, Request], added: Sequence[Request]) -> None:
    """RequestRefused for an id that is in use, or comes twice."""
    seen = set()
    for request in added:
        if request.request_id in requests or request.request_id in seen:
            raise RequestRefused(f"request id {request.request_id!r} is already in use")
        seen.add(request.request_id)


def require_room(memory: Memory, request: Request, step: int) -> None:
    """RequestRefused for a request that could never fit into the pools, even alone.

    step  most tokens of a step
    """
    step = request.most_computed_tokens if memory.reserves else min(step, request.most_computed_tokens)
    for group in memory.groups:
        needed, there = group.longest_span(request.most_computed_tokens, step), group.pool.num_blocks
        if needed > there:
            whole = f"{request.num_prompt_tokens} prompt tokens and max_tokens={request.max_tokens}"
            whose = whole if group.window is None else f"windowed layers in a step of {step} tokens"
            raise RequestRefused(
                f"request {request.request_id!r}: {whose} need {needed} blocks of {memory.block_size}; "
                f"the pool has {there}"
            )


def require_fork(parent: Request, child: Request) -> None:
    """RequestRefused unless the child goes on from its parent's tokens, and not only repeats them."""
    if child.prompt_token_ids != parent.prompt_token_ids or child.cache_salt != parent.cache_salt:
        raise RequestRefused(f"request {child.request_id!r}: a fork needs the prompt of {parent.request_id!r}")
    if child.max_tokens <= parent.num_output_tokens:
        raise RequestRefused(
            f"request {child.request_id!r}: max_tokens {child.max_tokens}, but {parent.request_id!r} already has "
            f"{parent.num_output_tokens} output tokens"
        )


def require_answers(
    plan: BatchPlan, requests: Mapping[str, Request], tokens: Mapping[str, Sequence[int]], errors: Sequence[str]
) -> None:
    """PlanError unless each request that samples, lives and did not fail got tokens that the plan allows, and what
    failed is of the plan."""
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
    for name in errors:
        if name not in asked and all(entry.request_id != name for entry in plan.scheduled):
            raise PlanError(f"step {plan.step}: an error of {name!r}, which it does not compute")


def _require_tokens(plan: BatchPlan, entry: ScheduledTokens, request: Request, answer: Sequence[int]) -> None:
    """Accepted drafts, in order, then one token more; none behind the one that ends the request."""
    problem, accepted = "", tuple(answer[:-1])
    if not 1 <= len(answer) <= 1 + entry.num_drafts:
        problem = f"expected 1 to {1 + entry.num_drafts} tokens" if entry.num_drafts else "expected 1 token"
    elif accepted and accepted != entry.drafts[: len(accepted)]:
        problem = f"expected all but the last to be its first drafts {entry.drafts}"
    for count, token in enumerate(() if problem else accepted, start=1):
        if request.reason_to_end(token, request.num_output_tokens + count) is not None:
            problem = f"but token {token} ends it: expected none after that"
    if problem:
        raise PlanError(f"step {plan.step}: request {request.request_id!r} got {tuple(answer)}, {problem}")
