"""How long a step takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Count = Any  # int, or for many steps at once an int64 array [steps]


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's time depends on. Each field is one number, or an int64 array with one number a step."""

    tokens: Count  # that are computed, drafts included
    requests: Count  # that have tokens in it
    attended: Count  # pairs of a computed token and a position that it sees, itself included
    read: Count  # positions whose keys and values are read, once for each request
    sampled: Count  # tokens whose logits are computed
    checkpoints: Count  # states written beside a block that became full
    moved_blocks: Count  # copied, swapped out or in
    drafts: Count  # draft tokens that were proposed
