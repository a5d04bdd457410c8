"""The engine: scheduler, ragged model, cache and sampler, one step at a time.

    request -> schedule() -> BatchPlan -> forward() -> logits -> decide() -> commit, update() -> text

A request's tokens and logits depend on its prompt, parameters and seed only, whatever else runs. What a step would
change is computed first and then put in place, so an interrupted step is as if it had not begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from numpy.typing import NDArray

from lfm2np.audit import check_blocks, check_request
from lfm2np.cache import Cache, bytes_per_block, make_cache
from lfm2np.drafters import Draft, Drafter
from lfm2np.errors import Lfm2npError, RequestError
from lfm2np.generation import require_count, token_logprobs
from lfm2np.loading import Model
from lfm2np.model import StepResult, commit_step, forward
from lfm2np.outputs import RequestOutput, RunMetrics
from lfm2np.samples import Answer, Group, Sample, completion, make_group, request_metrics
from lfm2np.sampling_params import SamplingParams
from lfm2np.speculation import Proposals, contexts_of, decide, propose
from scheduler import (
    BatchPlan,
    FinishReason,
    Request,
    RequestRefused,
    Scheduler,
    SchedulerConfig,
    SchedulerError,
    TraceWriter,
    check,
)

DEFAULT_CACHE_BYTES = 2**30
OnLogits = Callable[[str, int, NDArray[Any], int], None]  # request id, position, row [V], token


class Engine:
    """Continuous batching of one model.

    num_blocks              of the key/value pool; None: as many as max_num_seqs full contexts need, within 1 GiB
    max_num_batched_tokens  most tokens of a step
    drafter                 proposes tokens that a step then checks (drafters.py, draft_model.py); None: no speculation
    num_speculative_tokens  most drafts of a request in a step
    check                   verify after each step that every block is free, owned or cached exactly once, and that
                            what was published holds what the reference computes for its prefix; see also `verify`
    trace                   a text file that gets the run as JSON lines (scheduler/trace.py)
    on_logits               called with each row of logits that a token was chosen from
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        policy: str = "fcfs",
        waiting_served_ratio: float = 0.3,
        max_waiting_tokens: int = 20,
        prefix_caching: bool = True,
        num_host_blocks: int = 0,
        watermark: float = 0.01,
        drafter: Drafter | None = None,
        num_speculative_tokens: int = 4,
        seed: int = 0,
        check: bool = False,
        trace: TextIO | None = None,
        on_logits: OnLogits | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        def sizes(blocks: int) -> SchedulerConfig:
            return SchedulerConfig(
                num_blocks=blocks,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                policy=policy,
                waiting_served_ratio=waiting_served_ratio,
                max_waiting_tokens=max_waiting_tokens,
                prefix_caching=prefix_caching,
                watermark=watermark,
                num_host_blocks=num_host_blocks,
            )

        self.model = model
        self.seed = seed
        self.metrics = RunMetrics()
        try:
            config = sizes(default_blocks(model, sizes(1)) if num_blocks is None else num_blocks)
        except RequestRefused as error:
            raise RequestError(str(error)) from None
        self.scheduler = Scheduler(config)
        self.cache: Cache = make_cache(model.config, model.numerics, config)
        self._drafter = drafter
        self._num_drafts = require_count("num_speculative_tokens", num_speculative_tokens, 1, None)
        self._groups: dict[str, Group] = {}
        self._group_of: dict[str, tuple[Group, Sample]] = {}  # by the scheduler's request id
        self._check, self._on_logits, self._clock = check, on_logits, clock
        self._published: dict[bytes, list[int]] = {}  # with `check`: the token prefix behind each published key
        header = {"model": model.path.name, "numerics": model.numerics.name, "seed": seed}
        self._trace = TraceWriter(trace, config, header) if trace is not None else None

    # --- requests

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Queues a request. RequestError, and no other request touched, for one that can't be met."""
        params = SamplingParams() if params is None else params
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request id {request_id!r}: expected a string that is not empty")
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is already in use")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority {priority!r}: expected a whole number")
        if not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt {cache_salt!r}: expected a string")
        group = make_group(self.model, request_id, prompt, params, priority, cache_salt, self.seed, self._clock())
        first, *forks = [sample.request for sample in group.samples]
        try:
            self.scheduler.add(first, forks)
        except RequestRefused as error:
            raise RequestError(str(error)) from None
        if self._trace:
            self._trace.add(first, forks)
        self._groups[request_id] = group
        for sample in group.samples:
            self._group_of[sample.request.request_id] = (group, sample)

    def abort(self, request_id: str) -> RequestOutput:
        """Ends a request, all its samples. RequestError for an id that is not known."""
        group = self._groups.get(request_id)
        if group is None:
            raise RequestError(f"request id {request_id!r}: not known, or finished")
        for sample in group.samples:
            if not sample.request.is_finished:
                self._finish(sample, FinishReason.ABORT)
        return self._output(group)

    def discard(self, request_id: str) -> None:
        """Aborts a request if it is still known."""
        if request_id in self._groups:
            self.abort(request_id)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._groups)

    # --- steps

    def step(self) -> list[RequestOutput]:
        """One step; the requests that got a token or ended. If it is interrupted, what ran is computed again."""
        began = self._clock()
        plan = self.scheduler.schedule()
        running = [self._group_of[entry.request_id][1].request for entry in plan.scheduled]
        drafts: dict[str, tuple[int, ...]] = {}
        try:
            drafts, proposals = self._propose(plan)
            plan = self.scheduler.add_drafts(plan, drafts)
            model = self.model
            result = forward(model.weights, model.config, model.numerics, self.cache, plan)
            answers, errors = self._answer(plan, result, proposals)
            tokens = {name: one.token_ids for name, one in answers.items()}
            commit_step(self.cache, result, {name: len(ids) for name, ids in tokens.items()})
            finished = self.scheduler.update(plan, tokens, list(errors))
        except BaseException:
            if self.scheduler.in_flight is not None:
                if self._trace:
                    self._trace.abandon(self.scheduler.in_flight, drafts)
                self.scheduler.abandon(self.scheduler.in_flight)
            raise
        now = self._clock()
        if self._trace:
            self._trace.step(self.scheduler, plan, drafts, tokens, list(errors), finished, round(now - began, 6))
        touched = self._absorb(plan, answers, errors, began, now)
        self._count(plan, now - began)
        if self._check:
            check(self.scheduler)
            self._verify_published(plan, running)
        return [self._output(group) for group in touched]

    def _propose(self, plan: BatchPlan) -> tuple[dict[str, tuple[int, ...]], Proposals]:
        """The drafts to compute with, and all that the drafter said."""
        if self._drafter is None:
            return {}, Proposals()
        began = self._clock()
        room = self.scheduler.config.max_num_batched_tokens - plan.num_tokens
        contexts = contexts_of(plan, self._group_of, self._drafter, self._num_drafts, room)
        proposals = propose(self._drafter, contexts, self.model.config.vocab_size)
        for name, error in proposals.errors.items():
            self._group_of[name][1].draft_error = error
            self.metrics.draft_failures += 1
        self.metrics.draft_seconds += self._clock() - began
        return proposals.fed(contexts), proposals

    def _verify_published(self, plan: BatchPlan, running: list[Request]) -> None:
        """With `check`: each block that this step published, against the reference."""
        pool, size = self.scheduler.pool, self.cache.block_size
        for entry, request in zip(plan.scheduled, running, strict=True):
            new: dict[int, int] = {}
            for index in range(entry.start // size, min(entry.stop // size, len(request.block_keys))):
                key = request.block_keys[index]
                if key in pool.block_of and key not in self._published:
                    self._published[key] = request.token_ids[: (index + 1) * size]
                    new[index] = pool.block_of[key]
            if new:
                check_blocks(self.model, self.cache, request.token_ids[: (max(new) + 1) * size], new)
        self._published = {key: ids for key, ids in self._published.items() if key in pool.block_of}

    def verify(self) -> int:
        """How many cached blocks and running requests were held against the reference; ProofError for a difference.

        A cached block must hold what its prefix demands, a running request's blocks and live state what its computed
        tokens do. Call it between steps. RequestError for an engine without `check`, which does not know the prefixes.
        """
        if not self._check:
            raise RequestError("verify: the engine was made without check=True")
        for key, ids in self._published.items():
            last = len(ids) // self.cache.block_size - 1
            check_blocks(self.model, self.cache, ids, {last: self.scheduler.pool.block_of[key]})
        running = [one for one in self.scheduler.running if not self.scheduler.awaits_moves(one)]
        for request in running:
            assert request.slot is not None
            computed = request.token_ids[: request.num_computed_tokens]
            if computed:
                check_request(self.model, self.cache, computed, request.block_table, request.slot)
        return len(self._published) + len(running)

    def stream(self) -> Iterator[RequestOutput]:
        """Steps until nothing is left, yielding outputs as they change."""
        while self.has_unfinished:
            yield from self.step()

    def _answer(
        self, plan: BatchPlan, result: StepResult, proposals: Proposals
    ) -> tuple[dict[str, Answer], dict[str, Lfm2npError]]:
        """Tokens for every request whose last row was computed; a failing request gets an error instead.

        Nothing of a sample changes here, so that an interrupted step leaves no trace.
        """
        answers: dict[str, Answer] = {}
        errors: dict[str, Lfm2npError] = dict(result.errors)
        for entry in plan.scheduled:
            rows = result.logits.get(entry.request_id)
            if entry.request_id in errors or rows is None:
                continue
            self._keep_prompt_logprobs(self._group_of[entry.request_id][0], entry.first_logits, entry.stop, rows)
            for name in entry.samples:
                if name not in self._group_of:
                    continue  # a sample that was aborted before it was split off
                group, sample = self._group_of[name]
                if sample.request.is_finished:
                    continue
                try:
                    draft = proposals.drafts.get(name, Draft())
                    answers[name] = decide(self.model, group, sample, entry, rows, draft)
                except Lfm2npError as error:
                    errors[name] = error
        return answers, errors

    def _keep_prompt_logprobs(self, group: Group, first: int, stop: int, rows: NDArray[Any]) -> None:
        """Row p predicts prompt token p + 1; each position is kept once, however often it is computed."""
        kept, count = group.prompt_logprobs, group.params.prompt_logprobs
        if kept is None or count is None:
            return
        prompt = group.samples[0].request.prompt_token_ids
        for position in range(first, min(stop, len(prompt) - 1)):
            if position + 1 == len(kept):
                row = rows[position - first]
                kept.append(token_logprobs(self.model.numerics, row, prompt[position + 1], count))

    def _absorb(
        self, plan: BatchPlan, answers: dict[str, Answer], errors: dict[str, Lfm2npError], began: float, now: float
    ) -> list[Group]:
        """Text, stop strings, times; who got anything new, in the plan's order."""
        touched: dict[str, Group] = {}
        for entry in plan.scheduled:
            if entry.request_id in self._group_of:
                group = self._group_of[entry.request_id][0]
                group.first_scheduled = began if group.first_scheduled is None else group.first_scheduled
        for name, error in errors.items():
            group, sample = self._group_of[name]
            sample.error = f"{type(error).__name__}: {error}"
            touched[group.request_id] = group
        for name, answer in answers.items():
            group, sample = self._group_of[name]
            for one in answer.drawn:
                if self._on_logits:
                    self._on_logits(name, one.position, one.row, one.token_id)
                if one.logprobs is not None:
                    sample.logprobs.append(one.logprobs)
            group.first_token = now if group.first_token is None else group.first_token
            group.last_token = now
            self._take(sample, answer)
            touched[group.request_id] = group
        return list(touched.values())

    def _take(self, sample: Sample, answer: Answer) -> None:
        """The text, why it ended, and what its drafts were worth."""
        request, sample.text = sample.request, answer.text
        sample.drafts += answer.num_drafts
        sample.accepted += answer.num_accepted
        self.metrics.count_answer(answer.num_drafts, answer.num_accepted, len(answer.drawn))
        last = answer.drawn[-1].token_id
        if request.finish_reason is FinishReason.STOP and last not in self.model.config.eos_token_ids:
            sample.stop_reason = last
        if answer.text.stopped_by is not None:
            sample.stop_reason = answer.text.stopped_by
            if request.is_finished:
                request.finish_reason = FinishReason.STOP
            else:
                self._finish(sample, FinishReason.STOP)

    def _finish(self, sample: Sample, reason: FinishReason) -> None:
        try:
            self.scheduler.finish(sample.request.request_id, reason)
        except SchedulerError as error:
            raise RequestError(str(error)) from None
        if self._trace:
            self._trace.finish(sample.request.request_id, reason)
        if reason is FinishReason.ABORT:
            sample.text.finish()

    def _count(self, plan: BatchPlan, seconds: float) -> None:
        run = self.metrics
        if plan.scheduled:
            longest = max(len(entry.token_ids) for entry in plan.scheduled)
            run.steps += 1
            run.padding_avoided += longest * len(plan.scheduled) - plan.num_tokens
        run.scheduled_tokens += plan.num_tokens
        run.preemptions += len(plan.preempted)
        run.prefix_hit_tokens = self.scheduler.prefix_cache.statistics.hit_tokens
        run.most_running = max(run.most_running, len(plan.scheduled))
        run.seconds += seconds

    # --- outputs

    def _output(self, group: Group) -> RequestOutput:
        """The request as it stands; a finished one is forgotten."""
        finished = group.is_finished
        if finished and group.request_id in self._groups:
            del self._groups[group.request_id]
            for sample in group.samples:
                del self._group_of[sample.request.request_id]
            self.metrics.recomputed_tokens += sum(sample.request.num_recomputed_tokens for sample in group.samples)
        prompt_logprobs = None if group.prompt_logprobs is None else tuple(group.prompt_logprobs)
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.samples[0].request.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=tuple(completion(sample, group.params) for sample in group.samples),
            finished=finished,
            metrics=request_metrics(group) if finished else None,
        )


def default_blocks(model: Model, sizes: SchedulerConfig) -> int:
    """Enough for max_num_seqs full contexts, within 1 GiB."""
    whole = -(-model.config.max_position_embeddings // sizes.block_size) * sizes.max_num_seqs
    within = DEFAULT_CACHE_BYTES // max(1, bytes_per_block(model.config, model.numerics, sizes))
    return max(1, min(whole, within))
