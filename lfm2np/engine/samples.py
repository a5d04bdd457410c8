"""What the engine keeps of a request, beside the scheduler's counters, and the outputs that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.text.tokenizer import TextStream, require_text
from lfm2np.engine.outputs import CompletionOutput, Grown, RequestMetrics, RequestOutput
from lfm2np.engine.sampling.choice import request_seed
from lfm2np.engine.sampling.logprobs import TokenLogprobs
from lfm2np.engine.sampling.params import SamplingParams, require_vocabulary
from lfm2np.engine.sampling.stop_strings import StopChecker
from lfm2np.errors import RequestError
from lfm2np.values import plain_number, show
from scheduler import FinishReason, Request

T = TypeVar("T")


@dataclass(eq=False)
class Text:
    """Where one sample's text stands."""

    stream: TextStream | None  # None without a tokenizer
    stops: StopChecker
    shown: str = ""
    stopped_by: str | None = None  # the stop string

    def copy(self) -> Text:
        return replace(self, stream=self.stream.copy() if self.stream else None, stops=self.stops.copy())

    def push(self, token_id: int, may_stop: bool, ending: FinishReason | None) -> None:
        """One more token; `ending` is why it is the last, if the scheduler says so. A stop token has no text."""
        if self.stream is None:
            return
        if ending is not FinishReason.STOP:
            piece, self.stopped_by = self.stops.push(self.stream.push(token_id), may_stop)
            self.shown += piece
        if ending is not None and self.stopped_by is None:
            self.finish()

    def finish(self) -> None:
        """Shows what was held back."""
        if self.stream is not None:
            piece, self.stopped_by = self.stops.finish(self.stream.finish())
            self.shown += piece


@dataclass(eq=False)
class Sample:
    """One sequence of a request: what the scheduler does not know."""

    index: int
    request: Request
    seed: int
    text: Text
    token_ids: list[int] = field(default_factory=list)  # of the output; only appended to, as the next
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop_reason: int | str | None = None
    error: str | None = None
    drafts: int = 0  # checked
    accepted: int = 0  # of them
    draft_error: str | None = None  # why its drafter is not asked any more


@dataclass(frozen=True, eq=False)
class Drawn:
    """One token, and the row [V] of its position that it was chosen from."""

    token_id: int
    position: int
    row: NDArray[Any]
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, eq=False)
class Answer:
    """What a step gave one sample: accepted drafts and at most one token more."""

    drawn: tuple[Drawn, ...]
    num_drafts: int  # checked
    num_accepted: int

    @property
    def token_ids(self) -> list[int]:
        return [drawn.token_id for drawn in self.drawn]


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


def sample_name(request_id: str, index: int) -> str:
    """What the scheduler, a trace and a callback call a sample of a request."""
    return request_id if index == 0 else f"{request_id}#{index}"


def require_possible(model: LoadedModel, prompt_ids: Sequence[int], params: SamplingParams) -> int:
    """How many tokens may follow the prompt. RequestError for parameters or a prompt that the model can't meet."""
    require_vocabulary(params, model.config.vocab_size)
    if params.stop and not model.has_tokenizer:
        raise RequestError(f"stop {params.stop!r}: stop strings need a tokenizer, and {model.path} has none")
    return model.room_after(prompt_ids)


def make_group(
    model: LoadedModel,
    request_id: str,
    prompt: str | Sequence[int],
    params: SamplingParams,
    priority: int,
    cache_salt: str,
    engine_seed: int,
    now: float,
) -> Group:
    """A request and its samples. RequestError for one that the model can't meet."""
    priority = plain_number(priority)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"priority {show(priority)}: expected a whole number")
    require_text(cache_salt, "cache_salt")
    config = model.config
    tokenizer = model.tokenizer_or_none
    ids = model.prompt_ids(prompt)
    room = require_possible(model, ids, params)
    stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else config.eos_token_ids)
    seed = request_seed(params, engine_seed, request_id)
    samples = []
    for index in range(params.n):
        request = Request(
            request_id=sample_name(request_id, index),
            prompt_token_ids=tuple(ids),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=stop_ids,
            min_tokens=params.min_tokens,
            priority=priority,
            cache_salt=cache_salt,
            prompt_logits=params.prompt_logprobs is not None and index == 0,
        )
        stops = StopChecker(params.stop, params.include_stop_str_in_output)
        samples.append(Sample(index, request, seed, Text(tokenizer.stream() if tokenizer else None, stops)))
    wanted: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
    return Group(request_id, prompt if isinstance(prompt, str) else None, params, samples, now, wanted)


def fork_group(parent: Group, request_id: str, seed: int | None, engine_seed: int, now: float) -> Group:
    """A request that goes on from the only sample of another: its text and log-probabilities so far are copied."""
    params = replace(parent.params, seed=seed)
    (origin,) = parent.samples
    request = replace(origin.request, request_id=request_id)  # as it was when it came; the scheduler's fork() goes on
    sample_seed = request_seed(params, engine_seed, request_id)
    sample = Sample(0, request, sample_seed, origin.text.copy(), [*origin.token_ids], [*origin.logprobs])
    prompt_logprobs = None if parent.prompt_logprobs is None else list(parent.prompt_logprobs)
    return Group(request_id, parent.prompt, params, [sample], now, prompt_logprobs)


def request_output(group: Group) -> RequestOutput:
    return RequestOutput(
        request_id=group.request_id,
        prompt=group.prompt,
        prompt_token_ids=group.samples[0].request.prompt_token_ids,
        prompt_logprobs=None if group.prompt_logprobs is None else so_far(group.prompt_logprobs, group.is_finished),
        outputs=tuple(completion(sample, group.params) for sample in group.samples),
        finished=group.is_finished,
        metrics=request_metrics(group) if group.is_finished else None,
    )


def completion(sample: Sample, params: SamplingParams) -> CompletionOutput:
    reason = sample.request.finish_reason
    return CompletionOutput(
        index=sample.index,
        text=sample.text.shown if sample.text.stream is not None else None,
        token_ids=so_far(sample.token_ids, reason is not None),
        logprobs=so_far(sample.logprobs, reason is not None) if params.logprobs is not None else None,
        finish_reason=None if reason is None else reason.value,
        stop_reason=sample.stop_reason,
        error=sample.error,
    )


def so_far(items: list[T], has_ended: bool) -> Sequence[T]:
    """A step's outputs cost what is new in them: only what has ended is copied, once."""
    return tuple(items) if has_ended else Grown(items)


def request_metrics(group: Group) -> RequestMetrics:
    requests = [sample.request for sample in group.samples]
    longest = max(request.num_output_tokens for request in requests)
    per_token = None
    if group.first_token is not None and group.last_token is not None and longest > 1:
        per_token = (group.last_token - group.first_token) / (longest - 1)
    return RequestMetrics(
        queue_time=None if group.first_scheduled is None else group.first_scheduled - group.arrived,
        time_to_first_token=None if group.first_token is None else group.first_token - group.arrived,
        time_per_output_token=per_token,
        steps=sum(request.num_steps for request in requests),
        blocks=max(request.most_blocks for request in requests),
        cached_tokens=sum(request.num_cached_tokens for request in requests),
        preemptions=sum(request.num_preemptions for request in requests),
        recomputed_tokens=sum(request.num_recomputed_tokens for request in requests),
        draft_tokens=sum(sample.drafts for sample in group.samples),
        accepted_tokens=sum(sample.accepted for sample in group.samples),
        draft_error=next((sample.draft_error for sample in group.samples if sample.draft_error), None),
    )
