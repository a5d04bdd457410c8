"""What the engine keeps of a request, beside the scheduler's counters, and the outputs that come of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from lfm2np.generation import TokenLogprobs
from lfm2np.outputs import CompletionOutput, RequestMetrics
from lfm2np.sampling_params import SamplingParams
from lfm2np.stop_strings import StopChecker
from lfm2np.tokenizer import TextStream
from scheduler import Request


@dataclass(eq=False)
class Sample:
    """One sequence of a request: what the scheduler does not know."""

    index: int
    request: Request
    seed: int
    stream: TextStream | None
    stops: StopChecker
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(frozen=True, eq=False)
class Drawn:
    """One token, and the row [V] of its position that it was chosen from."""

    token_id: int
    position: int
    row: NDArray[Any]
    logprobs: TokenLogprobs | None


@dataclass(eq=False)
class Group:
    """One request as the caller knows it: n samples of one prompt."""

    request_id: str
    prompt: str | None
    params: SamplingParams
    samples: list[Sample]
    arrived: float
    prompt_logprobs: list[TokenLogprobs | None] | None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def is_finished(self) -> bool:
        return all(sample.request.is_finished for sample in self.samples)


def completion(sample: Sample, params: SamplingParams) -> CompletionOutput:
    reason = sample.request.finish_reason
    return CompletionOutput(
        index=sample.index,
        text=sample.text if sample.stream is not None else None,
        token_ids=tuple(sample.request.output_token_ids),
        logprobs=tuple(sample.logprobs) if params.logprobs is not None else None,
        finish_reason=None if reason is None else reason.value,
        stop_reason=sample.stop_reason,
        error=sample.error,
    )


def request_metrics(group: Group) -> RequestMetrics:
    requests = [sample.request for sample in group.samples]
    longest = max(request.num_output_tokens for request in requests)
    per_token = None
    if group.first_token is not None and group.last_token is not None and longest > 1:
        per_token = (group.last_token - group.first_token) / (longest - 1)
    return RequestMetrics(
        queue_time=(group.first_scheduled or group.arrived) - group.arrived,
        time_to_first_token=None if group.first_token is None else group.first_token - group.arrived,
        time_per_output_token=per_token,
        steps=sum(request.num_steps for request in requests),
        blocks=max(request.most_blocks for request in requests),
        cached_tokens=sum(request.num_cached_tokens for request in requests),
        preemptions=sum(request.num_preemptions for request in requests),
        recomputed_tokens=sum(request.num_recomputed_tokens for request in requests),
    )
