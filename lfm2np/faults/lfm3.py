"""Sections B and E, continued: what engines get wrong, or will, of an LFM3. Windows in the cache, then the network.

The network's are written from the model's definition (transformers 5.24, models/lfm3) before engines had it: of some
`seen_in` names a sibling, a bug of the same kind in another model.
"""

from __future__ import annotations

from lfm2np.faults.edits import Edit, Fault, in_section
from lfm2np.faults.pool import UNGUARDED_PUBLISH, UNGUARDED_RELEASE, UNGUARDED_SHARE, UNGUARDED_WRITE

WINDOWS = "scheduler.window:WindowBlocks."
ATTENTION, BLOCK, ROTARY = "lfm2np.reference:attention", "lfm2np.reference:block", "lfm2np.reference:rotary_of"
PARTS = "lfm2np.reference:queries_keys_values"
SPANS, EARLIER = "lfm2np.numerics.attention:spans", "lfm2np.numerics.attention:hide_earlier_positions"
GATES = "gates = numerics.sigmoid(numerics.linear(x, weights.gate_proj))  # [T, H]"
GATED = "mixed = numerics.multiply(mixed, gates[..., None])"
OUT = "numerics.linear(mixed.reshape(len(x), -1), weights.out_proj, weights.out_bias)"
NORMED = "normed = numerics.rms_norm(x, layer.operator_norm, config.norm_eps)"
POST_OPERATOR = "mixed = numerics.rms_norm(mixed, layer.post_operator_norm, config.norm_eps)"
POST_FEED_FORWARD = "fed = numerics.rms_norm(fed, layer.post_ffn_norm, config.norm_eps)"
TABLE = "table(positions, config.head_dim, config.rope(kind))"
FIRST, HIDDEN = "piece.start - window + 1", "<= own - window"
KEPT = "request.window_table = (FREED,) * first + request.window_table[first:]"

pooled, modelled = in_section("B"), in_section("E")

