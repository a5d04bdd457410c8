"""Requests that can't be met: refused when they come, before anything changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler.errors import RequestRefused
from scheduler.memory import Memory
from scheduler.request import Request


def require_new(requests: Mapping[str, Request], added: Sequence[Request]) -> None:
    """RequestRefused for an id that is in use, or comes twice."""
    seen = set()
    for one in added:
        if one.request_id in requests or one.request_id in seen:
            raise RequestRefused(f"request id {one.request_id!r} is already in use")
        seen.add(one.request_id)


def require_known(requests: Mapping[str, Request], request_id: str) -> Request:
    """The request of that id. RequestRefused if there is none that goes on."""
    request = requests.get(request_id)
    if request is None or request.is_finished:
        raise RequestRefused(f"request {request_id!r}: not known, or finished")
    return request


def require_room(memory: Memory, request: Request) -> None:
    """RequestRefused for a request that could never fit into the pool, even alone."""
    blocks = memory.blocks_for(request.most_computed_tokens)
    if blocks > memory.pool.num_blocks:
        raise RequestRefused(
            f"request {request.request_id!r}: {request.num_prompt_tokens} prompt tokens and max_tokens="
            f"{request.max_tokens} need {blocks} blocks of {memory.block_size}; the pool has {memory.pool.num_blocks}"
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
