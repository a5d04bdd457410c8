"""What SchedulerMachine's books note of one request, and of one published prefix."""

from __future__ import annotations

from dataclasses import dataclass, field

from internal_properties.state_machines.fake_model import Cell, State
from scheduler import Request


@dataclass(eq=False)
class Account:
    """One request, counted by the machine."""

    request: Request
    seed: int
    key: tuple[int, int]  # its place in the policy's order
    tokens: list[int]  # prompt and outputs
    answered: list[int] = field(default_factory=list)  # outputs of its own: a fork begins with its parent's
    block_keys: list[bytes] = field(default_factory=list)
    computed: int = 0  # positions in the cache, while it runs or is swapped out
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
    withdrawn: int = 0  # how often an abandoned step took it off
    prompt_rows: int = 0  # prompt positions whose logits were computed without a gap

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    def ends_with(self, token: int, num_outputs: int) -> bool:
        stops = token in self.request.stop_token_ids and num_outputs >= self.request.min_tokens
        return stops or num_outputs >= self.request.max_tokens

    @property
    def first_logits(self) -> int:
        if self.request.prompt_logits and self.furthest < len(self.request.prompt_token_ids):
            return self.furthest
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Prefix:
    """What a published key stands for, and what its block must hold."""

    salt: str
    tokens: tuple[int, ...]
    cells: list[Cell]
    checkpoint: State
