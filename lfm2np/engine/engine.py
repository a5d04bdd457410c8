"""The engine: scheduler, ragged model, cache and sampler, one step at a time.

    request -> schedule() -> BatchPlan -> forward() -> logits -> decide(), tokens and text -> commit -> update()

A request's tokens and logits depend on its prompt, parameters and seed only, whatever else runs. A request that can't
be met is refused when it is added, and numbers that overflow end their own request. Any other exception, an interrupt
too, ends the engine: the next call says so.
"""

from __future__ import annotations

import contextlib
import time
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import NAMES
from lfm2np.arithmetic.products.blas import blas_kernel
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.cache import Cache, default_blocks, default_window_blocks, make_cache
from lfm2np.engine.drafters import Drafter
from lfm2np.engine.outputs import RequestOutput, RunMetrics
from lfm2np.engine.proposals import Proposals, contexts_of, propose, require_drafter
from lfm2np.engine.sampler import Chosen, sample_step
from lfm2np.engine.sampling.choice import request_seed
from lfm2np.engine.sampling.params import MAX_SEED, SamplingParams
from lfm2np.engine.sequence import Sequence, make_sequences, request_output
from lfm2np.engine.step import StepResult, commit_step, forward, forward_again_without_drafts
from lfm2np.errors import RequestError, told
from lfm2np.truth.config import SLIDING
from lfm2np.values import Progress, plain_number, require_count, show
from scheduler import BatchPlan, FinishReason, RequestRefused, Scheduler, SchedulerConfig, TraceWriter, reasons

OnLogits = Callable[[str, int, NDArray[Any], int], None]  # request id, position, row [V], token


def require_params(name: str, params: object) -> SamplingParams:
    """The parameters, the defaults for None; RequestError for anything else."""
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(f"{name} {show(params)}: expected SamplingParams, or None")
    return SamplingParams() if params is None else params


def require_kinds(prefix_caching: object, trace: object, clock: object, room_for: object) -> None:
    """RequestError for an option of Engine that is not what it has to be; sizes are checked where they are used."""
    for name, value, expected, fits in (
        ("prefix_caching", prefix_caching, "true or false", isinstance(prefix_caching, bool | np.bool_)),
        ("trace", trace, "a text file that is open, or None", trace is None or hasattr(trace, "write")),
        ("clock", clock, "a function that returns seconds", callable(clock)),
        ("room_for", room_for, "a list of whole numbers, or None", room_for is None or isinstance(room_for, Iterable)),
    ):
        if not fits:
            raise RequestError(f"{name} {show(value)}: expected {expected}")


def scheduler_config(
    model: LoadedModel,
    num_blocks: int | None,
    num_window_blocks: int | None,
    room_for: abc.Sequence[int] | None,
    **options: Any,
) -> SchedulerConfig:
    """The sizes of one engine, the default for those that are None. RequestError for one that can't be."""
    window = model.config.sliding_window if SLIDING in model.config.layer_types else None
    if num_window_blocks is not None and window is None:
        raise RequestError(f"num_window_blocks {num_window_blocks}: this model has no layer with a window")
    sizes = {"num_blocks": 1 if num_blocks is None else num_blocks, "sliding_window": window, **options}
    sizes["num_window_blocks"] = int(window is not None) if num_window_blocks is None else num_window_blocks
    try:
        config = SchedulerConfig(**{name: plain_number(value) for name, value in sizes.items()})
    except RequestRefused as error:
        raise RequestError(str(error)) from None
    if num_blocks is None:
        config = replace(config, num_blocks=default_blocks(model.config, model.numerics, config, room_for))
    if window is not None and num_window_blocks is None:
        blocks = default_window_blocks(model.config, model.numerics, config, config.num_blocks)
        config = replace(config, num_window_blocks=blocks)
    return config


