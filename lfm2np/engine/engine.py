"""The engine: scheduler, ragged model, cache and sampler, one step at a time.

    request -> schedule() -> BatchPlan -> forward() -> logits -> decide() -> commit, update() -> text

A request's tokens and logits depend on its prompt, parameters and seed only, whatever else runs. A request that can't
be met is refused when it is added, and numbers that overflow end their own request. Any other exception, an interrupt
too, ends the engine: the next call says so.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import NAMES
from lfm2np.arithmetic.products.blas import blas_kernel
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.answers import answer_step, contexts_of
from lfm2np.engine.audit import Audit
from lfm2np.engine.cache import Cache, default_blocks, default_window_blocks, make_cache
from lfm2np.engine.drafters import Drafter
from lfm2np.engine.outputs import RequestOutput, RunMetrics
from lfm2np.engine.proposals import Proposals, propose, require_drafter
from lfm2np.engine.samples import Answer, Group, Sample, fork_group, make_group, request_output
from lfm2np.engine.sampling.params import MAX_SEED, SamplingParams
from lfm2np.engine.step import StepResult, commit_step, forward, forward_again_without_drafts
from lfm2np.errors import Lfm2npError, RequestError, told
from lfm2np.truth.config import SLIDING
from lfm2np.values import Progress, plain_number, require_count, show
from scheduler import (
    BatchPlan,
    FinishReason,
    RequestRefused,
    Scheduler,
    SchedulerConfig,
    TraceWriter,
    reasons,
)

OnLogits = Callable[[str, int, NDArray[Any], int], None]  # request id, position, row [V], token


def require_params(name: str, params: object) -> SamplingParams:
    """The parameters, the defaults for None; RequestError for anything else."""
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(f"{name} {show(params)}: expected SamplingParams, or None")
    return SamplingParams() if params is None else params


def require_kinds(prefix_caching: object, check: object, trace: object, clock: object, room_for: object) -> None:
    """RequestError for an option of Engine that is not what it has to be; sizes are checked where they are used."""
    for name, value, expected, fits in (
        ("prefix_caching", prefix_caching, "true or false", isinstance(prefix_caching, bool | np.bool_)),
        ("check", check, "true or false", isinstance(check, bool | np.bool_)),
        ("trace", trace, "a text file that is open, or None", trace is None or hasattr(trace, "write")),
        ("clock", clock, "a function that returns seconds", callable(clock)),
        ("room_for", room_for, "a list of whole numbers, or None", room_for is None or isinstance(room_for, Iterable)),
    ):
        if not fits:
            raise RequestError(f"{name} {show(value)}: expected {expected}")


class Engine:
    """Continuous batching of one model.

    num_blocks              of the key/value pool; None: see cache.default_blocks
    num_window_blocks       of the pool of layers with a window, if there are any: see cache.default_window_blocks
    room_for                positions of each request that will come, if that is known: then the default suits them
    max_num_batched_tokens  most tokens of a step
    drafter                 proposes tokens that a step then checks (drafters.py, draft_model.py); None: no speculation
    num_speculative_tokens  most drafts of a request in a step
    check                   verify after each step that every block is free, owned or cached exactly once, and that
                            what was published holds what the reference computes for its prefix; see also `verify`
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
        room_for: Sequence[int] | None = None,
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
        check: bool = False,
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
        require_kinds(prefix_caching=prefix_caching, check=check, trace=trace, clock=clock, room_for=room_for)
        self.model, self.seed = model, require_count("seed", seed, 0, MAX_SEED)
        self.metrics = RunMetrics()
        window = model.config.sliding_window if SLIDING in model.config.layer_types else None
        if num_window_blocks is not None and window is None:
            raise RequestError(f"num_window_blocks {num_window_blocks}: this model has no layer with a window")
        try:
            config = SchedulerConfig(
                num_blocks=1 if num_blocks is None else plain_number(num_blocks),
                block_size=plain_number(block_size),
                max_num_seqs=plain_number(max_num_seqs),
                max_num_batched_tokens=plain_number(max_num_batched_tokens),
                policy=policy,
                waiting_served_ratio=plain_number(waiting_served_ratio),
                max_waiting_tokens=plain_number(max_waiting_tokens),
                prefix_caching=plain_number(prefix_caching),
                watermark=plain_number(watermark),
                sliding_window=window,
                num_window_blocks=int(window is not None)
                if num_window_blocks is None
                else plain_number(num_window_blocks),
            )
        except RequestRefused as error:
            raise RequestError(str(error)) from None
        if num_blocks is None:
            room = None if room_for is None else [require_count("room_for", each, 1, None) for each in room_for]
            config = replace(config, num_blocks=default_blocks(model.config, model.numerics, config, room))
        if window is not None and num_window_blocks is None:
            blocks = default_window_blocks(model.config, model.numerics, config, config.num_blocks)
            config = replace(config, num_window_blocks=blocks)
        self.scheduler = Scheduler(config)
        self.cache: Cache = make_cache(model.config, model.numerics, config)
        self._drafter = require_drafter(drafter)
        self._num_drafts = require_count("num_speculative_tokens", num_speculative_tokens, 1, None)
        self._groups: dict[str, Group] = {}
        self._group_of: dict[str, tuple[Group, Sample]] = {}  # by the scheduler's request id
        self._on_logits, self._progress, self._clock = on_logits, progress, clock
        self._audit = Audit(model, self.cache, self.scheduler) if check else None
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
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Queues a request. RequestError, and no other request touched, for one that can't be met."""
        self._require_idle("add_request()")
        params = require_params("params", params)
        self._require_new_id(request_id)
        group = make_group(self.model, request_id, prompt, params, priority, cache_salt, self.seed, self._clock())
        first, *forks = [sample.request for sample in group.samples]
        for request in (first, *forks):  # a sample that ended keeps its name until all have
            self._require_new_id(request.request_id)
        with self._or_end("add_request()"):
            self.scheduler.add(first, forks)
            self._register(group)
            if self.trace:
                self.trace.add(first, forks)

    def _register(self, group: Group) -> None:
        self._groups[group.request_id] = group
        for sample in group.samples:
            self._group_of[sample.request.request_id] = (group, sample)

    def abort(self, request_id: str) -> RequestOutput:
        """Ends a request, all its samples. RequestError for an id that is not known."""
        self._require_idle("abort()")
        group = self._group(request_id)
        ended = [sample for sample in group.samples if not sample.request.is_finished]
        with self._or_end("abort()"):
            for sample in ended:
                self.scheduler.abort(sample.request.request_id)
                sample.text.finish()
                if self.trace:
                    self.trace.finish(sample.request.request_id, FinishReason.ABORT)
            return self._output(group)

    def preempt(self, request_id: str) -> None:
        """Takes the memory of a request away, between steps: it is computed again, and no token of it changes.

        RequestError for an id that is not known, or has no sample that runs.
        """
        self._require_idle("preempt()")
        all_running = {request.request_id for request in self.scheduler.running}
        samples = [sample.request.request_id for sample in self._group(request_id).samples]
        running = [name for name in samples if name in all_running]
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
        parent = self._group(request_id)
        if len(parent.samples) > 1:
            raise RequestError(f"request id {request_id!r}: {len(parent.samples)} samples, expected 1 to fork")
        self._require_new_id(new_id)
        group = fork_group(parent, new_id, seed, self.seed, self._clock())
        (child,) = group.samples
        with self._or_end("fork()"):
            self.scheduler.fork(request_id, child.request)  # as large as its parent, which is not finished: it fits
            self._register(group)
            if self.trace:
                self.trace.fork(request_id, child.request)

    def _group(self, request_id: str) -> Group:
        if request_id not in self._groups:
            raise RequestError(f"request id {request_id!r}: not known, or finished")
        return self._groups[request_id]

    def _require_new_id(self, request_id: str) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request id {request_id!r}: expected a string that is not empty")
        if request_id in self._group_of:
            raise RequestError(f"request id {request_id!r} is already in use")

    def knows(self, request_id: str) -> bool:
        """Whether a request, or a sample of one, has this id and is not finished."""
        return request_id in self._group_of

    def give_back(self, outputs: Sequence[RequestOutput]) -> None:
        """Outputs of step() that are for somebody else: the next step() returns them first."""
        self._ready[:0] = outputs

    def discard(self, request_id: str) -> None:
        """Aborts a request if it is still known, unless the engine has ended, which is reported already."""
        if request_id in self._groups and self.is_usable:
            self.abort(request_id)

    @property
    def is_usable(self) -> bool:
        """False once an exception ended it."""
        return self._ended is None

    @property
    def has_unfinished(self) -> bool:
        """Also of an engine that has ended, which may have cost outputs: the next step() says so."""
        return bool(self._groups or self._ready or self._ended)

    def step(self) -> list[RequestOutput]:
        """One step; the requests that got a token or ended. An exception in it, a callback's too, ends the engine."""
        self._require_idle("step()")
        with self._or_end("step()"):
            self._is_inside = True
            answers = self._step()
            self._is_inside = False
            self._report(answers)
        ready, self._ready = self._ready, []
        return ready

    def _step(self) -> dict[str, Answer]:
        """Plans, computes, chooses and enters one step; what each sample got. Outputs are added to those ready."""
        began = self._clock()
        plan = self.scheduler.schedule()
        self.metrics.most_running = max(self.metrics.most_running, len(self.scheduler.running))
        requests = [self._group_of[entry.request_id][1].request for entry in plan.scheduled]
        drafts, proposals = self._propose(plan)
        plan = self.scheduler.add_drafts(plan, drafts)
        result = self._compute(plan)
        answers, errors = answer_step(self.model, self._group_of, result, proposals)
        tokens = {name: answer.token_ids for name, answer in answers.items()}
        commit_step(self.cache, result, {name: len(ids) for name, ids in tokens.items()})
        finished = reasons(self.scheduler.update(plan, tokens, list(errors)))
        state = (len(self.scheduler.waiting), len(self.scheduler.running), self.scheduler.pool.num_free)
        now = self._clock()
        touched, stopped = self._absorb(plan, answers, errors, began, now)
        self.metrics.count_step([len(entry.token_ids) for entry in plan.scheduled], now - began, self.scheduler)
        self._ready += [self._output(group) for group in touched]
        if self.trace:
            self.trace.step(plan, drafts, tokens, list(errors), finished, state, round(now - began, 6))
            for name in stopped:
                self.trace.finish(name, FinishReason.STOP)
        if self._audit:
            self._audit.check_step(plan, requests)
        return answers

    def _require_idle(self, call: str) -> None:
        """RequestError inside a step (a drafter's call), or after an exception that ended the engine."""
        if self._ended is not None:
            raise RequestError(f"{call}: the engine has ended, by {self._ended}; make a new one")
        if self._is_inside:
            raise RequestError(f"{call}: called from inside a step; wait until it is over")

    @contextlib.contextmanager
    def _or_end(self, call: str) -> Iterator[None]:
        """What is raised inside ends the engine, since something may be half done; but a refusal changes nothing."""
        try:
            yield
        except RequestRefused as refusal:
            raise RequestError(str(refusal)) from None
        except BaseException as error:
            self._ended = self._ended or f"{type(error).__name__} in {call}: {error}"
            raise

    def _compute(self, plan: BatchPlan) -> StepResult:
        model = self.model
        result = forward(model.weights, model.config, model.numerics, self.cache, plan, self._progress)
        for entry in plan.scheduled:
            if entry.num_drafts and entry.request_id in result.errors:
                self._note_draft_error(entry.request_id, str(result.errors[entry.request_id]))
        return forward_again_without_drafts(model.weights, model.config, model.numerics, self.cache, plan, result)

    def _report(self, answers: dict[str, Answer]) -> None:
        if self._on_logits:
            for name, answer in answers.items():
                for drawn in answer.drawn:
                    self._on_logits(name, drawn.position, drawn.row, drawn.token_id)

    def _propose(self, plan: BatchPlan) -> tuple[dict[str, tuple[int, ...]], Proposals]:
        """The drafts to compute with, and all that the drafter said."""
        if self._drafter is None:
            return {}, Proposals()
        began = self._clock()
        room = self.scheduler.config.max_num_batched_tokens - plan.num_tokens
        contexts = contexts_of(plan, self._group_of, self._drafter, self._num_drafts, room)
        proposals = propose(self._drafter, contexts, self.model.config.vocab_size)
        for name, error in proposals.errors.items():
            self._note_draft_error(name, error)
        self.metrics.draft_seconds += self._clock() - began
        return proposals.fed(contexts), proposals

    def _note_draft_error(self, name: str, error: str) -> None:
        """Its drafter is not asked again."""
        self._group_of[name][1].draft_error = error
        self.metrics.draft_failures += 1

    def verify(self) -> int:
        """How many cached blocks and running requests equal the reference; ProofError for a difference.

        A cached block must hold what its prefix demands, a running request's blocks and live state what its computed
        tokens do. Call it between steps. RequestError for an engine without `check`, which does not know the prefixes.
        """
        self._require_idle("verify()")
        if self._audit is None:
            raise RequestError("verify: the engine was made without check=True")
        return self._audit.check_memory()

    def stream(self) -> Iterator[RequestOutput]:
        """Steps until nothing is left, yielding outputs as they change."""
        while self.has_unfinished:
            yield from self.step()

    def _absorb(
        self, plan: BatchPlan, answers: dict[str, Answer], errors: dict[str, Lfm2npError], began: float, now: float
    ) -> tuple[list[Group], list[str]]:
        """Text, stop strings, times; who got anything new, in the plan's order, and whom a stop string ended."""
        touched: dict[str, Group] = {}
        stopped = []
        for entry in plan.scheduled:
            if entry.request_id in self._group_of:
                group = self._group_of[entry.request_id][0]
                group.first_scheduled = began if group.first_scheduled is None else group.first_scheduled
        for name, error in errors.items():
            group, sample = self._group_of[name]
            sample.error = told(error)
            touched[group.request_id] = group
        for name, answer in answers.items():
            group, sample = self._group_of[name]
            sample.logprobs += [drawn.logprobs for drawn in answer.drawn if drawn.logprobs is not None]
            group.first_token = now if group.first_token is None else group.first_token
            group.last_token = now
            if self._take(sample, answer, group.params):
                stopped.append(name)
            touched[group.request_id] = group
        return list(touched.values()), stopped

    def _take(self, sample: Sample, answer: Answer, params: SamplingParams) -> bool:
        """The text, why it ended, and what its drafts were worth; whether a stop string ended it and nothing else."""
        request = sample.request
        sample.drafts += answer.num_drafts
        sample.accepted += answer.num_accepted
        self.metrics.count_answer(answer.num_drafts, answer.num_accepted, len(answer.drawn))
        last = answer.drawn[-1].token_id
        is_eos = not params.ignore_eos and last in self.model.config.eos_token_ids
        if request.finish_reason is FinishReason.STOP and not is_eos:
            sample.stop_reason = last
        if sample.text.stopped_by is not None:
            sample.stop_reason = sample.text.stopped_by
            if not request.is_finished:
                self.scheduler.finish(request.request_id, FinishReason.STOP)
                return True
            request.finish_reason = FinishReason.STOP
        return False

    def _output(self, group: Group) -> RequestOutput:
        """The request as it stands; a finished one is forgotten."""
        if group.is_finished and group.request_id in self._groups:
            del self._groups[group.request_id]
            for sample in group.samples:
                del self._group_of[sample.request.request_id]
            self.metrics.recomputed_tokens += sum(sample.request.num_recomputed_tokens for sample in group.samples)
        return request_output(group)
