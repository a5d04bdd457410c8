"""A sequence on its way through the engine: what the scheduler counts of it, and its noise, text and log-probabilities.

A request that asks for n samples is a list of n sequences with one prompt; RequestOutput is what the caller sees of it.
"""

from __future__ import annotations

from collections import abc
from copy import copy
from dataclasses import dataclass, field, fields
from typing import TypeVar

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


@dataclass(eq=False, kw_only=True)
class Sequence(Request):
    """One sample of a request. Its `token_ids` are the scheduler's; `output` has those that a step just chose, too."""

    params: SamplingParams
    parent_id: str  # the caller's name of the request
    index: int  # among its samples
    seed: int
    arrived: float
    text_prompt: str | None
    stream: TextStream | None  # None without a tokenizer
    stops: StopChecker
    text: str = ""
    stop_string: str | None = None  # that ended it
    output: list[int] = field(default_factory=list)  # only appended to, as the next two
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    inherited: int = 0  # output tokens of the one that it was forked from
    num_drafts: int = 0  # checked
    num_accepted: int = 0  # of them
    draft_error: str | None = None  # why its drafter is not asked any more

    def push_text(self, token_id: int, may_stop: bool, ending: FinishReason | None) -> None:
        """One more token; `ending` is why it is the last, if the scheduler says so. A stop token has no text."""
        if self.stream is None:
            return
        if ending is not FinishReason.STOP:
            piece, self.stop_string = self.stops.push(self.stream.push(token_id), may_stop)
            self.text += piece
        if ending is not None and self.stop_string is None:
            self.finish_text()

    def finish_text(self) -> None:
        """Shows what was held back."""
        if self.stream is not None:
            piece, self.stop_string = self.stops.finish(self.stream.finish())
            self.text += piece

    def note_stop(self, last: int, eos_token_ids: abc.Collection[int]) -> None:
        """What it stopped at, if it did: a stop string, or its last token, unless that is an EOS."""
        is_eos = not self.params.ignore_eos and last in eos_token_ids
        if self.stop_string is not None:
            self.stop_reason = self.stop_string
        elif self.finish_reason is FinishReason.STOP and not is_eos:
            self.stop_reason = last

    def forked(self, request_id: str, params: SamplingParams, seed: int, arrived: float) -> Sequence:
        """A request of its own that has its text and log-probabilities so far; Scheduler.fork() gives it the rest."""
        given = {each.name: getattr(self, each.name) for each in fields(Request) if each.init}
        return Sequence(
            **(given | {"request_id": request_id}),
            params=params,
            parent_id=request_id,
            index=0,
            seed=seed,
            arrived=arrived,
            text_prompt=self.text_prompt,
            stream=self.stream.copy() if self.stream else None,
            stops=copy(self.stops),
            text=self.text,
            output=list(self.output),
            inherited=len(self.output),
            logprobs=list(self.logprobs),
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
        )

    def completion(self) -> CompletionOutput:
        reason = self.finish_reason
        return CompletionOutput(
            index=self.index,
            text=self.text if self.stream is not None else None,
            token_ids=so_far(self.output, reason is not None),
            logprobs=so_far(self.logprobs, reason is not None) if self.params.logprobs is not None else None,
            finish_reason=None if reason is None else reason.value,
            stop_reason=self.stop_reason,
            error=self.error,
        )


def sample_name(request_id: str, index: int) -> str:
    """What the scheduler, a trace and a callback call a sample of a request."""
    return request_id if index == 0 else f"{request_id}#{index}"


def require_possible(model: LoadedModel, prompt_ids: abc.Sequence[int], params: SamplingParams) -> int:
    """How many tokens may follow the prompt. RequestError for parameters or a prompt that the model can't meet."""
    require_vocabulary(params, model.config.vocab_size, model.config.eos_token_ids)
    if params.stop and not model.has_tokenizer:
        raise RequestError(f"stop {params.stop!r}: stop strings need a tokenizer, and {model.path} has none")
    return model.room_after(prompt_ids)


def make_sequences(
    model: LoadedModel,
    request_id: str,
    prompt: str | abc.Sequence[int],
    params: SamplingParams,
    priority: int,
    cache_salt: str,
    engine_seed: int,
    now: float,
) -> list[Sequence]:
    """The samples of a request. RequestError for one that the model can't meet."""
    priority = plain_number(priority)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"priority {show(priority)}: expected a whole number")
    require_text(cache_salt, "cache_salt")
    tokenizer = model.tokenizer_or_none
    ids = model.prompt_ids(prompt)
    room = require_possible(model, ids, params)
    eos = () if params.ignore_eos else model.config.eos_token_ids
    return [
        Sequence(
            request_id=sample_name(request_id, index),
            prompt_token_ids=tuple(ids),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=frozenset({*params.stop_token_ids, *eos}),
            min_tokens=params.min_tokens,
            priority=priority,
            cache_salt=cache_salt,
            prompt_logits=params.prompt_logprobs is not None and index == 0,
            params=params,
            parent_id=request_id,
            index=index,
            seed=request_seed(params, engine_seed, request_id),
            arrived=now,
            text_prompt=prompt if isinstance(prompt, str) else None,
            stream=tokenizer.stream() if tokenizer else None,
            stops=StopChecker(params.stop, params.include_stop_str_in_output),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        for index in range(params.n)
    ]


def request_output(samples: abc.Sequence[Sequence]) -> RequestOutput:
    """A request as it stands."""
    first, finished = samples[0], all(sample.is_finished for sample in samples)
    return RequestOutput(
        request_id=first.parent_id,
        prompt=first.text_prompt,
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=None if first.prompt_logprobs is None else so_far(first.prompt_logprobs, finished),
        outputs=tuple(sample.completion() for sample in samples),
        finished=finished,
        metrics=request_metrics(samples) if finished else None,
    )


def so_far(items: list[T], has_ended: bool) -> abc.Sequence[T]:
    """A step's outputs cost what is new in them: only what has ended is copied, once."""
    return tuple(items) if has_ended else Grown(items)


def request_metrics(samples: abc.Sequence[Sequence]) -> RequestMetrics:
    arrived, longest = samples[0].arrived, max(samples, key=lambda sample: sample.num_output_tokens - sample.inherited)
    scheduled, first = (
        [time for sample in samples if (time := getattr(sample, name)) is not None]
        for name in ("first_scheduled", "first_token")
    )
    own, begin, end = longest.num_output_tokens - longest.inherited, longest.first_token, longest.last_token
    return RequestMetrics(
        queue_time=min(scheduled) - arrived if scheduled else None,
        time_to_first_token=min(first) - arrived if first else None,
        time_per_output_token=(end - begin) / (own - 1) if begin is not None and end is not None and own > 1 else None,
        steps=sum(sample.num_steps for sample in samples),
        blocks=max(sample.most_blocks for sample in samples),
        cached_tokens=sum(sample.num_cached_tokens for sample in samples),
        preemptions=sum(sample.num_preemptions for sample in samples),
        recomputed_tokens=sum(sample.num_recomputed_tokens for sample in samples),
        draft_tokens=sum(sample.num_drafts for sample in samples),
        accepted_tokens=sum(sample.num_accepted for sample in samples),
        draft_error=next((sample.draft_error for sample in samples if sample.draft_error), None),
    )
