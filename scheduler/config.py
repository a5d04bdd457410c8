"""The sizes and rules of one scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.errors import RequestRefused
from scheduler.policy import POLICIES

LEAST = {
    "num_blocks": 1,
    "block_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_waiting_tokens": 0,
}


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes and rules of one scheduler; plain data, so that a trace can hold it."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    policy: str = "fcfs"
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20  # steps: TGI's name, where a step is a token of each request
    prefix_caching: bool = True
    watermark: float = 0.01  # share of the blocks that an admission leaves free, unless nothing runs
    sliding_window: int | None = None  # positions that a row of a windowed layer sees, its own included; None: no pool
    num_window_blocks: int = 0  # of the pool of windowed layers: see groups.py

    def __post_init__(self) -> None:
        windows = {} if self.sliding_window is None else {"sliding_window": 1, "num_window_blocks": 1}
        for name, least in {**LEAST, **windows}.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise RequestRefused(f"{name} {value!r}: expected a whole number, at least {least}")
        if self.sliding_window is None and self.num_window_blocks:
            raise RequestRefused(f"num_window_blocks {self.num_window_blocks}: expected 0 without a sliding_window")
        for name in ("watermark", "waiting_served_ratio"):
            if type(getattr(self, name)) not in (int, float):
                raise RequestRefused(f"{name} {getattr(self, name)!r}: expected a number")
        if not isinstance(self.policy, str) or self.policy not in POLICIES:
            raise RequestRefused(f"policy {self.policy!r}: expected one of {', '.join(POLICIES)}")
        if not 0.0 <= self.watermark < 1.0:
            raise RequestRefused(f"watermark {self.watermark}: expected 0 <= watermark < 1")
        if not 0.0 <= self.waiting_served_ratio < 1e9:
            raise RequestRefused(f"waiting_served_ratio {self.waiting_served_ratio}: expected a number, at least 0")
