"""E: another network than the one described. Most of these edit what the reference computes as well: only a second
implementation, the recorded goldens or another engine's numbers can tell.

Each stands in what is computed and not in what is loaded, so that it acts on a model that is already in memory.
"""

from __future__ import annotations

from lfm2np.faults.edits import Edit, Fault, in_section

STATES, FORWARD = "lfm2np.reference:final_states", "lfm2np.network.step:forward"
BLOCK, PARTS = "lfm2np.reference:block", "lfm2np.reference:queries_keys_values"
FEED_FORWARD = "lfm2np.reference:gated"
HEAD, WANTED = "lfm2np.reference:output_logits", "lfm2np.network.step:wanted_logits"
EXACT = "lfm2np.numerics.exact:"
SPLIT = "gate, up = np.split(numerics.linear(x, weights.gate_up_proj), 2, axis=-1)"
HEADS = "queries, keys, values = np.split(projected, (heads, heads + groups), axis=1)"
EMBEDDED = "x = numerics.embed(weights.embedding.rows(ids))"
MIXED = "mixed.reshape(len(x), -1)"
UNGROUPED = "mixed.reshape(len(x), config.num_key_value_heads, -1, config.head_dim).swapaxes(1, 2).reshape(len(x), -1)"
BIASED = "({0} + (np.arange(len({0}[0])) * 7 % 5 - 2).astype({0}.dtype) / 4)"

fault = in_section("E")