class Engine:
    """Continuous batching of one model.

    num_blocks              of the key/value pool; None: see cache.default_blocks
    num_window_blocks       of the pool of layers with a window, if there are any: see cache.default_window_blocks
    room_for                positions of each request that will come, if that is known: then the default suits them
    max_num_batched_tokens  most tokens of a step
    policy, waiting_served_ratio, max_waiting_tokens (steps), watermark   see scheduler/policy.py and config.py
    drafter                 proposes tokens that a step then checks (drafters.py, draft_model.py); None: no speculation
    num_speculative_tokens  most drafts of a request in a step
    seed                    of requests without one; each has its own, from this and its id
    trace                   a text file that gets the run as JSON lines; `engine.trace.end()` writes the last of them
    on_logits               called with each row of logits that a token was chosen from
    progress                called with (layers done, layers in all) of each step
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int | None = None,
        num_window_blocks: int | None = None,
        room_for: abc.Sequence[int] | None = None,
        block_size: int = 16,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        policy: str = "fcfs",
        waiting_served_ratio: float = 0.3,
        max_waiting_tokens: int = 20,
        prefix_caching: bool = True,
        watermark: float = 0.01,
        drafter: Drafter | None = None,
        num_speculative_tokens: int = 4,
        seed: int = 0,
        trace: TextIO | None = None,
        on_logits: OnLogits | None = None,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not isinstance(model, LoadedModel):
            raise RequestError(f"model {show(model)}: expected a loaded model, as lfm2np.load returns it")
        if model.numerics.name not in NAMES:
            expected = f"expected one of {', '.join(NAMES)} for an engine"
            raise RequestError(
                f"numerics {model.numerics.name!r} computes one sequence at a time, without a cache: {expected}"
            )
        require_kinds(prefix_caching=prefix_caching, trace=trace, clock=clock, room_for=room_for)
        self.model, self.seed = model, require_count("seed", seed, 0, MAX_SEED)
        self.metrics = RunMetrics()
        config = scheduler_config(
            model,
            num_blocks,
            num_window_blocks,
            None if room_for is None else [require_count("room_for", each, 1, None) for each in room_for],
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
            waiting_served_ratio=waiting_served_ratio,
            max_waiting_tokens=max_waiting_tokens,
            prefix_caching=prefix_caching,
            watermark=watermark,
        )
        self.scheduler = Scheduler(config)
        self.cache: Cache = make_cache(model.config, model.numerics, config)
        self._drafter = require_drafter(drafter)
        self._num_drafts = require_count("num_speculative_tokens", num_speculative_tokens, 1, None)
        self._requests: dict[str, list[Sequence]] = {}  # the samples of each, until all have ended
        self._sequences: dict[str, Sequence] = {}  # the same by the scheduler's request id
        self._on_logits, self._progress, self._clock = on_logits, progress, clock
        self._ended: str | None = None  # by what, once an exception ended it
        self._is_inside = False  # a step, as its drafter is
        self._ready: list[RequestOutput] = []  # outputs that no step has returned yet
        header: dict[str, Any] = {"model": model.path.name, "numerics": model.numerics.name, "seed": self.seed}
        if model.numerics.name != "exact":
            header["blas_kernel"] = blas_kernel()  # on which its bits depend, and which products are made of what
        self.trace = TraceWriter(trace, config, header) if trace is not None else None

    def add_request(
        self,
        request_id: str,
        prompt: str | abc.Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Queues a request. RequestError, and no other request touched, for one that can't be met."""
        self._require_idle("add_request()")
        params = require_params("params", params)
        self._require_new_id(request_id)
        now = self._clock()
        first, *forks = samples = make_sequences(
            self.model, request_id, prompt, params, priority, cache_salt, self.seed, now
        )
        for sample in samples:  # one that ended keeps its name until all have
            self._require_new_id(sample.request_id)
        with self._or_end("add_request()"):
            self.scheduler.add(first, forks)
            self._register(samples)
            if self.trace:
                self.trace.add(first, forks)

    def _register(self, samples: list[Sequence]) -> None:
        self._requests[samples[0].parent_id] = samples
        self._sequences |= {sample.request_id: sample for sample in samples}

    def abort(self, request_id: str) -> RequestOutput:
        """Ends a request, all its samples. RequestError for an id that is not known."""
        self._require_idle("abort()")
        samples = self._samples(request_id)
        with self._or_end("abort()"):
            for sample in samples:
                if not sample.is_finished:
                    self.scheduler.abort(sample.request_id)
                    sample.finish_text()
                    if self.trace:
                        self.trace.finish(sample.request_id, FinishReason.ABORT)
            return self._output(request_id)

    def preempt(self, request_id: str) -> None:
        """Takes the memory of a request away, between steps. What is not cached is computed again; no token changes.

        RequestError for an id that is not known, or has no sample that runs.
        """
        self._require_idle("preempt()")
        running = [sample.request_id for sample in self._samples(request_id) if sample.slot is not None]
        if not running:
            raise RequestError(f"request id {request_id!r}: not running, can't be preempted")
        with self._or_end("preempt()"):
            for name in running:
                self.scheduler.preempt(name)
                if self.trace:
                    self.trace.preempt(name)

    def fork(self, request_id: str, new_id: str, seed: int | None = None) -> None:
        """A new request that goes on from where another stands, sharing its blocks, with noise of its own.

        It has the parent's prompt, parameters and tokens so far; a seed as a request that is added. RequestError for a
        parent that is not known, or has more than one sample.
        """
        self._require_idle("fork()")
        parent, *others = self._samples(request_id)
        if others:
            raise RequestError(f"request id {request_id!r}: {1 + len(others)} samples, expected 1 to fork")
        self._require_new_id(new_id)
        params = replace(parent.params, seed=seed)
        child = parent.forked(new_id, params, request_seed(params, self.seed, new_id), self._clock())
        with self._or_end("fork()"):
            self.scheduler.fork(request_id, child)  # as large as its parent, which is not finished: it fits
            self._register([child])
            if self.trace:
                self.trace.fork(request_id, child)

    def _samples(self, request_id: str) -> list[Sequence]:
        if request_id not in self._requests:
            raise RequestError(f"request id {request_id!r}: not known, or finished")
        return self._requests[request_id]

    def _require_new_id(self, request_id: str) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request id {request_id!r}: expected a string that is not empty")
        if request_id in self._sequences:
            raise RequestError(f"request id {request_id!r} is already in use")

    def knows(self, request_id: str) -> bool:
        """Whether a request, or a sample of one, has this id, and is not finished or has an output to come."""
        return request_id in self._sequences or any(output.request_id == request_id for output in self._ready)

    def give_back(self, outputs: list[RequestOutput]) -> None:
        """Outputs of step() that are for somebody else: the next step() returns them first."""
        self._ready[:0] = outputs

    def discard(self, request_id: str) -> None:
        """Aborts a request if it is still known, unless the engine has ended, which is reported already."""
        if request_id in self._requests and self.is_usable:
            self.abort(request_id)

    @property
    def is_usable(self) -> bool:
        """False once an exception ended it."""
        return self._ended is None

    @property
    def has_unfinished(self) -> bool:
        """Also of an engine that has ended, which may have cost outputs: the next step() says so."""
        return bool(self._requests or self._ready or self._ended)

    def step(self) -> list[RequestOutput]:
        """One step; the requests that got a token or ended. An exception in it, a callback's too, ends the engine."""
        self._require_idle("step()")
        with self._or_end("step()", refuses=False):
            self._is_inside = True
            chosen = self._step()
            self._is_inside = False
            self._report(chosen)
        ready, self._ready = self._ready, []
        return ready

    def _step(self) -> dict[str, list[Chosen]]:
        """Plans, computes, chooses and enters one step; what each sequence got. Outputs are added to those ready."""
        began = self._clock()
        plan = self.scheduler.schedule()
        self.metrics.most_running = max(self.metrics.most_running, len(self.scheduler.running))
        sequences = [self._sequences[entry.request_id] for entry in plan.scheduled]
        drafts, proposals = self._propose(plan)
        plan = self.scheduler.add_drafts(plan, drafts)
        result = self._compute(plan)
        chosen, errors = sample_step(self.model, self._sequences, result, proposals.drafts, self.metrics)
        tokens = {name: [each.token_id for each in answer] for name, answer in chosen.items()}
        commit_step(self.cache, result, {name: len(ids) for name, ids in tokens.items()})
        finished = reasons(self.scheduler.update(plan, tokens, list(errors)))
        counts = (len(self.scheduler.waiting), len(self.scheduler.running), self.scheduler.pool.num_free)
        now = self._clock()
        for sequence in sequences:
            sequence.first_scheduled = began if sequence.first_scheduled is None else sequence.first_scheduled
        for name, error in errors.items():
            self._sequences[name].error = told(error)
        stopped = [name for name, ids in tokens.items() if self._take(self._sequences[name], ids[-1], now)]
        self.metrics.count_step([len(entry.token_ids) for entry in plan.scheduled], now - began, self.scheduler)
        changed = dict.fromkeys(self._sequences[name].parent_id for name in (*errors, *tokens))
        self._ready += [self._output(request_id) for request_id in changed]
        if self.trace:
            self.trace.step(plan, drafts, tokens, list(errors), finished, counts, round(now - began, 6))
            for name in stopped:
                self.trace.finish(name, FinishReason.STOP)
        return chosen

    def _require_idle(self, call: str) -> None:
        """RequestError inside a step (a drafter's call), or after an exception that ended the engine."""
        if self._ended is not None:
            raise RequestError(f"{call}: the engine has ended, by {self._ended}; make a new one")
        if self._is_inside:
            raise RequestError(
                f"{call}: called from inside a step; wait until it is over: an LLM or engine is for one thread"
            )

    @contextlib.contextmanager
    def _or_end(self, call: str, refuses: bool = True) -> Iterator[None]:
        """What is raised inside ends the engine, since something may be half done; but a refusal changes nothing."""
        try:
            yield
        except BaseException as error:
            if refuses and isinstance(error, RequestRefused):
                raise RequestError(str(error)) from None
            self._ended = self._ended or f"{type(error).__name__} in {call}: {error}"
            raise

    def _compute(self, plan: BatchPlan) -> StepResult:
        model = self.model
        result = forward(model.weights, model.config, model.numerics, self.cache, plan, self._progress)
        for entry in plan.scheduled:
            if entry.num_drafts and entry.request_id in result.errors:
                self._note_draft_error(entry.request_id, str(result.errors[entry.request_id]))
        return forward_again_without_drafts(model.weights, model.config, model.numerics, self.cache, plan, result)

    def _report(self, chosen: dict[str, list[Chosen]]) -> None:
        if self._on_logits:
            for name, tokens in chosen.items():
                for token in tokens:
                    self._on_logits(name, token.position, token.row, token.token_id)

    def _propose(self, plan: BatchPlan) -> tuple[dict[str, tuple[int, ...]], Proposals]:
        """The drafts to compute with, and all that the drafter said."""
        if self._drafter is None:
            return {}, Proposals()
        began = self._clock()
        room = self.scheduler.config.max_num_batched_tokens - plan.num_tokens
        contexts = contexts_of(plan, self._sequences, self._drafter, self._num_drafts, room)
        proposals = propose(self._drafter, contexts, self.model.config.vocab_size)
        for name, error in proposals.errors.items():
            self._note_draft_error(name, error)
        self.metrics.draft_seconds += self._clock() - began
        return proposals.fed(contexts), proposals

    def _note_draft_error(self, name: str, error: str) -> None:
        """Its drafter is not asked again."""
        self._sequences[name].draft_error = error
        self.metrics.draft_failures += 1

    def stream(self) -> Iterator[RequestOutput]:
        """Steps until nothing is left, yielding outputs as they change."""
        while self.has_unfinished:
            yield from self.step()

    def _take(self, sequence: Sequence, last: int, now: float) -> bool:
        """Notes when a token came, the last of a step, and why it ended. Where a stop string alone did that, ends it in
        the scheduler too: True, as the trace can't say it otherwise."""
        sequence.first_token, sequence.last_token = now if sequence.first_token is None else sequence.first_token, now
        sequence.note_stop(last, self.model.config.eos_token_ids)
        if sequence.stop_string is None:
            return False
        has_ended = sequence.is_finished
        if has_ended:
            sequence.finish_reason = FinishReason.STOP
        else:
            self.scheduler.finish(sequence.request_id, FinishReason.STOP)
        return not has_ended

    def _output(self, request_id: str) -> RequestOutput:
        """The request as it stands; a finished one is forgotten."""
        samples = self._requests[request_id]
        output = request_output(samples)
        if output.finished:
            del self._requests[request_id]
            for sample in samples:
                del self._sequences[sample.request_id]
                self.metrics.recomputed_tokens += sample.num_recomputed_tokens
        return output
