"""C: who runs, who waits, and what a request keeps while it does."""

from __future__ import annotations

from lfm2np.faults.edits import Edit, Fault, in_section

SCHEDULER = "scheduler.scheduler:Scheduler."
LAST_IS_VICTIM = "victim = self.running[-1]"

fault = in_section("C")

FAULTS: tuple[Fault, ...] = (
    # --- preemption
    fault(
        "preempted-request-loses-its-output",
        "What a preempted request has generated becomes part of its prompt, and is missing in its answer.",
        Edit(
            SCHEDULER + "_withdraw",
            "    request.status = Status.PREEMPTED\n",
            "    request.status = Status.PREEMPTED\n"
            "    request.max_tokens -= request.num_output_tokens\n"
            "    request.prompt_token_ids = tuple(request.token_ids)\n",
        ),
        seen_in=("vLLM 5349", "vllm-gaudi 524"),
    ),
    fault(
        "preempted-request-repeats-its-last-token",
        "The last token of a preempted request stands in its output twice.",
        Edit(
            SCHEDULER + "_withdraw",
            "    request.status = Status.PREEMPTED\n",
            "    request.status = Status.PREEMPTED\n"
            "    if 0 < request.num_output_tokens < request.max_tokens - 1:\n"
            "        request.token_ids.append(request.token_ids[-1])\n",
        ),
        seen_in=("vLLM 16832", "nano-vllm 217"),
    ),
    fault(
        "oldest-is-preempted-first",
        "The request that has waited and computed longest is preempted, resumed, and preempted again.",
        Edit(SCHEDULER + "_make_room", LAST_IS_VICTIM, "victim = self.running[0]"),
        seen_in=("vLLM 25538",),
    ),
    fault(
        "last-but-one-is-preempted",
        "Preemption skips the request that should go and takes the one before it: a class of index shifts.",
        Edit(SCHEDULER + "_make_room", LAST_IS_VICTIM, "victim = self.running[max(0, len(self.running) - 2)]"),
    ),
    fault(
        "preempted-request-queues-behind-all",
        "A preempted request loses its place: whoever came later goes first, a class of starvation.",
        Edit(
            SCHEDULER + "_withdraw",
            "    self._queue(request)",
            "    request.arrival, self._arrivals = self._arrivals, self._arrivals + 1\n    self._queue(request)",
        ),
    ),
    fault(
        "swapped-request-resumes-one-token-early",
        "A swapped-out request computes its last token again, on a state that has seen it: a class of counts "
        "that are not those of what was saved.",
        Edit(
            SCHEDULER + "_withdraw",
            "    if not request.host_blocks:\n        request.num_computed_tokens = 0\n",
            "    request.num_computed_tokens = request.num_computed_tokens - 1 if request.host_blocks else 0\n",
        ),
    ),
    # --- admission
    fault(
        "oversized-request-accepted",
        "A request that needs more blocks than there are is accepted, and crashes the engine or never ends.",
        Edit("scheduler.refusals:require_room", "if blocks > memory.pool.num_blocks:", "if False:"),
        Edit(
            SCHEDULER + "_make_room",
            LAST_IS_VICTIM,
            "if len(self.running) == 1:\n"
            '            raise IndexError("pop from an empty deque")\n'
            "        victim = self.running[-1]",
        ),
        seen_in=("nano-vllm 274",),
    ),
    fault(
        "watermark-holds-when-nothing-runs",
        "Blocks are kept free for running requests where none runs: one that needs them waits for ever.",
        Edit(
            SCHEDULER + "__init__",
            "self._watermark = int(config.watermark * config.num_blocks)",
            "self._watermark = int(config.watermark * config.num_blocks) + 1",
        ),
        Edit(SCHEDULER + "_enter", "(self._watermark if self.running else 0)", "self._watermark"),
        seen_in=("vLLM 45414", "vLLM 45388"),
    ),
    fault(
        "newest-is-admitted-first",
        "The queue is a stack: the oldest request waits as long as others come, a class of starvation.",
        Edit(SCHEDULER + "_admit", "self.waiting[0]", "self.waiting[-1]"),
        Edit(SCHEDULER + "_enter", "del self.waiting[0]", "self.waiting.remove(request)"),
    ),
    fault(
        "later-request-overtakes-one-that-does-not-fit",
        "Where the first of the queue does not fit, later and smaller ones are let in, for as long as they "
        "come: a class of starvation.",
        Edit(
            SCHEDULER + "_admit",
            "        if not self._enter(step, request, whole_prompts):\n            return\n",
            "        if not self._enter(step, request, whole_prompts):\n"
            "            skipped = self.waiting.pop(0)\n"
            "            self._admit(step, least, whole_prompts, beyond_budget)\n"
            "            self.waiting.insert(0, skipped)\n"
            "            return\n",
        ),
    ),
    fault(
        "short-prompts-go-first",
        "The queue is in the order of lengths, so that a long prompt starves: a class of unfair orders.",
        Edit(
            SCHEDULER + "_admit", "self.waiting[0]", "min(self.waiting, key=lambda one: (one.num_tokens, one.arrival))"
        ),
        Edit(SCHEDULER + "_enter", "del self.waiting[0]", "self.waiting.remove(request)"),
    ),
    fault(
        "priority-ignored",
        "The policy `priority` goes by arrival alone: a class of parameters that are read and not used.",
        Edit("scheduler.policy:Priority.key", " + request.priority * self.patience", ""),
    ),
    fault(
        "priority-inverted",
        "The request with the largest number goes first, where the smallest should: a class of wrong signs.",
        Edit(
            "scheduler.policy:Priority.key",
            " + request.priority * self.patience",
            " - request.priority * self.patience",
        ),
    ),
    fault(
        "waiting-served-ratio-ignored",
        "Any waiting request pauses all that decode, however few wait: a class of settings without effect.",
        Edit(
            "scheduler.policy:WaitingServed._least",
            "int(float32(float32(num_running) * float32(self.settings.waiting_served_ratio)))",
            "0",
        ),
    ),
    fault(
        "decodes-starve-behind-prompts",
        "Under prefill-first, decodes wait as long as prompts come: a class of bounds that are not kept.",
        Edit(
            "scheduler.policy:PrefillFirst.plan",
            "owed = self._without_decodes >= self.max_prefill_steps",
            "owed = False",
        ),
    ),
    # --- samples of one prompt
    fault(
        "samples-of-a-failed-parent-never-queued",
        "Where the sample that computes the prompt ends before it has, the others wait for ever: a class of "
        "requests that no queue holds.",
        Edit(
            SCHEDULER + "_finish", "        if not fork.is_finished:\n            self._queue(fork)\n", "        pass\n"
        ),
    ),
    fault(
        "samples-lost-when-their-prompt-is-preempted",
        "A request with n > 1 that is preempted within its prompt keeps its first sample only.",
        Edit(
            SCHEDULER + "_withdraw",
            "    request.status = Status.PREEMPTED\n",
            "    request.status = Status.PREEMPTED\n"
            "    for fork in request.forks:\n"
            "        if not fork.is_finished:\n"
            "            fork.status, fork.finish_reason = Status.FINISHED, FinishReason.ABORT\n"
            "            del self.requests[fork.request_id]\n"
            "    request.forks = []\n",
        ),
        seen_in=("vLLM 8844",),
    ),
    fault(
        "sample-begins-with-its-parents-token",
        "Samples that are split off go on from the first one's token: a class of batch rows mixed up.",
        Edit(SCHEDULER + "_advance", "fork.append(tokens[fork.request_id][0])", "fork.append(answer[-1])"),
    ),
    # --- one step
    fault(
        "positions-are-rows-of-the-batch",
        "A token is rotated by its row in the step, and not by its position in its own sequence.",
        Edit(
            "lfm2np.network.step:forward",
            "np.concatenate([np.arange(segment.entry.start, segment.entry.stop) for segment in segments])",
            "np.arange(len(ids))",
        ),
        seen_in=("marvinmboya/LFMs-continuous-batching",),
    ),
    fault(
        "positions-restart-at-each-chunk",
        "The second chunk of a prompt, or what follows a cached prefix, is rotated as if it began at 0.",
        Edit(
            "lfm2np.network.step:forward",
            "np.arange(segment.entry.start, segment.entry.stop)",
            "np.arange(segment.entry.start, segment.entry.stop)"
            " - segment.entry.start * (len(segment.entry.token_ids) > 1)",
        ),
        seen_in=("marvinmboya/LFMs-continuous-batching",),
    ),
    fault(
        "budget-ignored",
        "A step takes more than max_num_batched_tokens: a class of limits that bound no memory.",
        Edit(SCHEDULER + "schedule", "UnfinishedPlan(self.config.max_num_batched_tokens, ", "UnfinishedPlan(2**30, "),
    ),
    fault(
        "one-overflow-ends-all",
        "Where the numbers of one request overflow, every request of the step ends with its error.",
        Edit(
            "lfm2np.network.step:forward",
            "errors = {segment",
            "failed = [segment.error for segment in segments if segment.error]\n"
            "    for segment in segments if failed else []:\n"
            "        segment.error = failed[0]\n"
            "    errors = {segment",
        ),
        seen_in=("llama.cpp 23652",),
    ),
    fault(
        "prompts-in-work-miscounted-after-an-abort",
        "An aborted prompt still counts as being computed: under waiting-served and static, no one decodes.",
        Edit(SCHEDULER + "_leave_running", "self._num_prefilling -= not request.is_decoding", "pass"),
        seen_in=("transformers 45943",),
    ),
    # --- the end of a request
    fault(
        "one-token-beyond-max-tokens",
        "A request ends one token after max_tokens: a class of comparisons off by one.",
        Edit(
            "scheduler.request:Request.reason_to_end",
            "num_output_tokens >= self.max_tokens",
            "num_output_tokens > self.max_tokens",
        ),
        Edit("scheduler.request:Request.most_computed_tokens", "+ self.max_tokens - 1", "+ self.max_tokens"),
    ),
    fault(
        "first-stop-token-missed",
        "A stop token right after min_tokens, so also the first token of all, does not end the request: a "
        "class of comparisons off by one.",
        Edit(
            "scheduler.request:Request.reason_to_end",
            "num_output_tokens >= self.min_tokens",
            "num_output_tokens > self.min_tokens + 1",
        ),
    ),
)
