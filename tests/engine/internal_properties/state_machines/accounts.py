"""What the strict books note of one request, beside what the suite notes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import scheduler
from lfm2np.suite.schedulers import ledger


@dataclass(eq=False)
class Account(ledger.Account):
    """`computed` counts positions in the cache, while it runs."""

    subject: scheduler.Request = field(kw_only=True)  # as the scheduler has it
    key: tuple[int, int] = field(kw_only=True)  # its place in the policy's order
    answered: list[int] = field(default_factory=list)  # outputs of its own: a fork begins with its parent's
    block_keys: list[bytes] = field(default_factory=list)
    furthest: int = 0  # most that were ever computed, or taken over with a fork
    inherited: int = 0  # those taken over with a fork
    kept: int = 0  # scheduled tokens that stayed computed, over all steps
    recomputed: int = 0  # those of them before `furthest`
    skipped: int = 0  # positions from `furthest` on that it did not compute, since a prefix hit covered them
    cached: int = 0  # positions covered by hits, over all admissions
    steps: int = 0
    most_blocks: int = 0
    awaits_moves: bool = False  # split off since the last plan
    preemptions: int = 0
    prompt_rows: int = 0  # prompt positions whose logits were computed without a gap

    @property
    def first_logits(self) -> int:
        if self.subject.prompt_logits and self.furthest < len(self.subject.prompt_token_ids):
            return self.furthest
        return len(self.tokens) - 1
