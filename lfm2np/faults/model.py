"""E: another network than the one described. Most of these edit what the reference computes as well: only a second
implementation, the recorded goldens or another engine's numbers can tell.

Each stands in what is computed and not in what is loaded, so that it acts on a model that is already in memory.
"""

from __future__ import annotations

from lfm2np.faults.edits import Edit, Fault

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

FAULTS: tuple[Fault, ...] = (
    # --- what the file says
    Fault(
        name="two-thirds-rule-applied-twice",
        section="E",
        sentence="The feed-forward is two thirds as wide as it should be: the rest of its units is not computed.",
        seen_in=("ollama37 437",),
        edits=(
            Edit(
                FEED_FORWARD, SPLIT, SPLIT + "\n    gate = gate * (np.arange(gate.shape[1]) < 2 * gate.shape[1] // 3)"
            ),
        ),
    ),
    Fault(
        name="two-thirds-rule-skipped",
        section="E",
        sentence="The feed-forward is read as half as wide again, so that w3 begins too late in the joined matrix.",
        seen_in=("ollama37 437",),
        edits=(
            Edit(
                FEED_FORWARD,
                SPLIT,
                SPLIT + "\n    late = np.zeros_like(up)\n"
                "    late[:, : -(-up.shape[1] // 2)] = up[:, up.shape[1] // 2 :]\n    up = late",
            ),
        ),
    ),
    Fault(
        name="rope-theta-of-the-file-ignored",
        section="E",
        sentence="Rotation uses the default theta of 1e6, not the one that stands in the nested rope_parameters.",
        seen_in=("mlx-lm 908",),
        edits=(
            Edit(
                "lfm2np.numerics.rope:rotary_table",
                "angles(positions, head_dim, rope)",
                "angles(positions, head_dim, rope._replace(theta=1e6))",
            ),
        ),
    ),
    Fault(
        name="final-norm-is-another-tensor",
        section="E",
        sentence="The last norm has the weights of the last layer's feed-forward norm, which has the same shape.",
        seen_in=("llama.cpp 17548",),
        edits=(Edit(STATES, "weights.final_norm", "weights.layers[-1].ffn_norm"),),
    ),
    Fault(
        name="embedding-norm-taken-by-its-name",
        section="E",
        sentence="The tensor embedding_norm, which is LFM2's final norm, is applied to the embeddings.",
        seen_in=("llama.cpp 17548",),
        edits=(
            Edit(
                STATES,
                EMBEDDED,
                EMBEDDED.replace("= ", "= numerics.rms_norm(", 1) + ", weights.final_norm, config.norm_eps)",
            ),
        ),
    ),
    Fault(
        name="operator-norm-is-the-feed-forward-norm",
        section="E",
        sentence="Both norms of a layer have the weights of the second: a class of names that map to the wrong tensor.",
        seen_in=(),
        edits=(Edit(BLOCK, "layer.operator_norm, ", "layer.ffn_norm, "),),
    ),
    Fault(
        name="untied-head-ignored",
        section="E",
        sentence="The embedding is the head of a model that has one of its own: a class of flags that are not read.",
        seen_in=(),
        edits=(
            Edit(
                HEAD,
                "weights.head",
                "numerics.prepare_matrix(weights.embedding.rows(slice(None)), 'head')",
            ),
            Edit(
                WANTED,
                "weights.head",
                "numerics.prepare_matrix(weights.embedding.rows(slice(None)), 'head')",
            ),
        ),
    ),
    Fault(
        name="bias-on-the-head",
        section="E",
        sentence="A bias that no file has is added to the logits.",
        seen_in=("marvinmboya/LFMs-continuous-batching",),
        edits=(
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
        ),
    ),
    # --- attention
    Fault(
        name="no-causal-mask",
        section="E",
        sentence="A token of a prompt attends to those behind it, as far as its step computes them.",
        seen_in=("marvinmboya/LFMs-continuous-batching",),
        edits=(Edit("lfm2np.numerics.attention:stacked_scores", "hide_later_positions(scores)", "pass"),),
    ),
    Fault(
        name="head-norm-reads-strided-rows-as-contiguous",
        section="E",
        sentence="The per-head norms read queries and keys as if no others lay between: right for the first token of a "
        "step, wrong for every later row. Run in a current engine; a class of kernels that ignore a stride.",
        seen_in=(),
        edits=(
            Edit(
                PARTS,
                HEADS,
                HEADS + "\n    flat = projected.reshape(-1)\n"
                "    queries = flat[: queries.size].reshape(queries.shape)\n"
                "    keys = flat[heads * head_dim :][: keys.size].reshape(keys.shape)",
            ),
        ),
    ),
    Fault(
        name="head-norm-after-the-rotation",
        section="E",
        sentence="Queries and keys are rotated, then normed: a class of steps in another model's order.",
        seen_in=(),
        edits=(
            Edit(
                PARTS,
                "queries = numerics.rotate(numerics.rms_norm(queries, weights.q_norm, config.norm_eps), *table)\n"
                "    keys = numerics.rotate(numerics.rms_norm(keys, weights.k_norm, config.norm_eps), *table)",
                "queries = numerics.rms_norm(numerics.rotate(queries, *table), weights.q_norm, config.norm_eps)\n"
                "    keys = numerics.rms_norm(numerics.rotate(keys, *table), weights.k_norm, config.norm_eps)",
            ),
        ),
    ),
    Fault(
        name="head-norm-missing",
        section="E",
        sentence="Queries and keys are not normed: a class of steps that another model does not have.",
        seen_in=(),
        edits=(
            Edit(
                PARTS,
                "queries = numerics.rotate(numerics.rms_norm(queries, weights.q_norm, config.norm_eps), *table)\n"
                "    keys = numerics.rotate(numerics.rms_norm(keys, weights.k_norm, config.norm_eps), *table)",
                "queries, keys = numerics.rotate(queries, *table), numerics.rotate(keys, *table)",
            ),
        ),
    ),
    Fault(
        name="query-heads-share-keys-by-remainder",
        section="E",
        sentence="Query head h reads key head h mod G, not h // (H / G): a class of grouped heads repeated the wrong "
        "way.",
        seen_in=(),
        edits=(
            Edit(
                PARTS,
                "return queries, keys, values",
                "queries = queries.reshape(len(x), -1, groups, head_dim).swapaxes(1, 2).reshape(queries.shape)\n"
                "    return queries, keys, values",
            ),
            Edit("lfm2np.reference:attention", MIXED, UNGROUPED),
        ),
    ),
    Fault(
        name="rotation-of-interleaved-pairs",
        section="E",
        sentence="Channels 2i and 2i + 1 are rotated together, not i and i + E/2: a class of conventions mixed up.",
        seen_in=(),
        edits=(
            Edit(
                EXACT + "rotate",
                "own[..., :half].astype(np.float64), own[..., half:].astype(np.float64)",
                "own[..., 0::2].astype(np.float64), own[..., 1::2].astype(np.float64)",
            ),
        ),
    ),
    Fault(
        name="rotation-backwards",
        section="E",
        sentence="Queries turn with their position and keys against it: a class of signs lost in a fused kernel.",
        seen_in=(),
        edits=(
            Edit(
                PARTS,
                "weights.k_norm, config.norm_eps), *table)",
                "weights.k_norm, config.norm_eps), table[0], -table[1], table[2])",
            ),
        ),
    ),
    Fault(
        name="attention-scale-missing",
        section="E",
        sentence="Scores are not divided by the square root of head_dim: a class of factors lost between two kernels.",
        seen_in=(),
        edits=(Edit(EXACT + "attend_spans", "scores *= 1.0 / math.sqrt(head_dim)", "pass"),),
    ),
    Fault(
        name="attention-scale-of-the-hidden-size",
        section="E",
        sentence="Scores are divided by the square root of all heads' width: a class of dimensions mixed up.",
        seen_in=(),
        edits=(
            Edit(
                EXACT + "attend_spans",
                "math.sqrt(head_dim)",
                "math.sqrt(queries.shape[0] * queries.shape[1] * head_dim)",
            ),
        ),
    ),
    Fault(
        name="positions-stop-at-40",
        section="E",
        sentence="Tokens from position 40 on are rotated as the one at 40: a class of tables that are too short, and "
        "whose last row is taken for all that they lack.",
        seen_in=(),
        edits=(
            Edit(
                FORWARD,
                "np.concatenate([np.arange(segment.entry.start, segment.entry.stop) for segment in segments])",
                "np.minimum("
                "40, np.concatenate([np.arange(segment.entry.start, segment.entry.stop) for segment in segments]))",
            ),
        ),
    ),
    Fault(
        name="partitions-joined-without-rescaling",
        section="E",
        sentence="Attention to positions from 64 on is scaled by their own largest score, that to earlier ones by "
        "theirs: a class of split kernels whose parts are added as they are.",
        seen_in=(),
        edits=(
            Edit(
                EXACT + "attend_spans",
                "scores -= scores.max(-1, keepdims=True)",
                "later = scores[:, 64:].max(-1, keepdims=True, initial=-1e4)\n"
                "        scores[:, :64] -= scores[:, :64].max(-1, keepdims=True)\n"
                "        scores[:, 64:] -= later",
            ),
        ),
    ),
    Fault(
        name="later-piece-of-queries-misses-its-own-position",
        section="E",
        sentence="Where a prompt's queries are computed in several pieces, those of all but the first see every "
        "earlier position and not their own: a class of offsets forgotten in a second tile.",
        seen_in=(),
        edits=(
            Edit(
                "lfm2np.numerics.attention:spans",
                "stop = context - tokens + piece.stop",
                "stop = context - tokens + piece.stop - (piece.start > 0)",
            ),
        ),
    ),
    # --- convolution and feed-forward
    Fault(
        name="convolution-gates-swapped",
        section="E",
        sentence="The gate before the convolution stands behind it, and the other way round: a class of parts of a "
        "joined projection in the wrong order.",
        seen_in=(),
        edits=(Edit("lfm2np.reference:short_conv", "gate_in, gate_out, value = ", "gate_out, gate_in, value = "),),
    ),
    Fault(
        name="convolution-taps-reversed",
        section="E",
        sentence="The newest token meets the oldest tap: a class of convolutions taken for correlations.",
        seen_in=(),
        edits=(Edit(EXACT + "convolve_ragged", "filters[tap]", "filters[-1 - tap]"),),
    ),
    Fault(
        name="convolution-bias-ignored",
        section="E",
        sentence="Under conv_bias the taps' bias is not added: a class of tensors that are loaded and not used.",
        seen_in=(),
        edits=(Edit(EXACT + "convolve_ragged", "if bias is not None:", "if False:"),),
    ),
    Fault(
        name="projection-bias-ignored",
        section="E",
        sentence="Under conv_bias the projections' biases are not added: a class of tensors loaded and not used.",
        seen_in=(),
        edits=(Edit(EXACT + "linear", "None if bias is None else bias[outputs]", "None"),),
    ),
    Fault(
        name="activation-behind-the-convolution",
        section="E",
        sentence="SiLU follows the convolution, as in Mamba, whose kernel it may be: a class of defaults of a borrowed "
        "kernel.",
        seen_in=(),
        edits=(
            Edit(
                EXACT + "convolve_ragged",
                "result[rows] = total",
                "result[rows] = total / (1.0 + elementary.exp(-total))",
            ),
        ),
    ),
    Fault(
        name="gate-and-up-swapped",
        section="E",
        sentence="SiLU is applied to w3, not to w1: a class of parts of a joined projection in the wrong order.",
        seen_in=(),
        edits=(Edit(FEED_FORWARD, "gate, up = ", "up, gate = "),),
    ),
    # --- residuals
    Fault(
        name="feed-forward-residual-missing",
        section="E",
        sentence="What enters the feed-forward is not added to what leaves it: a class of residuals lost in a fusion.",
        seen_in=(),
        edits=(Edit(BLOCK, "return numerics.add(x, fed)", "return fed"),),
    ),
    Fault(
        name="residual-taken-behind-the-norm",
        section="E",
        sentence="The operator's residual is the normed input, not the input: a class of post-norm wiring.",
        seen_in=(),
        edits=(Edit(BLOCK, "numerics.add(mixed, x)", "numerics.add(mixed, normed)"),),
    ),
)
