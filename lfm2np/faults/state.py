"""Section A: what engines did to the convolution state."""

from __future__ import annotations

from lfm2np.faults.edits import Edit, Fault

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

FAULTS: tuple[Fault, ...] = (
    # --- whose state it is
    Fault(
        name="convolution-crosses-requests",
        section="A",
        sentence="The first tokens of a prompt are convolved with the last ones of the request before it in the step.",
        seen_in=("transformers 46588", "transformers 46633", PIPELINE),
        edits=(
            Edit(
                CONVOLUTION,
                READ,
                "history = cache.states[segment.entry.slot, weights.number]\n"
                "        if segment.entry.start == 0:\n"
                "            history = np.concatenate([history, u[: segment.rows.start]])[segment.rows.start :]",
            ),
        ),
    ),
    Fault(
        name="state-read-by-index-in-the-batch",
        section="A",
        sentence="The state is read at the request's place in the step, and written at its slot.",
        seen_in=("SGLang 23975",),
        edits=(Edit(CONVOLUTION, READ, "history = cache.states[segments.index(segment), weights.number]"),),
    ),
    Fault(
        name="slot-index-wraps-modulo-2",
        section="A",
        sentence="The state is written to the slot modulo 2, so from the third slot on to another request's.",
        seen_in=("mlx-lm 1169", "mlx-lm 1736"),
        edits=(Edit(COMMIT, SLOTS, SLOTS.replace("entry.slot", "entry.slot % 2")),),
    ),
    Fault(
        name="state-written-to-every-slot",
        section="A",
        sentence="A request's new state is broadcast over all slots; only right while one request runs.",
        seen_in=("mistral.rs 2306", "llama.cpp 14670", "llama.cpp 14705"),
        edits=(Edit(COMMIT, WRITE, "cache.states[:, index] = states[-1]"),),
    ),
    Fault(
        name="slot-freed-twice",
        section="A",
        sentence="A slot that is given back is free twice, so that two requests get it.",
        seen_in=("mistral.rs 2306", "mistral.rs 2357"),
        edits=(
            Edit(
                "scheduler.memory:Memory.release",
                "self.free_slots.append(request.slot)",
                "self.free_slots += [request.slot, request.slot]",
            ),
        ),
    ),
    Fault(
        name="slot-leaked-when-admission-fails-after-a-match",
        section="A",
        sentence="A request with a prefix hit for which blocks are short takes a slot at each attempt, for ever.",
        seen_in=("SGLang 16067", "SGLang 21404"),
        edits=(
            Edit(
                "scheduler.scheduler:Scheduler._enter",
                "if needed > available - (self._watermark if self.running else 0):\n",
                "if needed > available - (self._watermark if self.running else 0):\n"
                "        if hit:\n"
                "            self.memory.free_slots.pop()\n",
            ),
        ),
    ),
    # --- where it begins
    Fault(
        name="previous-tenants-state-is-read",
        section="A",
        sentence="A slot is not zeroed for a new request, which goes on from the state of the last one there.",
        seen_in=TENANT,
        edits=(Edit(MOVE, "cache.states[destination] = 0.0", "pass"),),
    ),
    Fault(
        name="one-token-prompt-reads-the-previous-tenants-state",
        section="A",
        sentence="A prompt of one token is taken for a decode step that has a state, the slot's last one.",
        seen_in=TENANT,
        edits=(
            Edit(
                ENTER,
                'else:\n        moves.append(Move("zero_state"',
                'elif request.num_tokens > 1:\n        moves.append(Move("zero_state"',
            ),
        ),
    ),
    Fault(
        name="masked-padding-gets-a-bias",
        section="A",
        sentence="The columns before a prompt are zero before in_proj, so with a bias not after it.",
        seen_in=("transformers, conv_bias=true",),
        edits=(
            Edit(
                CONVOLUTION,
                READ,
                "history = cache.states[segment.entry.slot, weights.number]\n"
                "        if segment.entry.start == 0 and weights.in_bias is not None:\n"
                "            gate_in, _, value = np.split(weights.in_bias, 3)\n"
                "            history = np.tile(gate_in * value, (len(history), 1))",
            ),
        ),
    ),
    Fault(
        name="left-padding-enters-the-convolution",
        section="A",
        sentence="A prompt shorter than its step's longest is padded on the left with its first token, not with zeros.",
        seen_in=PADDING,
        edits=(
            Edit(
                CONVOLUTION,
                READ,
                "history = cache.states[segment.entry.slot, weights.number]\n"
                "        longest = max(len(other.entry.token_ids) for other in segments)\n"
                "        if segment.entry.start == 0 and len(segment.entry.token_ids) < longest:\n"
                "            history = np.repeat(u[segment.rows][:1], len(history), axis=0)",
            ),
        ),
    ),
    Fault(
        name="right-padding-enters-the-state",
        section="A",
        sentence="Entries are padded to the longest of the step, and the state is what the padded end leaves.",
        seen_in=PADDING,
        edits=(
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
        ),
    ),
    # --- from chunk to chunk
    Fault(
        name="state-dropped-after-the-prompt",
        section="A",
        sentence="When the prompt's last tokens are computed the state becomes zero, so decoding starts without it.",
        seen_in=(PIPELINE,),
        edits=(
            Edit(
                COMMIT,
                STATE,
                f"{STATE} * (0 if segment.entry.samples and len(segment.entry.token_ids) > 1 else 1)",
            ),
        ),
    ),
    Fault(
        name="single-token-step-has-no-state",
        section="A",
        sentence="A step of one token is convolved with zeros in the place of the request's state.",
        seen_in=(PIPELINE,),
        edits=(
            Edit(
                CONVOLUTION,
                READ,
                "history = cache.states[segment.entry.slot, weights.number] * (len(segment.entry.token_ids) > 1)",
            ),
        ),
    ),
    Fault(
        name="state-zeroed-when-the-batch-is-repacked",
        section="A",
        sentence="When a request ends, the states of all that still run are zeroed.",
        seen_in=(PIPELINE,),
        edits=(
            Edit(
                "scheduler.scheduler:Scheduler._finish",
                "self._leave_running(request)",
                "self._leave_running(request)\n"
                '        self._pending += [Move("zero_state", one.slot, one.slot) for one in self.running]',
            ),
        ),
    ),
    Fault(
        name="chunk-ignores-the-past-state",
        section="A",
        sentence="A chunk of several tokens is convolved as if nothing stood before it.",
        seen_in=CHUNK,
        edits=(
            Edit(
                CONVOLUTION,
                READ,
                "history = cache.states[segment.entry.slot, weights.number] * (len(segment.entry.token_ids) == 1)",
            ),
        ),
    ),
    Fault(
        name="chunk-truncates-the-past-state",
        section="A",
        sentence="A chunk of several tokens sees only the newest column of the state before it.",
        seen_in=CHUNK,
        edits=(
            Edit(
                CONVOLUTION,
                READ,
                "history = cache.states[segment.entry.slot, weights.number].copy()\n"
                "        if len(segment.entry.token_ids) > 1:\n"
                "            history[:-1] = 0.0",
            ),
        ),
    ),
    Fault(
        name="chunk-deep-in-a-prompt-ignores-the-past-state",
        section="A",
        sentence="A chunk that begins at position 48 or later, behind three blocks of 16 tokens, is convolved as if it "
        "began the prompt: a class of states that are carried over the first border, and over no later one.",
        seen_in=(),
        edits=(
            Edit(
                CONVOLUTION,
                READ,
                "history = cache.states[segment.entry.slot, weights.number]\n"
                "        if segment.entry.start >= 48 and len(segment.entry.token_ids) > 1:\n"
                "            history = np.zeros_like(history)",
            ),
        ),
    ),
    Fault(
        name="short-chunk-leaves-the-state-one-behind",
        section="A",
        sentence="After a chunk of a prompt that is shorter than L-1 tokens the state ends one token too early.",
        seen_in=("vLLM 56196",),
        edits=(
            Edit(
                COMMIT,
                STATE,
                "segment.windows[index]"
                "[segment.count - (segment.count < columns and not segment.entry.samples) :][:columns]",
            ),
        ),
    ),
    Fault(
        name="state-never-advanced",
        section="A",
        sentence="The state stays what it was before the step.",
        seen_in=("vmlx-swift 211", "nntrainer 3998"),
        edits=(Edit(COMMIT, STATE, "segment.windows[index][:columns]"),),
    ),
    Fault(
        name="rejected-drafts-stay-in-the-state",
        section="A",
        sentence="The state is the one after all drafts, also after those that were rejected.",
        seen_in=("vLLM 44296", "vLLM 50272", "transformers 46937", "vLLM 52942", "vLLM 39273"),
        edits=(Edit(COMMIT, STATE, "segment.windows[index][len(segment.windows[index]) - columns :]"),),
    ),
    # --- checkpoints
    Fault(
        name="prefix-hit-without-its-state",
        section="A",
        sentence="A prefix hit takes the cached keys and values, and starts from a state of zeros.",
        seen_in=("vLLM 43090", "vLLM 47861", "vLLM 53912", "LMCache 4247", "vLLM 53505"),
        edits=(
            Edit(
                ENTER, 'Move("restore_state", hit[-1], request.slot)', 'Move("zero_state", request.slot, request.slot)'
            ),
        ),
    ),
    Fault(
        name="checkpoint-taken-at-the-end-of-the-chunk",
        section="A",
        sentence="A block's checkpoint is the state after the chunk, not after the block's last token.",
        seen_in=SNAPSHOT,
        edits=(Edit(CHECKPOINTS, CHECKPOINT, "cache.checkpoints[block, index] = window[count : count + columns]"),),
    ),
    Fault(
        name="checkpoint-taken-before-the-chunk",
        section="A",
        sentence="A block's checkpoint is the state that the step began with.",
        seen_in=SNAPSHOT,
        edits=(Edit(CHECKPOINTS, CHECKPOINT, "cache.checkpoints[block, index] = window[:columns]"),),
    ),
    Fault(
        name="checkpoint-one-token-ahead-of-its-key",
        section="A",
        sentence="A block's checkpoint has one token more in it than its key says, where the chunk goes on that far.",
        seen_in=SNAPSHOT,
        edits=(
            Edit(
                CHECKPOINTS,
                CHECKPOINT,
                "end = min(end + 1, count)\n"
                "                cache.checkpoints[block, index] = window[end : end + columns]",
            ),
        ),
    ),
    Fault(
        name="blocks-published-before-they-are-written",
        section="A",
        sentence="Blocks are published when they are scheduled, so a request of the same step finds them empty.",
        seen_in=("vLLM 56525",),
        edits=(
            Edit(
                "scheduler.scheduler:Scheduler._schedule",
                "step.budget -= count",
                "step.budget -= count\n"
                "    request.num_computed_tokens = stop\n"
                "    self.prefix_cache.publish(request, start)\n"
                "    request.num_computed_tokens = start",
            ),
        ),
    ),
    Fault(
        name="prompts-are-never-published",
        section="A",
        sentence="Only blocks of output tokens are published, so no other request ever has a hit on a prompt.",
        seen_in=("vLLM 45238",),
        edits=(
            Edit(
                "scheduler.prefix_cache:PrefixCache.publish",
                "first, last = before // self.block_size,",
                "first, last = max(before, request.num_prompt_tokens + self.block_size - 1) // self.block_size,",
            ),
        ),
    ),
    # --- moved elsewhere
    Fault(
        name="swap-drops-the-state",
        section="A",
        sentence="A request that is swapped in gets its blocks back, and a state of zeros.",
        seen_in=("osaurus 2291", "vmlx-swift 210"),
        edits=(Edit(MOVE, "cache.states[destination] = cache.host_states[source]", "cache.states[destination] = 0.0"),),
    ),
    Fault(
        name="fork-does-not-copy-the-state",
        section="A",
        sentence="A fork shares its parent's blocks, and goes on from whatever state its slot held.",
        seen_in=TENANT,
        edits=(Edit(MOVE, "cache.states[destination] = cache.states[source]", "pass"),),
    ),
)
