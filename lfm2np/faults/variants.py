"""Changes that change no token and no bit of a logit: whoever reports one of these compares too much."""

from __future__ import annotations

from lfm2np.faults.edits import Edit, Variant

FORWARD_SEGMENTS = "for segment in segments:"
LINEAR = "lfm2np.numerics.exact:by_whole_products"
PRODUCT = "made = without_tiles(x, w)"
MIXED = "lfm2np.numerics.attention:weighted_values"
WEIGHTED = "rows[..., first : first + len(part)] @ part.transpose(1, 0, 2)"
SCORES = "lfm2np.numerics.attention:join_scores"
MIXTURE = "lfm2np.reference:mixture_of_experts"


def edited(name: str, sentence: str, *edits: Edit) -> Variant:
    return Variant(name, sentence, edits)


VARIANTS: tuple[Variant, ...] = (
    # --- sizes
    Variant(
        "blocks-of-one-token", "Every position is a block of its own.", sizes={"block_size": 1, "num_blocks": 2048}
    ),
    Variant("blocks-of-seven-tokens", "Blocks end at odd places.", sizes={"block_size": 7, "num_blocks": 512}),
    Variant("one-token-a-step", "No step computes more than one token.", sizes={"max_num_batched_tokens": 1}),
    Variant("whole-prompts", "No prompt is cut into chunks.", sizes={"max_num_batched_tokens": 100_000}),
    Variant("one-request-at-a-time", "Every batch has one request.", sizes={"max_num_seqs": 1}),
    Variant("no-prefix-cache", "Every prompt is computed anew.", sizes={"prefix_caching": False}),
    Variant("room-to-swap", "Preempted requests are saved, not computed again.", sizes={"num_host_blocks": 64}),
    Variant("high-watermark", "Half of the pool is kept for those that run.", sizes={"watermark": 0.5}),
    Variant("prompt-lookup", "Tokens are guessed from the prompt and checked.", sizes={"drafter": "ngram"}),
    # --- order of work
    edited(
        "attention-in-reverse-order",
        "Attention serves the last request of a step first.",
        Edit("lfm2np.network.step:attend", FORWARD_SEGMENTS, "for segment in reversed(segments):"),
    ),
    edited(
        "convolution-in-reverse-order",
        "The convolution serves the last request of a step first.",
        Edit("lfm2np.network.step:convolve", FORWARD_SEGMENTS, "for segment in reversed(segments):"),
    ),
    edited(
        "windows-masked-not-cut",
        "Rows of windowed layers multiply with all keys that are there, and those outside the window are hidden.",
        Edit("lfm2np.numerics.attention:spans", "start = 0 if window is None else", "start = 0 if True else"),
        Edit("lfm2np.numerics.attention:stacked_scores", "if span.tokens > 1:", "if True:"),
    ),
    edited(
        "heads-times-gates-the-other-way-round",
        "The gate is multiplied with the head.",
        Edit(
            "lfm2np.reference:attention",
            "numerics.multiply(mixed, gates[..., None])",
            "numerics.multiply(np.repeat(gates[..., None], mixed.shape[-1], axis=-1), mixed)",
        ),
    ),
    edited(
        "batch-in-reverse-order",
        "The last request of a step stands first in the flat batch.",
        Edit("lfm2np.network.step:make_segments", "in plan.scheduled:", "in reversed(plan.scheduled):"),
    ),
    edited(
        "one-pass-for-each-request",
        "A step is as many forward passes as it has requests.",
        Edit(
            "lfm2np.engine.engine:Engine._compute",
            "result = forward(model.weights, model.config, model.numerics, self.cache, plan, self._progress)",
            "from dataclasses import replace\n"
            "    only_moves = replace(plan, scheduled=())\n"
            "    result = forward(model.weights, model.config, model.numerics, self.cache, only_moves)\n"
            "    for entry in plan.scheduled:\n"
            "        alone = replace(plan, moves=(), scheduled=(entry,))\n"
            "        one = forward(model.weights, model.config, model.numerics, self.cache, alone)\n"
            "        result.logits.update(one.logits)\n"
            "        result.errors.update(one.errors)\n"
            "        result.segments.extend(one.segments)",
        ),
    ),
    edited(
        "logits-for-every-row",
        "The head is applied to all rows, and those that are wanted are picked afterwards.",
        Edit(
            "lfm2np.network.step:wanted_logits",
            "chosen = np.concatenate("
            "[states[segment.rows][first:] for segment, first in zip(wanted, skip, strict=True)])\n"
            '    with np.errstate(all="ignore"):\n'
            "        rows = numerics.linear(chosen, weights.head)",
            'with np.errstate(all="ignore"):\n'
            "        every = numerics.linear(states, weights.head)\n"
            "    rows = np.concatenate("
            "[every[segment.rows][first:] for segment, first in zip(wanted, skip, strict=True)])",
        ),
    ),
    # --- experts
    edited(
        "experts-in-reverse-order",
        "The last expert that a step's tokens chose is computed first.",
        Edit(MIXTURE, "for expert in np.unique(chosen):", "for expert in np.unique(chosen)[::-1]:"),
    ),
    edited(
        "expert-rows-one-by-one",
        "An expert is computed for each of its tokens alone, not for all of the step at once.",
        Edit(
            MIXTURE,
            "gated(weights.expert(int(expert)), numerics, x[tokens])",
            "np.concatenate(\n"
            "            [gated(weights.expert(int(expert)), numerics, x[token : token + 1]) for token in tokens])",
        ),
    ),
    # --- memory
    edited(
        "free-blocks-in-reverse-order",
        "The pool hands out its last block first.",
        Edit(
            "scheduler.block_pool:BlockPool.__init__",
            "self._next = [(index + 1) % ring for index in range(ring)]\n"
            "    self._previous = [(index - 1) % ring for index in range(ring)]",
            "self._next = [(index - 1) % ring for index in range(ring)]\n"
            "    self._previous = [(index + 1) % ring for index in range(ring)]",
        ),
    ),
    edited(
        "state-slots-in-turn",
        "The slot that has been free longest is given first, not the one that was freed last.",
        Edit("scheduler.memory:Memory.enter", "self.free_slots.pop()", "self.free_slots.pop(0)"),
        Edit("scheduler.memory:Memory.split", "self.free_slots.pop()", "self.free_slots.pop(0)"),
    ),
    edited(
        "cache-written-backwards",
        "The last token's keys and values are written first.",
        Edit(
            "lfm2np.network.cache:commit",
            "array[blocks, offsets] = np.concatenate(entries)",
            "array[blocks[::-1], offsets[::-1]] = np.concatenate(entries)[::-1]",
        ),
    ),
    # --- order of sums
    edited(
        "products-row-by-row",
        "Each row of a product is a matrix-vector product.",
        Edit(LINEAR, PRODUCT, "made = np.array([w @ row for row in x])"),
    ),
    edited(
        "products-summed-backwards",
        "Products are summed from the last input to the first.",
        Edit(LINEAR, PRODUCT, "made = x[:, ::-1] @ w[:, ::-1].T"),
    ),
    edited(
        "products-in-two-halves",
        "Inputs are split into two halves, as on two devices, whose products are added.",
        Edit(
            LINEAR,
            PRODUCT,
            "made = x[:, : x.shape[1] // 2] @ w[:, : x.shape[1] // 2].T\n"
            "        made += x[:, x.shape[1] // 2 :] @ w[:, x.shape[1] // 2 :].T",
        ),
    ),
    edited(
        "products-in-tiles",
        "Small products, too, are cut into tiles.",
        Edit(
            "lfm2np.numerics.exact:rounded_product",
            "by_whole_products(x, values, result, slices, bias)",
            "by_tiles(x, values, result, slices, bias)",
        ),
    ),
    edited(
        "attention-summed-backwards",
        "Weighted values are summed from the newest position to the first.",
        Edit(MIXED, WEIGHTED, "rows[..., first : first + len(part)][..., ::-1] @ part[::-1].transpose(1, 0, 2)"),
    ),
    edited(
        "attention-in-two-parts",
        "Weighted values are summed over even and over odd positions, and then added, as flash decoding does.",
        Edit(
            MIXED,
            WEIGHTED,
            "rows[..., first : first + len(part) : 2] @ part[::2].transpose(1, 0, 2) "
            "+ rows[..., first + 1 : first + len(part) : 2] @ part[1::2].transpose(1, 0, 2)",
        ),
    ),
    edited(
        "scores-summed-backwards",
        "Scores are summed from the last channel of a head to the first.",
        Edit(SCORES, "rows @ part.transpose(1, 2, 0)", "rows[..., ::-1] @ part[..., ::-1].transpose(1, 2, 0)"),
    ),
    edited(
        "sums-one-after-another",
        "Norms and softmax add their terms in turn, where NumPy adds pairs of partial sums.",
        Edit("lfm2np.numerics.grids:exact_sum", "low.sum(-1, keepdims=True)", "np.cumsum(low, -1)[..., -1:]"),
        Edit(
            "lfm2np.numerics.grids:sum_units",
            "return np.asarray(units.sum(-1, keepdims=True))",
            "return np.cumsum(units, -1)[..., -1:]",
        ),
    ),
    edited(
        "attention-row-by-row",
        "Each query of a prompt is a piece of its own.",
        Edit("lfm2np.numerics.pieces:pieces", "max(1, (limit or PIECE) // max(1, elements))", "1"),
    ),
    # --- the machine
    Variant("one-thread", "OpenBLAS computes on one thread.", environment={"OPENBLAS_NUM_THREADS": "1"}),
    Variant("kernels-of-2004", "OpenBLAS uses SSE3.", environment={"OPENBLAS_CORETYPE": "Prescott"}),
    Variant(
        "kernels-of-2013",
        "OpenBLAS uses AVX2 and FMA, which the CPU must have.",
        environment={"OPENBLAS_CORETYPE": "Haswell"},
    ),
    Variant(
        "no-vector-code",
        "NumPy does without its own AVX2 and AVX-512 code: names of all its x86 wheels, each of which "
        "ignores those that it does not know.",
        environment={
            "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 X86_V3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL "
            "AVX512_ICL AVX512_SPR X86_V4"
        },
    ),
)
