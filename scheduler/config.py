"""The sizes and rules of one scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.errors import RequestRefused
from scheduler.policy import POLICIES, FirstComeFirstServed


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes and rules of one scheduler; plain data, so that a trace can hold it."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    policy: str = "fcfs"
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    prefix_caching: bool = True
    watermark: float = 0.01  # share of the blocks that an admission leaves free, unless nothing runs
    num_host_blocks: int = 0  # where preempted requests are swapped to; 0: they are computed again

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise RequestRefused(f"{name} {getattr(self, name)}: expected at least 1")
        if self.policy not in POLICIES:
            raise RequestRefused(f"policy {self.policy!r}: expected one of {', '.join(POLICIES)}")
        if not 0.0 <= self.watermark < 1.0:
            raise RequestRefused(f"watermark {self.watermark}: expected 0 <= watermark < 1")
        if not 0.0 <= self.waiting_served_ratio < 1e9:
            raise RequestRefused(f"waiting_served_ratio {self.waiting_served_ratio}: expected a number, at least 0")
        if self.num_host_blocks < 0 or self.max_waiting_tokens < 0:
            raise RequestRefused(
                f"num_host_blocks {self.num_host_blocks}, max_waiting_tokens {self.max_waiting_tokens}: at least 0"
            )


def make_policy(config: SchedulerConfig) -> FirstComeFirstServed:
    if config.policy == "waiting-served":
        return POLICIES[config.policy](  # type: ignore[call-arg]
            waiting_served_ratio=config.waiting_served_ratio, max_waiting_tokens=config.max_waiting_tokens
        )
    return POLICIES[config.policy]()