FAULTS: tuple[Fault, ...] = (
    # --- what the file says
    fault(
        "two-thirds-rule-applied-twice",
        "The feed-forward is two thirds as wide as it should be: the rest of its units is not computed.",
        Edit(FEED_FORWARD, SPLIT, SPLIT + "\n    gate = gate * (np.arange(gate.shape[1]) < 2 * gate.shape[1] // 3)"),
        seen_in=("ollama37 437",),
    ),
    fault(
        "two-thirds-rule-skipped",
        "The feed-forward is read as half as wide again, so that w3 begins too late in the joined matrix.",
        Edit(
            FEED_FORWARD,
            SPLIT,
            SPLIT + "\n    late = np.zeros_like(up)\n"
            "    late[:, : -(-up.shape[1] // 2)] = up[:, up.shape[1] // 2 :]\n    up = late",
        ),
        seen_in=("ollama37 437",),
    ),
    fault(
        "rope-theta-of-the-file-ignored",
        "Rotation uses the default theta of 1e6, not the one that stands in the nested rope_parameters.",
        Edit(
            "lfm2np.numerics.rope:rotary_table",
            "angles(positions, head_dim, rope)",
            "angles(positions, head_dim, rope._replace(theta=1e6))",
        ),
        seen_in=("mlx-lm 908",),
    ),
    fault(
        "final-norm-is-another-tensor",
        "The last norm has the weights of the last layer's feed-forward norm, which has the same shape.",
        Edit(STATES, "weights.final_norm", "weights.layers[-1].ffn_norm"),
        seen_in=("llama.cpp 17548",),
    ),
    fault(
        "embedding-norm-taken-by-its-name",
        "The tensor embedding_norm, which is LFM2's final norm, is applied to the embeddings.",
        Edit(
            STATES,
            EMBEDDED,
            EMBEDDED.replace("= ", "= numerics.rms_norm(", 1) + ", weights.final_norm, config.norm_eps)",
        ),
        seen_in=("llama.cpp 17548",),
    ),
    fault(
        "operator-norm-is-the-feed-forward-norm",
        "Both norms of a layer have the weights of the second: a class of names that map to the wrong tensor.",
        Edit(BLOCK, "layer.operator_norm, ", "layer.ffn_norm, "),
    ),
    fault(
        "untied-head-ignored",
        "The embedding is the head of a model that has one of its own: a class of flags that are not read.",
        Edit(HEAD, "weights.head", "numerics.prepare_matrix(weights.embedding.rows(slice(None)), 'head')"),
        Edit(WANTED, "weights.head", "numerics.prepare_matrix(weights.embedding.rows(slice(None)), 'head')"),
    ),
    fault(
        "bias-on-the-head",
        "A bias that no file has is added to the logits.",
        Edit(
            HEAD,
            "return require_finite_logits(result, ",
            "return require_finite_logits(" + BIASED.format("result") + ", ",
        ),
        Edit(
            WANTED,
            "require_finite_logits(rows[start:stop], ",
            "require_finite_logits(" + BIASED.format("rows[start:stop]") + ", ",
        ),
        seen_in=("marvinmboya/LFMs-continuous-batching",),
    ),
    # --- attention
    fault(
        "no-causal-mask",
        "A token of a prompt attends to those behind it, as far as its step computes them.",
        Edit("lfm2np.numerics.attention:stacked_scores", "hide_later_positions(scores)", "pass"),
        seen_in=("marvinmboya/LFMs-continuous-batching",),
    ),
    fault(
        "head-norm-reads-strided-rows-as-contiguous",
        "The per-head norms read queries and keys as if no others lay between: right for the first token of a "
        "step, wrong for every later row. Run in a current engine; a class of kernels that ignore a stride.",
        Edit(
            PARTS,
            HEADS,
            HEADS + "\n    flat = projected.reshape(-1)\n"
            "    queries = flat[: queries.size].reshape(queries.shape)\n"
            "    keys = flat[heads * head_dim :][: keys.size].reshape(keys.shape)",
        ),
    ),
    fault(
        "head-norm-after-the-rotation",
        "Queries and keys are rotated, then normed: a class of steps in another model's order.",
        Edit(
            PARTS,
            "queries = numerics.rotate(numerics.rms_norm(queries, weights.q_norm, config.norm_eps), *table)\n"
            "    keys = numerics.rotate(numerics.rms_norm(keys, weights.k_norm, config.norm_eps), *table)",
            "queries = numerics.rms_norm(numerics.rotate(queries, *table), weights.q_norm, config.norm_eps)\n"
            "    keys = numerics.rms_norm(numerics.rotate(keys, *table), weights.k_norm, config.norm_eps)",
        ),
    ),
    fault(
        "head-norm-missing",
        "Queries and keys are not normed: a class of steps that another model does not have.",
        Edit(
            PARTS,
            "queries = numerics.rotate(numerics.rms_norm(queries, weights.q_norm, config.norm_eps), *table)\n"
            "    keys = numerics.rotate(numerics.rms_norm(keys, weights.k_norm, config.norm_eps), *table)",
            "queries, keys = numerics.rotate(queries, *table), numerics.rotate(keys, *table)",
        ),
    ),
    fault(
        "query-heads-share-keys-by-remainder",
        "Query head h reads key head h mod G, not h // (H / G): a class of grouped heads repeated the wrong way.",
        Edit(
            PARTS,
            "return queries, keys, values",
            "queries = queries.reshape(len(x), -1, groups, head_dim).swapaxes(1, 2).reshape(queries.shape)\n"
            "    return queries, keys, values",
        ),
        Edit("lfm2np.reference:attention", MIXED, UNGROUPED),
    ),
    fault(
        "rotation-of-interleaved-pairs",
        "Channels 2i and 2i + 1 are rotated together, not i and i + E/2: a class of conventions mixed up.",
        Edit(
            EXACT + "rotate",
            "own[..., :half].astype(np.float64), own[..., half:].astype(np.float64)",
            "own[..., 0::2].astype(np.float64), own[..., 1::2].astype(np.float64)",
        ),
    ),
    fault(
        "rotation-backwards",
        "Queries turn with their position and keys against it: a class of signs lost in a fused kernel.",
        Edit(
            PARTS,
            "weights.k_norm, config.norm_eps), *table)",
            "weights.k_norm, config.norm_eps), table[0], -table[1], table[2])",
        ),
    ),
    fault(
        "attention-scale-missing",
        "Scores are not divided by the square root of head_dim: a class of factors lost between two kernels.",
        Edit(EXACT + "attend_spans", "scores *= 1.0 / math.sqrt(head_dim)", "pass"),
    ),
    fault(
        "attention-scale-of-the-hidden-size",
        "Scores are divided by the square root of all heads' width: a class of dimensions mixed up.",
        Edit(
            EXACT + "attend_spans", "math.sqrt(head_dim)", "math.sqrt(queries.shape[0] * queries.shape[1] * head_dim)"
        ),
    ),
    fault(
        "positions-stop-at-40",
        "Tokens from position 40 on are rotated as the one at 40: a class of tables that are too short, and "
        "whose last row is taken for all that they lack.",
        Edit(
            FORWARD,
            "np.concatenate([np.arange(segment.entry.start, segment.entry.stop) for segment in segments])",
            "np.minimum("
            "40, np.concatenate([np.arange(segment.entry.start, segment.entry.stop) for segment in segments]))",
        ),
    ),
    fault(
        "partitions-joined-without-rescaling",
        "Attention to positions from 64 on is scaled by their own largest score, that to earlier ones by "
        "theirs: a class of split kernels whose parts are added as they are.",
        Edit(
            EXACT + "attend_spans",
            "scores -= scores.max(-1, keepdims=True)",
            "later = scores[:, 64:].max(-1, keepdims=True, initial=-1e4)\n"
            "        scores[:, :64] -= scores[:, :64].max(-1, keepdims=True)\n"
            "        scores[:, 64:] -= later",
        ),
    ),
    fault(
        "later-piece-of-queries-misses-its-own-position",
        "Where a prompt's queries are computed in several pieces, those of all but the first see every "
        "earlier position and not their own: a class of offsets forgotten in a second tile.",
        Edit(
            "lfm2np.numerics.attention:spans",
            "stop = context - tokens + piece.stop",
            "stop = context - tokens + piece.stop - (piece.start > 0)",
        ),
    ),
    # --- convolution and feed-forward
    fault(
        "convolution-gates-swapped",
        "The gate before the convolution stands behind it, and the other way round: a class of parts of a "
        "joined projection in the wrong order.",
        Edit("lfm2np.reference:short_conv", "gate_in, gate_out, value = ", "gate_out, gate_in, value = "),
    ),
    fault(
        "convolution-taps-reversed",
        "The newest token meets the oldest tap: a class of convolutions taken for correlations.",
        Edit(EXACT + "convolve_ragged", "filters[tap]", "filters[-1 - tap]"),
    ),
    fault(
        "convolution-bias-ignored",
        "Under conv_bias the taps' bias is not added: a class of tensors that are loaded and not used.",
        Edit(EXACT + "convolve_ragged", "if bias is not None:", "if False:"),
    ),
    fault(
        "projection-bias-ignored",
        "Under conv_bias the projections' biases are not added: a class of tensors loaded and not used.",
        Edit(EXACT + "linear", "None if bias is None else bias[outputs]", "None"),
    ),
    fault(
        "activation-behind-the-convolution",
        "SiLU follows the convolution, as in Mamba, whose kernel it may be: a class of defaults of a borrowed kernel.",
        Edit(
            EXACT + "convolve_ragged", "result[rows] = total", "result[rows] = total / (1.0 + elementary.exp(-total))"
        ),
    ),
    fault(
        "gate-and-up-swapped",
        "SiLU is applied to w3, not to w1: a class of parts of a joined projection in the wrong order.",
        Edit(FEED_FORWARD, "gate, up = ", "up, gate = "),
    ),
    # --- residuals
    fault(
        "feed-forward-residual-missing",
        "What enters the feed-forward is not added to what leaves it: a class of residuals lost in a fusion.",
        Edit(BLOCK, "return numerics.add(x, fed)", "return fed"),
    ),
    fault(
        "residual-taken-behind-the-norm",
        "The operator's residual is the normed input, not the input: a class of post-norm wiring.",
        Edit(BLOCK, "numerics.add(mixed, x)", "numerics.add(mixed, normed)"),
    ),
)
