"""D: what text tokens become, where it ends, and which drafts hold."""

from __future__ import annotations

from lfm2np.faults.edits import Edit, Fault, in_section

DECIDE = "lfm2np.engine.drafting:decide"
STOPS = "lfm2np.sampling.stop_strings:StopChecker."

fault = in_section("D")

FAULTS: tuple[Fault, ...] = (
    # --- text
    fault(
        "stop-string-only-at-the-end-of-a-token",
        "A stop string that ends within a token's text is not seen.",
        Edit(STOPS + "_take", "stop is not None and self._may_stop", "stop and self._may_stop and end == len(text)"),
        seen_in=("vLLM 3572",),
    ),
    fault(
        "stop-string-left-in-the-text",
        "The text ends with the stop string, which was not to be included: a class of cuts at the wrong end.",
        Edit(STOPS + "_take", "text[: end if self._include else end - len(stop)]", "text[:end]"),
    ),
    fault(
        "held-back-text-lost-at-the-end",
        "Text that could have begun a stop string is missing where the request ends with it.",
        Edit(STOPS + "finish", "shown + self._held", "shown"),
        seen_in=("vLLM 8468",),
    ),
    fault(
        "held-back-text-lost-at-an-abort",
        "Text that could have begun a stop string is missing from what an aborted request got: a class of "
        "buffers that only a proper end empties.",
        Edit("lfm2np.engine.engine:Engine.abort", "sample.text.finish()", "pass"),
    ),
    fault(
        "length-hides-a-stop-string",
        "A stop string that is complete with the last token of max_tokens is not told: the reason is length.",
        Edit("lfm2np.engine.engine:Engine._take", "request.finish_reason = FinishReason.STOP", "pass"),
        seen_in=("SGLang 31599",),
    ),
    fault(
        "stop-reason-not-told",
        "Which stop string ended a request is not said: a class of reasons that are lost on their way out.",
        Edit("lfm2np.engine.engine:Engine._take", "sample.stop_reason = answer.text.stopped_by", "pass"),
    ),
    fault(
        "unfinished-character-lost-at-the-end",
        "Bytes of a character that stays unfinished vanish from a stream, where decoding has U+FFFD.",
        Edit("lfm2np.checkpoint.tokenizer:TextStream.finish", 'self._decoder.decode(b"", final=True)', '""'),
        seen_in=("vLLM 8468",),
    ),
    fault(
        "characters-cut-at-token-borders",
        "A character whose bytes come in several tokens becomes several U+FFFD.",
        Edit(
            "lfm2np.checkpoint.tokenizer:TextStream.push",
            "self._tokenizer.token_bytes(token_id))",
            "self._tokenizer.token_bytes(token_id), final=True)",
        ),
        seen_in=("vllm-mlx 109", "vLLM 48853"),
    ),
    fault(
        "double-bos-in-prompts",
        "A prompt gets a BOS although the tokenizer, or its own text, has put one there.",
        Edit("lfm2np.checkpoint.tokenizer:Tokenizer.encode", "if ids[:1] != [bos]:", "if True:"),
        seen_in=("vLLM 16081", "vLLM 55288"),
    ),
    fault(
        "double-bos-in-chats",
        "A conversation gets a BOS although the template wrote one.",
        Edit(
            "lfm2np.checkpoint.tokenizer:Tokenizer.encode_chat",
            "return ids if ids[:1] == [bos] else [bos, *ids]",
            "return [bos, *ids]",
        ),
        seen_in=("vLLM 16081", "SGLang 888"),
    ),
    # --- drafts
    fault(
        "last-draft-accepted-unchecked",
        "The last draft of a step is taken whatever the model says: a class of comparisons off by one.",
        Edit(
            DECIDE,
            "    output.append(token)",
            "    token = entry.drafts[index] if index == entry.num_drafts - 1 else token\n        output.append(token)",
        ),
    ),
    fault(
        "draft-checked-by-the-row-behind-it",
        "A draft is held against the logits that have already seen it: a class of rows off by one.",
        Edit(
            DECIDE,
            "        token = next_token(row, params,",
            "        row = rows[len(rows) - 1 - max(0, entry.num_drafts - index - 1)]\n"
            "        token = next_token(row, params,",
        ),
    ),
    fault(
        "tokens-after-an-accepted-end",
        "An end of sequence among the drafts does not end the request: a class of checks made for the last "
        "token of a step only.",
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
            "scheduler.refusals:_require_tokens",
            "if request.reason_to_end(token, request.num_output_tokens + count) is not None:",
            "if False:",
        ),
    ),
    fault(
        "tokens-after-a-stop-string-among-drafts",
        "The text ends with a stop string that drafts complete, and the tokens accepted after it stay.",
        Edit(
            DECIDE,
            "text.push(token, len(output) > params.min_tokens, ending)\n"
            "        holds = index < entry.num_drafts and token == entry.drafts[index]\n"
            "        accepted += holds\n"
            "        if not holds or ending is not None or text.stopped_by is not None:",
            "text.stopped_by or text.push(token, len(output) > params.min_tokens, ending)\n"
            "        holds = index < entry.num_drafts and token == entry.drafts[index]\n"
            "        accepted += holds\n"
            "        if not holds or ending is not None:",
        ),
        seen_in=("vLLM 47616",),
    ),
    fault(
        "stop-string-missed-among-drafts",
        "Stop strings are looked for with the last token of a step only, so one that an accepted draft "
        "completes is missed.",
        Edit(
            DECIDE,
            "text.push(token, len(output) > params.min_tokens, ending)",
            "text.push(token, len(output) > params.min_tokens and index == entry.num_drafts, ending)",
        ),
        seen_in=("SGLang 23802", "ArcticInference 161"),
    ),
    fault(
        "drawn-guess-always-accepted",
        "A guess that was drawn stays, however unlikely it is: the output has the drafter's distribution, a "
        "class of acceptance tests that accept.",
        Edit("lfm2np.speculation.acceptance:is_accepted", "return noise * q < p << NOISE_BITS", "return True"),
    ),
    fault(
        "replacement-drawn-from-the-target",
        "What comes for a refused guess is drawn from p, not from max(p - q, 0), so that likely guesses come "
        "too often: a class of biased corrections.",
        Edit(
            "lfm2np.speculation.acceptance:replacement",
            "max(0, int(target[i]) * q_total - int(weights[i]) * p_total)",
            "int(target[i])",
        ),
    ),
    fault(
        "noise-of-acceptance-draws-the-replacement",
        "One number decides whether a guess is refused and what replaces it: a class of noise used twice.",
        Edit("lfm2np.speculation.acceptance:next_token", "position, REPLACE)", "position, ACCEPT)"),
    ),
)
