"""Why a step let nobody in: what has to change before the next one can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.block_pool import BlockPool
from scheduler.request import Request


@dataclass(frozen=True)
class Blocked:
    """The queue's head did not fit, or too few fitted beside it. `hit`, `missed`: keys of blocks that the prefix cache
    had of the head, and of the next one, which it had not; None: it could not have been used."""

    hit: Sequence[bytes] = ()
    missed: bytes | None = None

    def holds(self, pool: BlockPool) -> bool:
        """Whether the head's hit is still the same."""
        return self.missed not in pool.block_of and all(key in pool.block_of for key in self.hit)


def blocked_head(request: Request, num_hit: int, reason: str) -> Blocked:
    """`reason`: why its hit ended (prefix_cache.REASONS)."""
    missed = request.block_keys[num_hit] if reason in ("unknown", "evicted") else None
    return Blocked(request.block_keys[:num_hit], missed)
