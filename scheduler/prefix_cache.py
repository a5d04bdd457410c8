"""Which blocks of a new request are already computed: a hash chain over its full blocks, looked up in the pool.

The key of a block is SHA-256 over the key of the block before it, its token ids and the request's salt, so equal keys
mean equal tokens from position 0 on. A block carries its keys and values AND the convolution states after its last
token; both are published under one key, after they were written, and evicted together. So the longest prefix whose
attention blocks exist is, by construction, the longest whose convolution-state checkpoint exists: a hit on one without
the other (vLLM issues 43090, 47861, 53912) can't be expressed. Windowed layers have blocks of their own under the same
keys; a hit ends where they still have all that its next row sees (groups.py), which is mostly all of it or nothing, as
what is out of sight is given back first.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.groups import Group
from scheduler.request import Request

# Why a match ended where it did.
REASONS = (
    "complete",  # every block that a hit may cover was found
    "too short",  # no full block before the first position whose logits are wanted
    "unknown",  # the next block was never published, or so long ago that its eviction is forgotten
    "evicted",  # it was published, and its block has been handed out since
    "window",  # more blocks were found, but not all that the windowed layers would read behind them
    "disabled",
)


@dataclass
class PrefixStatistics:
    """Counted at every admission, also after a preemption."""

    queries: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))


class PrefixCache:
    def __init__(self, groups: Sequence[Group], block_size: int, enabled: bool) -> None:
        self.groups = groups
        self.block_size = block_size
        self.enabled = enabled
        self.statistics = PrefixStatistics()

    def find(self, request: Request) -> tuple[list[bytes], str]:
        """The keys of the longest prefix that every group has, and why it ends there (REASONS).

        It ends before the first logits that are wanted, so at least the last token is computed.
        """
        if not self.enabled:
            return [], "disabled"
        most = request.first_logits // self.block_size
        if most == 0:
            return [], "too short"
        keys, full = self.keys(request, most), self.groups[0]
        num_cached = full.usable(keys)
        usable = min(group.usable(keys[:num_cached]) for group in self.groups)
        if usable < num_cached:
            return keys[:usable], "window"
        if num_cached == most:
            return keys, "complete"
        return keys[:usable], "evicted" if keys[usable] in full.evicted else "unknown"

    def count(self, request: Request, num_blocks: int, reason: str) -> None:
        """One admission more in the statistics, with a hit of that many blocks."""
        self.statistics.queries += 1
        self.statistics.query_tokens += request.num_tokens
        self.statistics.hit_tokens += num_blocks * self.block_size
        self.statistics.ended[reason] += 1

    def keys(self, request: Request, count: int) -> list[bytes]:
        """The keys of the first `count` blocks, which must be full; each is computed once."""
        while len(request.block_keys) < count:
            parent = request.block_keys[-1] if request.block_keys else b""
            start = len(request.block_keys) * self.block_size
            tokens = request.token_ids[start : start + self.block_size]
            request.block_keys.append(block_key(parent, tokens, request.cache_salt))
        return request.block_keys[:count]

    def publish(self, request: Request, before: int) -> None:
        """After the write: the blocks that became full since `before` computed tokens."""
        first, last = before // self.block_size, request.num_computed_tokens // self.block_size
        if not self.enabled or first == last:
            return
        keys = self.keys(request, last)
        for group in self.groups:
            group.publish(request, first, keys[first:last])


def block_key(parent: bytes, token_ids: list[int], salt: str) -> bytes:
    """SHA-256 of the parent's key, the token ids as 8-byte integers, and the salt; lengths come first."""
    text = salt.encode("utf-8")
    sizes = len(parent), len(token_ids), len(text)
    packed = struct.pack(f"<QQQ{len(parent)}s{len(token_ids)}q{len(text)}s", *sizes, parent, *token_ids, text)
    return hashlib.sha256(packed).digest()
