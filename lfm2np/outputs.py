"""What the engine returns: vLLM's names, so that its users find their way."""

from __future__ import annotations

from dataclasses import dataclass

from lfm2np.generation import TokenLogprobs


@dataclass(frozen=True)
class RequestMetrics:
    """Of one request, all its samples together. Seconds from `add_request` on; steps are engine steps."""

    queue_time: float  # until it was first scheduled
    time_to_first_token: float | None
    time_per_output_token: float | None  # after the first one, of the longest sample
    steps: int  # that computed tokens of it
    blocks: int  # the most that one of its samples held
    cached_tokens: int  # taken from the prefix cache
    preemptions: int
    recomputed_tokens: int  # tokens computed twice


@dataclass(frozen=True)
class CompletionOutput:
    """One sample. `token_ids` includes a stop token, `text` does not."""

    index: int
    text: str | None  # None without a tokenizer
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str | None  # None while it runs; stop, length, abort, error
    stop_reason: int | str | None  # the stop token id or stop string; None for EOS
    error: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(one.logprob for one in self.logprobs)


@dataclass(frozen=True)
class RequestOutput:
    """A request so far; `finished` when all its samples are."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None  # the first token has none
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
    most_running: int = 0
    seconds: float = 0.0

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
