"""What the engine returns: vLLM's names, so that its users find their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from lfm2np.engine.sampling.logprobs import TokenLogprobs
from scheduler import Scheduler

T = TypeVar("T")


class Grown(Sequence[T]):
    """What a list that is only appended to holds now: it stays so, equals a tuple, and no item is copied for it."""

    def __init__(self, items: list[T]) -> None:
        self._items, self._count = items, len(items)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: Any) -> Any:
        places = range(self._count)[index]
        return tuple(self._items[place] for place in places) if isinstance(index, slice) else self._items[places]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grown | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True)
class RequestMetrics:
    """Of one request, all its samples together. Seconds from `add_request` on."""

    queue_time: float | None  # until it was first scheduled; None if it never was
    time_to_first_token: float | None
    time_per_output_token: float | None  # after the first one, of the longest sample
    steps: int  # of the engine that computed tokens of a sample, summed over its samples
    blocks: int  # the most that one of its samples held
    cached_tokens: int  # taken from the prefix cache
    preemptions: int
    recomputed_tokens: int  # tokens computed twice
    draft_tokens: int  # checked
    accepted_tokens: int  # of them
    draft_error: str | None  # the drafter failed for this request, and was not asked again


@dataclass(frozen=True)
class CompletionOutput:
    """One sample so far. `token_ids` includes a stop token, `text` does not; both are tuples once it has ended."""

    index: int
    text: str | None  # None without a tokenizer
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None
    finish_reason: str | None  # None while it runs; stop, length, abort, error
    stop_reason: int | str | None  # the stop token id or stop string; None for EOS
    error: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(logprob.logprob for logprob in self.logprobs)


@dataclass(frozen=True)
class RequestOutput:
    """A request so far; `finished` when all its samples are."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: Sequence[TokenLogprobs | None] | None  # the first token has none
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics | None  # when finished


@dataclass
class RunMetrics:
    """Of an engine since it was made."""

    steps: int = 0
    scheduled_tokens: int = 0
    sampled_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_hit_tokens: int = 0
    padding_avoided: int = 0  # cells that the same steps would have wasted as padded rectangles
    most_running: int = 0  # requests that held a slot in one step
    seconds: float = 0.0
    drafted_rows: int = 0  # a request in a step, with drafts
    drafted_row_tokens: int = 0  # that came of them
    draft_tokens: int = 0  # checked
    accepted_tokens: int = 0  # of them
    accepted_at: list[int] = field(default_factory=list)  # of the first, second, ... draft
    drafted_at: list[int] = field(default_factory=list)
    steps_saved: int = 0  # tokens beyond the first that a request got in one step
    draft_failures: int = 0
    draft_seconds: float = 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a request got in a step in which it had drafts: 1 if all were rejected."""
        return self.drafted_row_tokens / self.drafted_rows if self.drafted_rows else 1.0

    def count_step(self, shares: Sequence[int], seconds: float, scheduler: Scheduler) -> None:
        """One step, of so many tokens for each request; an empty one only takes time."""
        self.steps += bool(shares)
        self.padding_avoided += max(shares, default=0) * len(shares) - sum(shares)
        self.scheduled_tokens += sum(shares)
        self.seconds += seconds
        self.preemptions = scheduler.num_preemptions
        self.prefix_hit_tokens = scheduler.prefix_cache.statistics.hit_tokens

    def count_answer(self, num_drafts: int, num_accepted: int, num_tokens: int) -> None:
        """What one request got in one step."""
        self.sampled_tokens += num_tokens
        self.steps_saved += num_tokens - 1
        if not num_drafts:
            return
        self.drafted_rows += 1
        self.drafted_row_tokens += num_tokens
        self.draft_tokens += num_drafts
        self.accepted_tokens += num_accepted
        for counts, number in ((self.drafted_at, num_drafts), (self.accepted_at, num_accepted)):
            counts.extend([0] * (num_drafts - len(counts)))
            for position in range(number):
                counts[position] += 1

    @property
    def tokens_per_step(self) -> float:
        return self.scheduled_tokens / self.steps if self.steps else 0.0


def static_padding(lengths: list[tuple[int, int]], batch_size: int) -> int:
    """Cells wasted by request-level batching of (prompt, output) lengths, in order, `batch_size` at a time.

    Prompts are padded to the longest; a member that ended keeps its row until the longest ended.
    """
    wasted = 0
    for start in range(0, len(lengths), batch_size):
        batch = lengths[start : start + batch_size]
        longest_prompt, longest_output = (max(sizes) for sizes in zip(*batch, strict=True))
        wasted += sum(longest_prompt - prompt + longest_output - output for prompt, output in batch)
    return wasted
