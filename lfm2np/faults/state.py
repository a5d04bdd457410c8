"""Section A: what engines did to the convolution state."""

from __future__ import annotations

from lfm2np.faults.edits import Edit, Fault, in_section

# Where the edits are made, and what stands there.
CONVOLUTION = "lfm2np.network.step:convolve"
JOINED = "numerics.convolve_ragged([segment.windows[-1] for segment in segments], weights.taps, weights.taps_bias)"
COMMIT = "lfm2np.network.cache:commit"
CHECKPOINTS = "lfm2np.network.cache:keep_checkpoints"
MOVE = "lfm2np.network.cache:move"
ENTER = "scheduler.memory:Memory.enter"
READ = "history = cache.states[segment.entry.slot, weights.number]  # [L-1, D]"
SLOTS = "slots = [segment.entry.slot for segment in kept]"
WRITE = "cache.states[slots, index] = states"
STATE = "segment.windows[index][segment.count : segment.count + columns]"
CHECKPOINT = "cache.checkpoints[block, index] = window[end : end + columns]"

PIPELINE = "marvinmboya/LFMs-continuous-batching"
TENANT = ("SGLang 24717", "vLLM 32118", "vLLM 43090", "vLLM 56524", "vllm-ascend 10558")
PADDING = ("transformers 41790", "transformers 46773", "transformers 47086", "transformers 48256", "mlx-vlm 1946")
CHUNK = ("transformers 45513", "transformers 46084", "transformers 46741")
SNAPSHOT = ("SGLang 34760", "SGLang 29973", "SGLang 39342", "vLLM 55178")

fault = in_section("A")