FAULTS: tuple[Fault, ...] = (
    # --- windows in the cache
    pooled(
        "window-block-freed-one-early",
        "A block is given back one block before the window has left it.",
        Edit(
            WINDOWS + "release_unseen",
            "first = self.first_seen(request.num_computed_tokens)",
            "first = min(self.first_seen(request.num_computed_tokens) + 1,\n"
            "                request.num_computed_tokens // self.block_size)",
        ),
    ),
    pooled(
        "window-block-read-after-it-was-reused",
        "A block is given back while the window still reaches into it, and read there when another request owns it.",
        Edit(
            WINDOWS + "release_unseen",
            KEPT,
            KEPT + "\n    later = request.window_table[first : request.num_computed_tokens // self.block_size]\n"
            "    for block in held(later[:1]):\n        self.pool.release(block)",
        ),
        *UNGUARDED_RELEASE,
        UNGUARDED_SHARE,
        UNGUARDED_PUBLISH,
        UNGUARDED_WRITE,
    ),
    pooled(
        "window-blocks-never-given-back",
        "Windowed layers keep the blocks of all positions until the request ends.",
        Edit(WINDOWS + "release_unseen", "first = self.first_seen(request.num_computed_tokens)", "first = 0"),
    ),
    pooled(
        "window-blocks-of-rejected-drafts-leak",
        "Blocks of windowed layers that only rejected drafts needed leave the table, and are never given back.",
        Edit(WINDOWS + "shrink", "self.pool.release_table(held(request.window_table[num_blocks:]))", "pass"),
    ),
    pooled(
        "prefix-hit-of-full-layers-only",
        "A cached prefix is a hit although windowed layers have lost blocks of it that the next row sees.",
        Edit("scheduler.prefix_cache:PrefixCache.find", "usable = self.windows.usable(", "usable = len("),
        Edit(WINDOWS + "hit", "self.pool.block_of[key]", "self.pool.block_of.get(key, 0)"),
        UNGUARDED_SHARE,
    ),
    pooled(
        "prefix-hit-needs-every-block-of-the-window-layers",
        "A cached prefix is no hit where windowed layers lost blocks that no row sees any more.",
        Edit(WINDOWS + "usable", "run >= count - self.first_seen(count * self.block_size)", "run == count"),
    ),
    pooled(
        "window-blocks-written-by-the-other-table",
        "New keys and values of windowed layers go to the blocks that the table of the other layers names.",
        Edit(
            "lfm2np.network.cache:written_places",
            "segment.entry.window_table if is_windowed else segment.entry.block_table",
            "[block % len(cache.blocks[cache.is_windowed.index(is_windowed)][0])"
            " for block in segment.entry.block_table]",
        ),
    ),
    pooled(
        "window-shared-block-written-without-a-copy",
        "A fork copies its half-filled block in full layers; in windowed ones it writes to its parent's.",
        Edit(WINDOWS + "_is_shared", "return self.pool is not None and", "return False and"),
        UNGUARDED_WRITE,
    ),
    pooled(
        "window-blocks-not-copied-with-the-others",
        "Copy-on-write takes a new block in windowed layers, and copies nothing into it.",
        Edit(WINDOWS + "grow", 'moves.append(Move("copy_window_block", table[index], copy))', "pass"),
    ),
    pooled(
        "swapped-window-blocks-loaded-from-the-start",
        "A request that comes back finds in its window the keys and values of its first positions.",
        Edit(WINDOWS + "enter", "request.host_blocks[first:]", "request.host_blocks"),
    ),
    pooled(
        "swap-leaves-the-window-behind",
        "What windowed layers need of a request that is swapped out is not saved.",
        Edit(WINDOWS + "save", "if block != FREED:", "if False:"),
    ),
    # --- the window
    modelled(
        "window-one-too-wide",
        "The window is counted without the token itself: a row sees one position too many.",
        Edit(SPANS, FIRST, "piece.start - window"),
        Edit(EARLIER, HIDDEN, "<= own - window - 1"),
    ),
    modelled(
        "window-one-too-narrow",
        "A row sees one position too few.",
        Edit(SPANS, FIRST, "piece.start - max(window - 1, 1) + 1"),
        Edit(EARLIER, HIDDEN, "<= own - max(window - 1, 1)"),
    ),
    modelled(
        "window-of-the-chunk",
        "All rows of a chunk see the window of its first one: no row is masked at its own edge.",
        Edit(EARLIER, HIDDEN, "<= own[:1] - window"),
    ),
    modelled(
        "window-ignored-in-decoding",
        "A step of one token attends to all that is still in the blocks, which is more than the window.",
        Edit(SPANS, "start = 0 if window is None else", "start = 0 if window is None or tokens == 1 else"),
    ),
    modelled(
        "window-ignored",
        "Windowed layers see all that is there.",
        Edit(SPANS, "start = 0 if window is None else", "start = 0 if True else"),
        Edit(EARLIER, "if window is not None:", "if False:"),
    ),
    # --- the gate
    modelled("gate-missing", "The heads' gates are not applied.", Edit(ATTENTION, GATED, "pass")),
    modelled(
        "gate-without-its-sigmoid",
        "Heads are multiplied with what the gate's projection gives.",
        Edit(ATTENTION, GATES, "gates = numerics.linear(x, weights.gate_proj)"),
    ),
    modelled(
        "gate-of-the-residual",
        "The gate is computed from the layer's input before its norm.",
        Edit(
            BLOCK,
            NORMED,
            NORMED + '\n    rotary = {**rotary, "before the norm": (x, x)}',
        ),
        Edit(
            ATTENTION,
            "numerics.linear(x, weights.gate_proj)",
            'numerics.linear(rotary["before the norm"][0], weights.gate_proj)',
        ),
    ),
    modelled(
        "gate-behind-the-projection",
        "The gates scale parts of what the output projection gives, not the heads that go into it.",
        Edit(
            ATTENTION,
            f"{GATED}\n    return {OUT}",
            f"made = {OUT}\n        groups = np.arange(made.shape[1]) * gates.shape[1] // made.shape[1]\n"
            f"        return numerics.multiply(made, gates[:, groups])\n    return {OUT}",
        ),
    ),
    modelled(
        "gates-in-another-order-of-heads",
        "Head i gets the gate of head H - 1 - i.",
        Edit(ATTENTION, GATED, "mixed = numerics.multiply(mixed, gates[:, ::-1, None])"),
    ),
    # --- norms behind the operators
    modelled(
        "norm-behind-the-operator-missing", "post_operator_norm is not applied.", Edit(BLOCK, POST_OPERATOR, "pass")
    ),
    modelled(
        "norm-behind-the-feed-forward-missing", "post_ffn_norm is not applied.", Edit(BLOCK, POST_FEED_FORWARD, "pass")
    ),
    modelled(
        "norms-behind-swapped",
        "post_operator_norm has the weights of post_ffn_norm, and the other way round.",
        Edit(
            BLOCK,
            NORMED,
            "from dataclasses import replace\n"
            "    first, second = layer.post_operator_norm, layer.post_ffn_norm\n"
            f"    layer = replace(layer, post_operator_norm=second, post_ffn_norm=first)\n    {NORMED}",
        ),
    ),
    modelled(
        "norm-behind-the-residual",
        "post_operator_norm is applied to the sum with the residual.",
        Edit(
            BLOCK,
            f"{POST_OPERATOR}\n    x = numerics.add(mixed, x)",
            "pass\n    x = numerics.add(mixed, x)\n    if layer.post_operator_norm is not None:\n"
            "        x = numerics.rms_norm(x, layer.post_operator_norm, config.norm_eps)",
        ),
    ),
    # --- two rotations
    modelled(
        "rotation-of-the-other-layers",
        "All layers with attention have the rotation of full attention.",
        Edit(PARTS, "rotary[weights.kind]", 'rotary.get("full_attention", rotary[weights.kind])'),
    ),
    modelled(
        "thetas-swapped",
        "Full attention rotates by the theta of windowed layers, and the other way round.",
        Edit(
            ROTARY,
            TABLE,
            "table(positions, config.head_dim, config.rope(kind)._replace(theta=config.rope_theta"
            ' if kind == "sliding_attention" else config.sliding_rope_theta))',
        ),
    ),
    modelled(
        "full-rotation-for-a-partial-one",
        "partial_rotary_factor is ignored: each pair of a head is rotated.",
        Edit(ROTARY, TABLE, "table(positions, config.head_dim, config.rope(kind)._replace(share=1.0))"),
        seen_in=("transformers 48241",),
    ),
    modelled(
        "wrong-half-of-the-head-rotated",
        "The pairs that stay are those that should be rotated.",
        Edit(
            ROTARY,
            TABLE,
            "tuple(half[:, ::-1] if config.rope(kind).share < 1.0 else half for half in " + TABLE + ")",
        ),
    ),
    modelled(
        "head-size-of-hidden-by-heads",
        "head_dim is taken as hidden_size by heads: frequencies are those of another head.",
        Edit(
            ROTARY,
            TABLE,
            "table(positions, config.head_dim, config.rope(kind)._replace(theta=config.rope(kind).theta"
            " ** (config.head_dim * config.num_attention_heads / config.hidden_size)))",
        ),
    ),
    modelled(
        "partial-rotation-of-a-smaller-head",
        "The rotated share of a head is turned by the frequencies of a head of that size.",
        Edit(
            ROTARY,
            TABLE,
            "table(positions, config.head_dim, config.rope(kind)._replace(theta=config.rope(kind).theta"
            " ** (1.0 / config.rope(kind).share)))",
        ),
    ),
    # --- the rest
    modelled(
        "state-of-two-columns",
        "The convolution's state keeps two columns, whatever the number of taps.",
        Edit(
            "lfm2np.network.step:convolve",
            "history = cache.states[segment.entry.slot, weights.number]  # [L-1, D]",
            "history = cache.states[segment.entry.slot, weights.number].copy()\n        history[:-2] = 0.0",
        ),
    ),
    modelled(
        "attention-bias-of-the-output-ignored",
        "Of attention_bias, the output projection's is not added.",
        Edit(ATTENTION, OUT, OUT.replace(", weights.out_bias", "")),
    ),
)
