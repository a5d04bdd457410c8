"""D: which token is drawn, what is said about it, and what text it becomes."""

from __future__ import annotations

from lfm2np.faults.edits import Edit, Fault

DECIDE = "lfm2np.engine.drafting:decide"
ANSWER = "lfm2np.engine.answers:answer_step"
PENALISED = "lfm2np.sampling.choice:penalised"
STOPS = "lfm2np.sampling.stop_strings:StopChecker."
LOGPROBS = "token_logprobs(model.numerics, row, token, count)"
CHOSEN = "answers[name] = decide(model, group, sample,"

FAULTS: tuple[Fault, ...] = (
    # --- noise
    Fault(
        name="request-seed-ignored",
        section="D",
        sentence="A request's own seed is not used: its noise depends on the engine's seed and on its name.",
        seen_in=("vLLM 51226",),
        edits=(Edit("lfm2np.sampling.choice:request_seed", "if params.seed is not None:", "if False:"),),
    ),
    Fault(
        name="requests-without-a-seed-share-noise",
        section="D",
        sentence="All requests that name no seed draw the same noise at the same position.",
        seen_in=("vLLM 51226",),
        edits=(
            Edit(
                "lfm2np.sampling.choice:request_seed", 'engine + request_id.encode("utf-8", "surrogatepass")', "engine"
            ),
        ),
    ),
    Fault(
        name="noise-of-the-batch-row",
        section="D",
        sentence="Noise belongs to the row in the batch, so a request that moves to another draws other tokens.",
        seen_in=("R-KV 25",),
        edits=(Edit(DECIDE, "sample.seed, sample.index", "(sample.seed + entry.slot) % 2**64, sample.index"),),
    ),
    Fault(
        name="same-noise-for-all-samples",
        section="D",
        sentence="The n samples of a request are the same sample n times: a class of seeds shared within a request.",
        seen_in=(),
        edits=(Edit(DECIDE, "sample.seed, sample.index", "sample.seed, 0"),),
    ),
    Fault(
        name="same-noise-at-every-position",
        section="D",
        sentence="A request draws with one number for all its tokens: a class of generators that are reset each step.",
        seen_in=(),
        edits=(
            Edit(
                "lfm2np.sampling.choice:choose",
                "uniform(seed, sample_index, len(prompt_ids) + len(output_ids))",
                "uniform(seed, sample_index, len(prompt_ids))",
            ),
        ),
    ),
    # --- parameters
    Fault(
        name="parameters-of-the-first-request-for-all",
        section="D",
        sentence="Every request of a step is sampled with the parameters of its first one.",
        seen_in=("R-KV 25",),
        edits=(
            Edit(
                ANSWER, CHOSEN, "answers[name] = decide(model, groups[result.segments[0].entry.request_id][0], sample,"
            ),
        ),
    ),
    Fault(
        name="penalties-of-the-first-request-for-all",
        section="D",
        sentence="Penalties, and only these, are those of the step's first request.",
        seen_in=("vLLM 5639",),
        edits=(
            Edit(
                ANSWER,
                CHOSEN,
                "from dataclasses import replace\n"
                "                of = groups[result.segments[0].entry.request_id][0].params\n"
                "                names = 'repetition_penalty', 'frequency_penalty', 'presence_penalty'\n"
                "                params = replace(group.params, **{each: getattr(of, each) for each in names})\n"
                "                answers[name] = decide(model, replace(group, params=params), sample,",
            ),
        ),
    ),
    Fault(
        name="repetition-penalty-for-each-occurrence",
        section="D",
        sentence="A token that occurred three times is penalised three times: a class of scatters that accumulate.",
        seen_in=(),
        edits=(
            Edit(
                PENALISED,
                "values[seen] = np.where(old > 0.0, old / params.repetition_penalty, old * params.repetition_penalty)",
                "times = np.bincount(np.asarray([*prompt_ids, *output_ids], np.int64), minlength=len(values))[seen]\n"
                "            factor = params.repetition_penalty**times\n"
                "            values[seen] = np.where(old > 0.0, old / factor, old * factor)",
            ),
        ),
    ),
    Fault(
        name="repetition-penalty-ignores-the-prompt",
        section="D",
        sentence="Only tokens of the output count as repeated: a class of penalties over the wrong tokens.",
        seen_in=(),
        edits=(Edit(PENALISED, 'seen[id_array("prompt_ids", prompt_ids, len(values))] = True', "pass"),),
    ),
    Fault(
        name="frequency-penalty-counts-the-prompt",
        section="D",
        sentence="Frequency and presence penalty also count the prompt: a class of penalties over the wrong tokens.",
        seen_in=(),
        edits=(
            Edit(
                PENALISED,
                'counts = np.bincount(id_array("output_ids", output_ids, len(values)),',
                "counts = np.bincount(np.asarray([*prompt_ids, *output_ids], np.int64),",
            ),
        ),
    ),
    Fault(
        name="last-token-of-min-tokens-may-end",
        section="D",
        sentence="The end is masked for one token too few, so an output may be min_tokens long with its end: a class "
        "of comparisons off by one.",
        seen_in=(),
        edits=(
            Edit("lfm2np.sampling.choice:masked", "produced < params.min_tokens:", "produced < params.min_tokens - 1:"),
        ),
    ),
    Fault(
        name="top-p-before-temperature",
        section="D",
        sentence="The tokens that top_p keeps are chosen at temperature 1: a class of processors in the wrong order.",
        seen_in=(),
        edits=(
            Edit(
                "lfm2np.sampling.choice:filtered",
                "kept = keep(values, weights, params)",
                "cold = integer_weights(values * params.temperature) if keep is keep_top_p else weights\n"
                "        kept = keep(values, cold, params)",
            ),
        ),
    ),
    Fault(
        name="min-p-is-an-absolute-probability",
        section="D",
        sentence="Tokens less likely than min_p itself are removed, not than min_p times the likeliest one: a class of "
        "thresholds against the wrong maximum.",
        seen_in=(),
        edits=(
            Edit(
                "lfm2np.sampling.choice:keep_min_p",
                "weights >= np.ldexp(np.float64(params.min_p), WEIGHT_BITS)",
                "weights >= min(params.min_p * float(weights.sum()), float(weights.max()))",
            ),
        ),
    ),
    Fault(
        name="tie-takes-the-highest-id",
        section="D",
        sentence="Of equally large logits, greedy takes the last: a class of reductions without a defined order.",
        seen_in=(),
        edits=(
            Edit(
                "lfm2np.sampling.choice:choose",
                "int(np.argmax(process(row, params, prompt_ids, output_ids, eos_token_ids)))",
                "len(row) - 1 - int(np.argmax(process(row, params, prompt_ids, output_ids, eos_token_ids)[::-1]))",
            ),
        ),
    ),
    # --- rows and log-probabilities
    Fault(
        name="first-token-from-the-row-before",
        section="D",
        sentence="Where a step computes several tokens of a prompt, logits are those of the last but one.",
        seen_in=("transformers 40692",),
        edits=(
            Edit(
                "lfm2np.network.step:wanted_logits",
                "states[one.rows][first:]",
                "np.roll(states[one.rows], 1, axis=0)[first:]",
            ),
        ),
    ),
    Fault(
        name="prompt-logprobs-missing-over-a-cached-prefix",
        section="D",
        sentence="A prefix hit skips positions whose log-probabilities were asked for.",
        seen_in=("vLLM 3251", "vLLM 8268", "vLLM 42019"),
        edits=(
            Edit(
                "scheduler.prefix_cache:PrefixCache.find",
                "most = request.first_logits // self.block_size",
                "most = (request.num_tokens - 1) // self.block_size",
            ),
        ),
    ),
    Fault(
        name="prompt-logprobs-off-by-one",
        section="D",
        sentence="A prompt token's log-probability comes from the row that has already seen it: a class of shifts "
        "between logits and labels.",
        seen_in=(),
        edits=(
            Edit(
                "lfm2np.engine.answers:keep_prompt_logprobs",
                "rows[position - first]",
                "rows[min(position - first + 1, len(rows) - 1)]",
            ),
        ),
    ),
    Fault(
        name="logprobs-of-the-first-row",
        section="D",
        sentence="Log-probabilities of a sampled token are read in the first row of its request's logits, which is "
        "that of another token: a class of wrong rows.",
        seen_in=(),
        edits=(Edit(DECIDE, LOGPROBS, "token_logprobs(model.numerics, rows[0], token, count)"),),
    ),
    Fault(
        name="logprobs-from-an-unwritten-buffer",
        section="D",
        sentence="Log-probabilities of all but the first token of a step come from a buffer that no one wrote.",
        seen_in=("vLLM 42245",),
        edits=(Edit(DECIDE, LOGPROBS, "token_logprobs(model.numerics, row if index == 0 else 0 * row, token, count)"),),
    ),
    Fault(
        name="logprobs-after-temperature",
        section="D",
        sentence="Log-probabilities are those of the logits divided by the temperature, not of the raw ones: a class "
        "of values taken at the wrong stage.",
        seen_in=(),
        edits=(
            Edit(
                DECIDE,
                LOGPROBS,
                "token_logprobs(model.numerics, (row / (params.temperature or 1.0)).astype(row.dtype), token, count)",
            ),
        ),
    ),
    # --- text
    Fault(
        name="stop-string-only-at-the-end-of-a-token",
        section="D",
        sentence="A stop string that ends within a token's text is not seen.",
        seen_in=("vLLM 3572",),
        edits=(
            Edit(
                STOPS + "_take", "stop is not None and self._may_stop", "stop and self._may_stop and end == len(text)"
            ),
        ),
    ),
    Fault(
        name="stop-string-left-in-the-text",
        section="D",
        sentence="The text ends with the stop string, which was not to be included: a class of cuts at the wrong end.",
        seen_in=(),
        edits=(Edit(STOPS + "_take", "text[: end if self._include else end - len(stop)]", "text[:end]"),),
    ),
    Fault(
        name="held-back-text-lost-at-the-end",
        section="D",
        sentence="Text that could have begun a stop string is missing where the request ends with it.",
        seen_in=("vLLM 8468",),
        edits=(Edit(STOPS + "finish", "shown + self._held", "shown"),),
    ),
    Fault(
        name="unfinished-character-lost-at-the-end",
        section="D",
        sentence="Bytes of a character that stays unfinished vanish from a stream, where decoding has U+FFFD.",
        seen_in=("vLLM 8468",),
        edits=(Edit("lfm2np.checkpoint.tokenizer:TextStream.finish", 'self._decoder.decode(b"", final=True)', '""'),),
    ),
    Fault(
        name="characters-cut-at-token-borders",
        section="D",
        sentence="A character whose bytes come in several tokens becomes several U+FFFD.",
        seen_in=("vllm-mlx 109", "vLLM 48853"),
        edits=(
            Edit(
                "lfm2np.checkpoint.tokenizer:TextStream.push",
                "self._tokenizer.token_bytes(token_id))",
                "self._tokenizer.token_bytes(token_id), final=True)",
            ),
        ),
    ),
    Fault(
        name="double-bos-in-prompts",
        section="D",
        sentence="A prompt gets a BOS although the tokenizer, or its own text, has put one there.",
        seen_in=("vLLM 16081", "vLLM 55288"),
        edits=(Edit("lfm2np.checkpoint.tokenizer:Tokenizer.encode", "if ids[:1] != [bos]:", "if True:"),),
    ),
    Fault(
        name="double-bos-in-chats",
        section="D",
        sentence="A conversation gets a BOS although the template wrote one.",
        seen_in=("vLLM 16081", "SGLang 888"),
        edits=(
            Edit(
                "lfm2np.checkpoint.tokenizer:Tokenizer.encode_chat",
                "return ids if ids[:1] == [bos] else [bos, *ids]",
                "return [bos, *ids]",
            ),
        ),
    ),
    # --- drafts
    Fault(
        name="last-draft-accepted-unchecked",
        section="D",
        sentence="The last draft of a step is taken whatever the model says: a class of comparisons off by one.",
        seen_in=(),
        edits=(
            Edit(
                DECIDE,
                "    output.append(token)",
                "    token = entry.drafts[index] if index == entry.num_drafts - 1 else token\n"
                "        output.append(token)",
            ),
        ),
    ),
    Fault(
        name="draft-checked-by-the-row-behind-it",
        section="D",
        sentence="A draft is held against the logits that have already seen it: a class of rows off by one.",
        seen_in=(),
        edits=(
            Edit(
                DECIDE,
                "rows[len(rows) - 1 - entry.num_drafts + index]",
                "rows[len(rows) - 1 - max(0, entry.num_drafts - index - 1)]",
            ),
        ),
    ),
    Fault(
        name="tokens-after-an-accepted-end",
        section="D",
        sentence="An end of sequence among the drafts does not end the request: a class of checks made for the last "
        "token of a step only.",
        seen_in=(),
        edits=(
            Edit(
                DECIDE,
                "    text.push(token, len(output) > params.min_tokens, ending)\n"
                "        holds = index < entry.num_drafts and token == entry.drafts[index]\n"
                "        accepted += holds\n"
                "        if not holds or ending is not None or text.stopped_by is not None:",
                "    holds = index < entry.num_drafts and token == entry.drafts[index]\n"
                "        text.push(token, len(output) > params.min_tokens, None if holds else ending)\n"
                "        accepted += holds\n"
                "        if not holds or text.stopped_by is not None:",
            ),
            Edit(
                "scheduler.answers:_require_tokens",
                "if request.reason_to_end(token, request.num_output_tokens + count) is not None:",
                "if False:",
            ),
        ),
    ),
    Fault(
        name="drawn-guess-always-accepted",
        section="D",
        sentence="A guess that was drawn stays, however unlikely it is: the output has the drafter's distribution, a "
        "class of acceptance tests that accept.",
        seen_in=(),
        edits=(Edit("lfm2np.speculation.acceptance:is_accepted", "return noise * q < p << NOISE_BITS", "return True"),),
    ),
    Fault(
        name="replacement-drawn-from-the-target",
        section="D",
        sentence="What comes for a refused guess is drawn from p, not from max(p - q, 0), so that likely guesses come "
        "too often: a class of biased corrections.",
        seen_in=(),
        edits=(
            Edit(
                "lfm2np.speculation.acceptance:replacement",
                "max(0, int(target[i]) * q_total - int(weights[i]) * p_total)",
                "int(target[i])",
            ),
        ),
    ),
    Fault(
        name="noise-of-acceptance-draws-the-replacement",
        section="D",
        sentence="One number decides whether a guess is refused and what replaces it: a class of noise used twice.",
        seen_in=(),
        edits=(Edit("lfm2np.speculation.acceptance:next_token", "position, REPLACE)", "position, ACCEPT)"),),
    ),
)
