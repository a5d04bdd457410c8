"""D: which token is drawn, and what is said about it."""

from __future__ import annotations

from lfm2np.faults.edits import Edit, Fault, in_section

DECIDE = "lfm2np.engine.drafting:decide"
ANSWER = "lfm2np.engine.answers:answer_step"
PENALISED = "lfm2np.sampling.choice:penalised"
LOGPROBS = "token_logprobs(model.numerics, row, token, count)"
CHOSEN = "answers[name] = decide(model, group, sample,"

fault = in_section("D")

FAULTS: tuple[Fault, ...] = (
    # --- noise
    fault(
        "request-seed-ignored",
        "A request's own seed is not used: its noise depends on the engine's seed and on its name.",
        Edit("lfm2np.sampling.choice:request_seed", "if params.seed is not None:", "if False:"),
        seen_in=("vLLM 51226",),
    ),
    fault(
        "engine-seed-ignored",
        "Requests without a seed draw the same under any seed of the engine: a class of options that are read "
        "and not passed on.",
        Edit("lfm2np.sampling.choice:request_seed", 'require_count("engine_seed", engine_seed, 0, MAX_SEED)', "(0)"),
    ),
    fault(
        "requests-without-a-seed-share-noise",
        "All requests that name no seed draw the same noise at the same position.",
        Edit("lfm2np.sampling.choice:request_seed", 'engine + request_id.encode("utf-8", "surrogatepass")', "engine"),
        seen_in=("vLLM 51226",),
    ),
    fault(
        "noise-of-the-batch-row",
        "Noise belongs to the row in the batch, so a request that moves to another draws other tokens.",
        Edit(DECIDE, "sample.seed, sample.index", "(sample.seed + entry.slot) % 2**64, sample.index"),
        seen_in=("R-KV 25",),
    ),
    fault(
        "same-noise-for-all-samples",
        "The n samples of a request are the same sample n times: a class of seeds shared within a request.",
        Edit(DECIDE, "sample.seed, sample.index", "sample.seed, 0"),
    ),
    fault(
        "same-noise-at-every-position",
        "A request draws with one number for all its tokens: a class of generators that are reset each step.",
        Edit(
            "lfm2np.sampling.choice:choose",
            "uniform(seed, sample_index, len(prompt_ids) + len(output_ids))",
            "uniform(seed, sample_index, len(prompt_ids))",
        ),
    ),
    # --- parameters
    fault(
        "parameters-of-the-first-request-for-all",
        "Every request of a step is sampled with the parameters of its first one.",
        Edit(ANSWER, CHOSEN, "answers[name] = decide(model, groups[result.segments[0].entry.request_id][0], sample,"),
        seen_in=("R-KV 25",),
    ),
    fault(
        "penalties-of-the-first-request-for-all",
        "Penalties, and only these, are those of the step's first request.",
        Edit(
            ANSWER,
            CHOSEN,
            "from dataclasses import replace\n"
            "                of = groups[result.segments[0].entry.request_id][0].params\n"
            "                names = 'repetition_penalty', 'frequency_penalty', 'presence_penalty'\n"
            "                params = replace(group.params, **{each: getattr(of, each) for each in names})\n"
            "                answers[name] = decide(model, replace(group, params=params), sample,",
        ),
        seen_in=("vLLM 5639",),
    ),
    fault(
        "repetition-penalty-for-each-occurrence",
        "A token that occurred three times is penalised three times: a class of scatters that accumulate.",
        Edit(
            PENALISED,
            "values[seen] = np.where(old > 0.0, old / params.repetition_penalty, old * params.repetition_penalty)",
            "times = np.bincount(np.asarray([*prompt_ids, *output_ids], np.int64), minlength=len(values))[seen]\n"
            "            factor = params.repetition_penalty**times\n"
            "            values[seen] = np.where(old > 0.0, old / factor, old * factor)",
        ),
    ),
    fault(
        "repetition-penalty-ignores-the-prompt",
        "Only tokens of the output count as repeated: a class of penalties over the wrong tokens.",
        Edit(PENALISED, 'seen[id_array("prompt_ids", prompt_ids, len(values))] = True', "pass"),
    ),
    fault(
        "frequency-penalty-counts-the-prompt",
        "Frequency and presence penalty also count the prompt: a class of penalties over the wrong tokens.",
        Edit(
            PENALISED,
            'counts = np.bincount(id_array("output_ids", output_ids, len(values)),',
            "counts = np.bincount(np.asarray([*prompt_ids, *output_ids], np.int64),",
        ),
    ),
    fault(
        "presence-penalty-for-each-occurrence",
        "The presence penalty is subtracted in the place of the frequency penalty, too.",
        Edit(PENALISED, "params.frequency_penalty * counts", "params.presence_penalty * counts"),
        seen_in=("mlc-llm 1693",),
    ),
    fault(
        "negative-penalties-ignored",
        "Frequency and presence penalties below zero change nothing.",
        Edit(
            PENALISED,
            "if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:",
            "if params.frequency_penalty > 0.0 or params.presence_penalty > 0.0:",
        ),
        seen_in=("vLLM 913",),
    ),
    fault(
        "last-token-of-min-tokens-may-end",
        "The end is masked for one token too few, so an output may be min_tokens long with its end: a class "
        "of comparisons off by one.",
        Edit("lfm2np.sampling.choice:masked", "produced < params.min_tokens:", "produced < params.min_tokens - 1:"),
    ),
    fault(
        "top-p-before-temperature",
        "The tokens that top_p keeps are chosen at temperature 1: a class of processors in the wrong order.",
        Edit(
            "lfm2np.sampling.choice:filtered",
            "kept = keep(values, weights, params)",
            "cold = integer_weights(values * params.temperature) if keep is keep_top_p else weights\n"
            "        kept = keep(values, cold, params)",
        ),
    ),
    fault(
        "min-p-is-an-absolute-probability",
        "Tokens less likely than min_p itself are removed, not than min_p times the likeliest one: a class of "
        "thresholds against the wrong maximum.",
        Edit(
            "lfm2np.sampling.choice:keep_min_p",
            "weights >= np.ldexp(np.float64(params.min_p), WEIGHT_BITS)",
            "weights >= min(params.min_p * float(weights.sum()), float(weights.max()))",
        ),
    ),
    fault(
        "tie-takes-the-highest-id",
        "Of equally large logits, greedy takes the last: a class of reductions without a defined order.",
        Edit(
            "lfm2np.sampling.choice:choose",
            "int(np.argmax(process(row, params, prompt_ids, output_ids, eos_token_ids)))",
            "len(row) - 1 - int(np.argmax(process(row, params, prompt_ids, output_ids, eos_token_ids)[::-1]))",
        ),
    ),
    # --- rows and log-probabilities
    fault(
        "first-token-from-the-row-before",
        "Where a step computes several tokens of a prompt, logits are those of the last but one.",
        Edit(
            "lfm2np.network.step:wanted_logits",
            "states[segment.rows][first:]",
            "np.roll(states[segment.rows], 1, axis=0)[first:]",
        ),
        seen_in=("transformers 40692",),
    ),
    fault(
        "prompt-logprobs-missing-over-a-cached-prefix",
        "A prefix hit skips positions whose log-probabilities were asked for.",
        Edit(
            "scheduler.prefix_cache:PrefixCache.find",
            "most = request.first_logits // self.block_size",
            "most = (request.num_tokens - 1) // self.block_size",
        ),
        seen_in=("vLLM 3251", "vLLM 8268", "vLLM 42019"),
    ),
    fault(
        "prompt-logprobs-off-by-one",
        "A prompt token's log-probability comes from the row that has already seen it: a class of shifts "
        "between logits and labels.",
        Edit(
            "lfm2np.engine.answers:keep_prompt_logprobs",
            "rows[position - first]",
            "rows[min(position - first + 1, len(rows) - 1)]",
        ),
    ),
    fault(
        "logprobs-of-the-first-row",
        "Log-probabilities of a sampled token are read in the first row of its request's logits, which is "
        "that of another token: a class of wrong rows.",
        Edit(DECIDE, LOGPROBS, "token_logprobs(model.numerics, rows[0], token, count)"),
    ),
    fault(
        "logprobs-from-an-unwritten-buffer",
        "Log-probabilities of all but the first token of a step come from a buffer that no one wrote.",
        Edit(DECIDE, LOGPROBS, "token_logprobs(model.numerics, row if index == 0 else 0 * row, token, count)"),
        seen_in=("vLLM 42245",),
    ),
    fault(
        "logprobs-after-temperature",
        "Log-probabilities are those of the logits divided by the temperature, not of the raw ones: a class "
        "of values taken at the wrong stage.",
        Edit(
            DECIDE,
            LOGPROBS,
            "token_logprobs(model.numerics, (row / (params.temperature or 1.0)).astype(row.dtype), token, count)",
        ),
    ),
)
