"""One sequence on its way through the scheduler: token ids and counters, no text, no numbers of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.errors import RequestRefused


class Status(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token id, or a stop string
    LENGTH = "length"  # max_tokens
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False)
class Request:
    """`num_computed_tokens` is the only progress: prefill is what lies between it and the last known token.

    All token ids are in `token_ids`, the prompt first; the ids, the blocks and the state slot change in the scheduler
    only. `prompt_logits` asks for logits at every prompt position, which a prefix hit must then not skip.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0  # stop_token_ids do not stop before
    priority: int = 0  # lower goes first, under the policy `priority`
    cache_salt: str = ""  # requests share cached blocks only within one salt
    prompt_logits: bool = False

    token_ids: list[int] = field(init=False)
    status: Status = field(default=Status.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    arrival: int = field(default=-1, init=False)  # order of arrival, given by the scheduler
    arrival_step: int = field(default=-1, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    tables: list[tuple[int, ...]] = field(default_factory=lambda: [(), ()], init=False)  # of each group: see groups.py
    block_keys: list[bytes] = field(default_factory=list, init=False)  # hash chain over the full blocks so far
    slot: int | None = field(default=None, init=False)  # its live convolution state, while it is running
    forks: list[Request] = field(default_factory=list, init=False)  # split off once the prompt is computed
    awaits_split: bool = field(default=False, init=False)  # it is one of those, and in no queue

    num_cached_tokens: int = field(default=0, init=False)  # taken from the prefix cache, over all admissions
    num_preemptions: int = field(default=0, init=False)
    num_recomputed_tokens: int = field(default=0, init=False)
    furthest_computed: int = field(default=0, init=False)  # highest num_computed_tokens so far
    num_steps: int = field(default=0, init=False)
    most_blocks: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.prompt_token_ids = tuple(self.prompt_token_ids)
        self.stop_token_ids = frozenset(self.stop_token_ids)
        self.token_ids = list(self.prompt_token_ids)
        if not isinstance(self.request_id, str) or not self.request_id:
            raise RequestRefused(f"request id {self.request_id!r}: expected a string that is not empty")
        if not self.prompt_token_ids:
            raise RequestRefused(f"request {self.request_id!r}: prompt of 0 tokens, expected at least 1")
        if self.max_tokens < 1:
            raise RequestRefused(f"request {self.request_id!r}: max_tokens {self.max_tokens}, expected at least 1")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def most_computed_tokens(self) -> int:
        """Positions that will ever be computed: the last token needs no place in the cache."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def is_decoding(self) -> bool:
        """Whether all but the newest token is computed, after the prompt."""
        return len(self.prompt_token_ids) <= self.num_computed_tokens == len(self.token_ids) - 1

    @property
    def first_logits(self) -> int:
        """The first position whose logits are still wanted."""
        if self.prompt_logits and self.furthest_computed < self.num_prompt_tokens:
            return self.furthest_computed
        return self.num_tokens - 1

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    def append(self, token_id: int) -> None:
        """One more output token; it may be the last one."""
        self.token_ids.append(token_id)
        self.finish_reason = self.reason_to_end(token_id, self.num_output_tokens)

    def reason_to_end(self, token_id: int, num_output_tokens: int) -> FinishReason | None:
        """Why it ends with this token as output token number `num_output_tokens`, counted from 1; None: it goes on."""
        if token_id in self.stop_token_ids and num_output_tokens >= self.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output_tokens >= self.max_tokens else None


def is_queued(request: Request) -> bool:
    return request.status in (Status.WAITING, Status.PREEMPTED) and not request.awaits_split
