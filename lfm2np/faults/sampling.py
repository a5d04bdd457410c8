"""D: which token is drawn, and what is said about it."""

from __future__ import annotations

from lfm2np.faults.edits import Edit, Fault

DECIDE = "lfm2np.engine.drafting:decide"
ANSWER = "lfm2np.engine.answers:answer_step"
PENALISED = "lfm2np.sampling.choice:penalised"
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
        name="engine-seed-ignored",
        section="D",
        sentence="Requests without a seed draw the same under any seed of the engine: a class of options that are read "
        "and not passed on.",
        seen_in=(),
        edits=(
            Edit(
                "lfm2np.sampling.choice:request_seed", 'require_count("engine_seed", engine_seed, 0, MAX_SEED)', "(0)"
            ),
        ),
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
        name="presence-penalty-for-each-occurrence",
        section="D",
        sentence="The presence penalty is subtracted in the place of the frequency penalty, too.",
        seen_in=("mlc-llm 1693",),
        edits=(Edit(PENALISED, "params.frequency_penalty * counts", "params.presence_penalty * counts"),),
    ),
    Fault(
        name="negative-penalties-ignored",
        section="D",
        sentence="Frequency and presence penalties below zero change nothing.",
        seen_in=("vLLM 913",),
        edits=(
            Edit(
                PENALISED,
                "if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:",
                "if params.frequency_penalty > 0.0 or params.presence_penalty > 0.0:",
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
                "states[segment.rows][first:]",
                "np.roll(states[segment.rows], 1, axis=0)[first:]",
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
)