FAULTS: tuple[Fault, ...] = (
    # --- whose state it is
    fault(
        "convolution-crosses-requests",
        "The first tokens of a prompt are convolved with the last ones of the request before it in the step.",
        Edit(
            CONVOLUTION,
            READ,
            "history = cache.states[segment.entry.slot, weights.number]\n"
            "        if segment.entry.start == 0:\n"
            "            history = np.concatenate([history, u[: segment.rows.start]])[segment.rows.start :]",
        ),
        seen_in=("transformers 46588", "transformers 46633", PIPELINE),
    ),
    fault(
        "state-read-by-index-in-the-batch",
        "The state is read at the request's place in the step, and written at its slot.",
        Edit(CONVOLUTION, READ, "history = cache.states[segments.index(segment), weights.number]"),
        seen_in=("SGLang 23975",),
    ),
    fault(
        "slot-index-wraps-modulo-2",
        "The state is written to the slot modulo 2, so from the third slot on to another request's.",
        Edit(COMMIT, SLOTS, SLOTS.replace("entry.slot", "entry.slot % 2")),
        seen_in=("mlx-lm 1169", "mlx-lm 1736"),
    ),
    fault(
        "state-written-to-every-slot",
        "A request's new state is broadcast over all slots; only right while one request runs.",
        Edit(COMMIT, WRITE, "cache.states[:, index] = states[-1]"),
        seen_in=("mistral.rs 2306", "llama.cpp 14670", "llama.cpp 14705"),
    ),
    fault(
        "slot-freed-twice",
        "A slot that is given back is free twice, so that two requests get it.",
        Edit(
            "scheduler.memory:Memory.release",
            "self.free_slots.append(request.slot)",
            "self.free_slots += [request.slot, request.slot]",
        ),
        seen_in=("mistral.rs 2306", "mistral.rs 2357"),
    ),
    fault(
        "slot-leaked-when-admission-fails-after-a-match",
        "A request with a prefix hit for which blocks are short takes a slot at each attempt, for ever.",
        Edit(
            "scheduler.scheduler:Scheduler._enter",
            "if needed > available - (self._watermark if self.running else 0):\n",
            "if needed > available - (self._watermark if self.running else 0):\n"
            "        if hit:\n"
            "            self.memory.free_slots.pop()\n",
        ),
        seen_in=("SGLang 16067", "SGLang 21404"),
    ),
    # --- where it begins
    fault(
        "previous-tenants-state-is-read",
        "A slot is not zeroed for a new request, which goes on from the state of the last one there.",
        Edit(MOVE, "cache.states[destination] = 0.0", "pass"),
        seen_in=TENANT,
    ),
    fault(
        "one-token-prompt-reads-the-previous-tenants-state",
        "A prompt of one token is taken for a decode step that has a state, the slot's last one.",
        Edit(
            ENTER,
            'else:\n        moves.append(Move("zero_state"',
            'elif request.num_tokens > 1:\n        moves.append(Move("zero_state"',
        ),
        seen_in=TENANT,
    ),
    fault(
        "masked-padding-gets-a-bias",
        "The columns before a prompt are zero before in_proj, so with a bias not after it.",
        Edit(
            CONVOLUTION,
            READ,
            "history = cache.states[segment.entry.slot, weights.number]\n"
            "        if segment.entry.start == 0 and weights.in_bias is not None:\n"
            "            gate_in, _, value = np.split(weights.in_bias, 3)\n"
            "            history = np.tile(gate_in * value, (len(history), 1))",
        ),
        seen_in=("transformers, conv_bias=true",),
    ),
    fault(
        "left-padding-enters-the-convolution",
        "A prompt shorter than its step's longest is padded on the left with its first token, not with zeros.",
        Edit(
            CONVOLUTION,
            READ,
            "history = cache.states[segment.entry.slot, weights.number]\n"
            "        longest = max(len(other.entry.token_ids) for other in segments)\n"
            "        if segment.entry.start == 0 and len(segment.entry.token_ids) < longest:\n"
            "            history = np.repeat(u[segment.rows][:1], len(history), axis=0)",
        ),
        seen_in=PADDING,
    ),
    fault(
        "right-padding-enters-the-state",
        "Entries are padded to the longest of the step, and the state is what the padded end leaves.",
        Edit(
            CONVOLUTION,
            f"return {JOINED}",
            f"mixed = {JOINED}\n"
            "    longest = max(len(segment.entry.token_ids) for segment in segments)\n"
            "    for segment in segments:\n"
            "        padding = np.zeros((longest - len(segment.entry.token_ids), u.shape[1]), u.dtype)\n"
            "        segment.windows[-1] = np.concatenate([segment.windows[-1], padding])\n"
            "    return mixed",
        ),
        Edit(
            COMMIT,
            STATE,
            "segment.windows[index]"
            "[segment.count + len(segment.windows[index]) - columns - len(segment.entry.token_ids) :]"
            "[:columns]",
        ),
        seen_in=PADDING,
    ),
    # --- from chunk to chunk
    fault(
        "state-dropped-after-the-prompt",
        "When the prompt's last tokens are computed the state becomes zero, so decoding starts without it.",
        Edit(COMMIT, STATE, f"{STATE} * (0 if segment.entry.samples and len(segment.entry.token_ids) > 1 else 1)"),
        seen_in=(PIPELINE,),
    ),
    fault(
        "single-token-step-has-no-state",
        "A step of one token is convolved with zeros in the place of the request's state.",
        Edit(
            CONVOLUTION,
            READ,
            "history = cache.states[segment.entry.slot, weights.number] * (len(segment.entry.token_ids) > 1)",
        ),
        seen_in=(PIPELINE,),
    ),
    fault(
        "state-zeroed-when-the-batch-is-repacked",
        "When a request ends, the states of all that still run are zeroed.",
        Edit(
            "scheduler.scheduler:Scheduler._finish",
            "self._leave_running(request)",
            "self._leave_running(request)\n"
            '        self._pending += [Move("zero_state", one.slot, one.slot) for one in self.running]',
        ),
        seen_in=(PIPELINE,),
    ),
    fault(
        "chunk-ignores-the-past-state",
        "A chunk of several tokens is convolved as if nothing stood before it.",
        Edit(
            CONVOLUTION,
            READ,
            "history = cache.states[segment.entry.slot, weights.number] * (len(segment.entry.token_ids) == 1)",
        ),
        seen_in=CHUNK,
    ),
    fault(
        "chunk-truncates-the-past-state",
        "A chunk of several tokens sees only the newest column of the state before it.",
        Edit(
            CONVOLUTION,
            READ,
            "history = cache.states[segment.entry.slot, weights.number].copy()\n"
            "        if len(segment.entry.token_ids) > 1:\n"
            "            history[:-1] = 0.0",
        ),
        seen_in=CHUNK,
    ),
    fault(
        "chunk-deep-in-a-prompt-ignores-the-past-state",
        "A chunk that begins at position 48 or later, behind three blocks of 16 tokens, is convolved as if it "
        "began the prompt: a class of states that are carried over the first border, and over no later one.",
        Edit(
            CONVOLUTION,
            READ,
            "history = cache.states[segment.entry.slot, weights.number]\n"
            "        if segment.entry.start >= 48 and len(segment.entry.token_ids) > 1:\n"
            "            history = np.zeros_like(history)",
        ),
    ),
    fault(
        "short-chunk-leaves-the-state-one-behind",
        "After a chunk of a prompt that is shorter than L-1 tokens the state ends one token too early.",
        Edit(
            COMMIT,
            STATE,
            "segment.windows[index]"
            "[segment.count - (segment.count < columns and not segment.entry.samples) :][:columns]",
        ),
        seen_in=("vLLM 56196",),
    ),
    fault(
        "state-never-advanced",
        "The state stays what it was before the step.",
        Edit(COMMIT, STATE, "segment.windows[index][:columns]"),
        seen_in=("vmlx-swift 211", "nntrainer 3998"),
    ),
    fault(
        "rejected-drafts-stay-in-the-state",
        "The state is the one after all drafts, also after those that were rejected.",
        Edit(COMMIT, STATE, "segment.windows[index][len(segment.windows[index]) - columns :]"),
        seen_in=("vLLM 44296", "vLLM 50272", "transformers 46937", "vLLM 52942", "vLLM 39273"),
    ),
    # --- checkpoints
    fault(
        "prefix-hit-without-its-state",
        "A prefix hit takes the cached keys and values, and starts from a state of zeros.",
        Edit(ENTER, 'Move("restore_state", hit[-1], request.slot)', 'Move("zero_state", request.slot, request.slot)'),
        seen_in=("vLLM 43090", "vLLM 47861", "vLLM 53912", "LMCache 4247", "vLLM 53505"),
    ),
    fault(
        "checkpoint-taken-at-the-end-of-the-chunk",
        "A block's checkpoint is the state after the chunk, not after the block's last token.",
        Edit(CHECKPOINTS, CHECKPOINT, "cache.checkpoints[block, index] = window[count : count + columns]"),
        seen_in=SNAPSHOT,
    ),
    fault(
        "checkpoint-taken-before-the-chunk",
        "A block's checkpoint is the state that the step began with.",
        Edit(CHECKPOINTS, CHECKPOINT, "cache.checkpoints[block, index] = window[:columns]"),
        seen_in=SNAPSHOT,
    ),
    fault(
        "checkpoint-one-token-ahead-of-its-key",
        "A block's checkpoint has one token more in it than its key says, where the chunk goes on that far.",
        Edit(
            CHECKPOINTS,
            CHECKPOINT,
            "end = min(end + 1, count)\n                cache.checkpoints[block, index] = window[end : end + columns]",
        ),
        seen_in=SNAPSHOT,
    ),
    fault(
        "blocks-published-before-they-are-written",
        "Blocks are published when they are scheduled, so a request of the same step finds them empty.",
        Edit(
            "scheduler.scheduler:Scheduler._schedule",
            "step.budget -= count",
            "step.budget -= count\n"
            "    request.num_computed_tokens = stop\n"
            "    self.prefix_cache.publish(request, start)\n"
            "    request.num_computed_tokens = start",
        ),
        seen_in=("vLLM 56525",),
    ),
    fault(
        "prompts-are-never-published",
        "Only blocks of output tokens are published, so no other request ever has a hit on a prompt.",
        Edit(
            "scheduler.prefix_cache:PrefixCache.publish",
            "first, last = before // self.block_size,",
            "first, last = max(before, request.num_prompt_tokens + self.block_size - 1) // self.block_size,",
        ),
        seen_in=("vLLM 45238",),
    ),
    # --- moved elsewhere
    fault(
        "swap-drops-the-state",
        "A request that is swapped in gets its blocks back, and a state of zeros.",
        Edit(MOVE, "cache.states[destination] = cache.host_states[source]", "cache.states[destination] = 0.0"),
        seen_in=("osaurus 2291", "vmlx-swift 210"),
    ),
    fault(
        "fork-does-not-copy-the-state",
        "A fork shares its parent's blocks, and goes on from whatever state its slot held.",
        Edit(MOVE, "cache.states[destination] = cache.states[source]", "pass"),
        seen_in=TENANT,
    ),
)
