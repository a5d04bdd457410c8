"""What the engine computes, once more, in Python's own floats and lists: slow, short, and in no code of the engine's.

The network, the distribution of the next token, the noise and the stop strings, each written from its definition. A
mistake in code that the reference and the engine share would change both alike; here it shows as a difference.
Sources: the LFM2 report (arXiv 2511.23404); transformers 5.23, models/lfm2 and models/lfm2_moe, whose class stands in
each docstring; the rules in the docstrings of sampling/choice.py and stop_strings.py; Salmon et al. (SC 2011)
for the noise.

T tokens, V vocabulary, D hidden, H query heads, G key/value heads, E head_dim, F feed-forward, L convolution taps,
N experts.
Rows are lists of floats, one per token. Arithmetic is float64; only the rotary angles are float32, by definition.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from operator import add, mul
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file  # only reads the file: what follows is lists

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.errors import CheckpointError
from lfm2np.truth import elementary

Row = list[float]
Tensors = Mapping[str, list[Any]]


def read_checkpoint(directory: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """config.json as it stands, and the tensors of a float32 model.safetensors by name, as nested lists."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config, {name: values.tolist() for name, values in load_file(directory / "model.safetensors").items()}


def logits(config: Mapping[str, Any], tensors: Tensors, token_ids: Sequence[int]) -> list[Row]:
    """Logits [T, V] of a whole sequence; row t predicts token t + 1 (Lfm2ForCausalLM, Lfm2MoeForCausalLM)."""
    return logits_and_margins(config, tensors, token_ids)[0]


def logits_and_margins(
    config: Mapping[str, Any], tensors: Tensors, token_ids: Sequence[int]
) -> tuple[list[Row], list[float]]:
    """The logits, and at each row how far its nearest expert is from being chosen or not, in the nearest layer.

    config   the keys that lfm2np.suite.strategies.tiny_models.raw_config writes
    tensors  as `read_checkpoint` gives them, under the checkpoint's names
    """
    eps, margins = config["norm_eps"], [math.inf] * len(token_ids)
    rows = [tensors["model.embed_tokens.weight"][token_id] for token_id in token_ids]  # [T, D]
    for index, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{index}."
        layer = {name.removeprefix(prefix): values for name, values in tensors.items() if name.startswith(prefix)}
        normed = [rms_norm(row, layer["operator_norm.weight"], eps) for row in rows]
        changes = short_conv(config, layer, normed) if kind == "conv" else attention(config, layer, normed, kind)
        rows = combined(add, rows, sandwiched(layer, "post_operator_norm", changes, eps))
        normed = [rms_norm(row, layer["ffn_norm.weight"], eps) for row in rows]
        if config["model_type"] == "lfm2_moe" and index >= config["num_dense_layers"]:
            routes = [route(config, layer, row) for row in normed]
            margins = [min(least, margin) for least, (_, margin) in zip(margins, routes, strict=True)]
            changes = [mixed(layer, row, shares) for row, (shares, _) in zip(normed, routes, strict=True)]
        else:
            changes = feed_forward(config, layer, normed)
        rows = combined(add, rows, sandwiched(layer, "post_ffn_norm", changes, eps))
    # The final norm, although its name says otherwise.
    final = [rms_norm(row, tensors["model.embedding_norm.weight"], eps) for row in rows]
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return linear(tensors, head, final), margins


def sandwiched(layer: Tensors, norm: str, rows: list[Row], eps: float) -> list[Row]:
    """What an operator or a feed-forward adds, normed once more if the layer has that norm (Lfm3DecoderLayer)."""
    weight = layer.get(f"{norm}.weight")
    return rows if weight is None else [rms_norm(row, weight, eps) for row in rows]


def require(what: str, actual: object, expected: object) -> None:
    """What the tensors say is what config.json says."""
    if actual != expected:
        raise CheckpointError(f"{what}: {actual}, expected {expected} from config.json")


def short_conv(config: Mapping[str, Any], layer: Tensors, rows: list[Row]) -> list[Row]:
    """Gated short convolution, [T, D] -> [T, D] (Lfm2ShortConv): out_proj(C * conv(B * x)), zeros before the start."""
    hidden, taps = config["hidden_size"], config["conv_L_cache"]
    for part in ("in_proj", "conv", "out_proj"):
        require(f"conv.{part}.bias in the layer", f"conv.{part}.bias" in layer, config["conv_bias"])
    weight = [channel for (channel,) in layer["conv.conv.weight"]]  # [D, 1, L] -> [D, L]
    require("taps of conv.conv.weight", {len(channel) for channel in weight}, {taps})
    bias = layer.get("conv.conv.bias", [0.0] * hidden)
    projected = linear(layer, "conv.in_proj", rows)  # [T, 3D]
    b, c, x = ([row[i * hidden : (i + 1) * hidden] for row in projected] for i in range(3))  # each [T, D]
    u = combined(mul, b, x)
    mixed = []
    for now in range(len(rows)):
        past = range(min(taps, now + 1))  # the last tap meets the newest token
        mixed.append([bias[d] + sum(weight[d][taps - 1 - i] * u[now - i][d] for i in past) for d in range(hidden)])
    return linear(layer, "conv.out_proj", combined(mul, c, mixed))


def attention(config: Mapping[str, Any], layer: Tensors, rows: list[Row], kind: str) -> list[Row]:
    """Causal grouped-query attention, [T, D] -> [T, D] (Lfm2Attention): a norm on each head, then the rotation.

    An LFM3 has a window in layers of sliding_attention, other names, and a gate on each head (Lfm3Attention).
    """
    head_dim, eps, is_lfm3 = config["head_dim"], config["norm_eps"], config["model_type"] == "lfm3"
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config["rope_parameters"][kind] if is_lfm3 else config["rope_parameters"]
    share = rope.get("partial_rotary_factor", 1.0)
    norm, out = ("norm", "o_proj") if is_lfm3 else ("layernorm", "out_proj")
    window = config["sliding_window"] if kind == "sliding_attention" else len(rows)

    def heads_of(part: str, count: int) -> list[list[Row]]:
        projected = linear(layer, f"self_attn.{part}_proj", rows)
        require(f"width of self_attn.{part}_proj", {len(row) for row in projected}, {count * head_dim})
        split = [[row[i * head_dim : (i + 1) * head_dim] for i in range(count)] for row in projected]  # [T, count, E]
        if part == "v":
            return split
        weight, theta = layer[f"self_attn.{part}_{norm}.weight"], rope["rope_theta"]
        return [[rotated(rms_norm(head, weight, eps), t, theta, share) for head in row] for t, row in enumerate(split)]

    queries, keys, values = heads_of("q", heads), heads_of("k", groups), heads_of("v", groups)
    mixed: list[Row] = []
    for now in range(len(rows)):
        mixed.append([])
        for head in range(heads):
            group = head // (heads // groups)  # neighbouring query heads share keys and values
            seen = range(max(0, now + 1 - window), now + 1)
            scores = log_softmax([dot(queries[now][head], keys[t][group]) / math.sqrt(head_dim) for t in seen])
            weights = dict(zip(seen, map(math.exp, scores), strict=True))
            mixed[-1] += [sum(weights[t] * values[t][group][i] for t in seen) for i in range(head_dim)]
    if is_lfm3 and config["use_attention_gate"]:
        gates = [[sigmoid(x) for x in row] for row in linear(layer, "self_attn.g_proj", rows)]  # [T, H]
        mixed = [[x * gate[i // head_dim] for i, x in enumerate(row)] for row, gate in zip(mixed, gates, strict=True)]
    return linear(layer, f"self_attn.{out}", mixed)


def rotated(head: Row, position: int, theta: float, share: float = 1.0) -> Row:
    """Rotary embedding of one head [E] (Lfm2RotaryEmbedding, rotate_half): pair i is elements i and i + E/2.

    transformers computes the angles in float32 whatever the model's dtype; so here, each step rounded to float32.
    Of an LFM3's pairs only the first may turn, `share` of them ("proportional").
    """
    half = len(head) // 2
    first, second = [0.0] * half, [0.0] * half
    for i in range(half):
        inverse_frequency = float32(1.0 / float32(float32(theta) ** float32(2 * i / len(head))))
        angle = float32(position * inverse_frequency) if i < int(share * len(head) // 2) else 0.0
        first[i] = head[i] * math.cos(angle) - head[i + half] * math.sin(angle)
        second[i] = head[i + half] * math.cos(angle) + head[i] * math.sin(angle)
    return first + second


def feed_forward(config: Mapping[str, Any], layer: Tensors, rows: list[Row]) -> list[Row]:
    """The dense one of a layer, [T, D] -> [T, D] (Lfm2MLP)."""
    require("width of feed_forward", len(layer["feed_forward.w1.weight"]), feed_forward_width(config))
    return gated(layer, "feed_forward", rows)


def gated(tensors: Tensors, prefix: str, rows: list[Row]) -> list[Row]:
    """w2(silu(w1 x) * w3 x), [T, D] -> [T, D]."""
    gates, ups = linear(tensors, f"{prefix}.w1", rows), linear(tensors, f"{prefix}.w3", rows)  # each [T, F]
    return linear(tensors, f"{prefix}.w2", combined(lambda gate, up: silu(gate) * up, gates, ups))


def route(config: Mapping[str, Any], layer: Tensors, row: Row) -> tuple[dict[int, float], float]:
    """The weight of each expert of a row [D], and the margin of their choice (Lfm2MoeTopKRouter).

    Chosen by sigmoid plus bias, the lower ids where they tie; weighed by the sigmoid alone.
    """
    (outputs,) = linear(layer, "feed_forward.gate", [row])
    scores = [sigmoid(x) for x in outputs]
    bias = layer["feed_forward.expert_bias"] if config["use_expert_bias"] else [0.0] * len(scores)
    preferred = [score + b for score, b in zip(scores, bias, strict=True)]
    order = sorted(range(len(scores)), key=lambda expert: (-preferred[expert], expert))
    count = config["num_experts_per_tok"]
    margin = preferred[order[count - 1]] - preferred[order[count]] if count < len(order) else math.inf
    total = sum(scores[expert] for expert in order[:count]) + 1e-6 if config["norm_topk_prob"] else 1.0
    factor = config["routed_scaling_factor"]
    return {expert: scores[expert] / total * factor for expert in order[:count]}, margin


def mixed(layer: Tensors, row: Row, shares: Mapping[int, float]) -> Row:
    """The outputs of a row's experts, [D] -> [D], times their weights (Lfm2MoeSparseMoeBlock)."""
    total = [0.0] * len(row)
    for expert, share in shares.items():
        (output,) = gated(expert_tensors(layer, expert), "expert", [row])
        total = [t + share * m for t, m in zip(total, output, strict=True)]
    return total


def expert_tensors(layer: Tensors, expert: int) -> Tensors:
    """w1, w2 and w3 of one expert; where the file has all experts' in one tensor, w1 stands above w3."""
    prefix = "feed_forward.experts."
    if f"{prefix}gate_up_proj" not in layer:
        return {f"expert.{part}.weight": layer[f"{prefix}{expert}.{part}.weight"] for part in ("w1", "w2", "w3")}
    both, down = layer[f"{prefix}gate_up_proj"][expert], layer[f"{prefix}down_proj"][expert]
    half = len(both) // 2
    return {"expert.w1.weight": both[:half], "expert.w2.weight": down, "expert.w3.weight": both[half:]}


def feed_forward_width(config: Mapping[str, Any]) -> int:
    """F, which config.json gives before the adjustment (Lfm2MLP.__init__)."""
    width: int = config["intermediate_size"]
    if config["model_type"] != "lfm2" or not config["block_auto_adjust_ff_dim"]:
        return width
    width = 2 * width // 3
    if config["block_ffn_dim_multiplier"] is None:
        return width
    multiple: int = config["block_multiple_of"]
    return math.ceil(int(config["block_ffn_dim_multiplier"] * width) / multiple) * multiple


def linear(tensors: Tensors, name: str, rows: list[Row]) -> list[Row]:
    """x W^T + b of every row, by a weight [outputs, inputs] and, where there is one, a bias [outputs]."""
    weight = tensors[f"{name}.weight"]
    bias = tensors.get(f"{name}.bias", [0.0] * len(weight))
    return [[dot(weights, row) + b for weights, b in zip(weight, bias, strict=True)] for row in rows]


def rms_norm(row: Row, weight: Row, eps: float) -> Row:
    """x / sqrt(mean(x**2) + eps) * weight (Lfm2RMSNorm)."""
    size = math.sqrt(dot(row, row) / len(row) + eps)
    return [x / size * w for x, w in zip(row, weight, strict=True)]


def silu(x: float) -> float:
    """x / (1 + exp(-x))."""
    return x * sigmoid(x)


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), by whichever of exp(x) and exp(-x) cannot overflow."""
    small = math.exp(-abs(x))
    return 1.0 / (1.0 + small) if x >= 0.0 else small / (1.0 + small)


def dot(xs: Row, ys: Row) -> float:
    return sum(x * y for x, y in zip(xs, ys, strict=True))


def combined(operation: Callable[[float, float], float], xs: list[Row], ys: list[Row]) -> list[Row]:
    """The operation on each two numbers at the same place."""
    return [[operation(x, y) for x, y in zip(*pair, strict=True)] for pair in zip(xs, ys, strict=True)]


def float32(x: float) -> float:
    """The nearest float32."""
    nearest: float = struct.unpack("<f", struct.pack("<f", x))[0]
    return nearest


def log_softmax(row: Sequence[float]) -> Row:
    """log(exp(x) / sum(exp(row))) of every x; -inf stays -inf."""
    largest = max(row)
    log_sum = math.log(sum(math.exp(x - largest) for x in row))
    return [x - largest - log_sum for x in row]


def probabilities(
    row: Sequence[float],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    eos_token_ids: Sequence[int],
) -> list[Fraction]:
    """Probability [V] of each next token, given logits [V]; one 1 where greedy. ValueError if none may be chosen.

    Masks come first or in the middle, by profile; they commute with biases and penalties, so here they follow them.
    What the profiles then differ in is the order of the three filters. What a filter leaves is weighed anew.
    """
    values = penalised(row, params, prompt_ids, output_ids)
    removed = masked_ids(len(row), params, len(output_ids), eos_token_ids)
    if len(removed) == len(row):
        raise ValueError("no token may be chosen")
    values = [-math.inf if i in removed else x for i, x in enumerate(values)]
    if params.temperature == 0.0:
        best = values.index(max(values))  # of equal ones the lowest id
        return [Fraction(i == best) for i in range(len(row))]
    largest = max(values)
    values = [(x - largest) / params.temperature for x in values]
    for rule in {"vllm": ("min_p", "top_k", "top_p"), "transformers": ("top_k", "top_p", "min_p")}[params.profile]:
        kept = kept_ids(rule, values, params)
        values = [x if i in kept else -math.inf for i, x in enumerate(values)]
    weights = integer_weights(values)
    return [Fraction(w, sum(weights)) for w in weights]


def penalised(
    row: Sequence[float], params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> Row:
    """Logits [V] with logit_bias, repetition, frequency and presence penalty, in that order, in both profiles."""
    biases = dict(params.logit_bias or ())
    values = []
    for token_id, x in enumerate(row):
        x += biases.get(token_id, 0.0)
        if token_id in prompt_ids or token_id in output_ids:
            x = x / params.repetition_penalty if x > 0.0 else x * params.repetition_penalty
        x = max(-(2.0**1000), min(x, 2.0**1000))  # the definition's limit, so that nothing overflows
        count = output_ids.count(token_id)
        values.append(x - params.frequency_penalty * count - params.presence_penalty * (count > 0))
    return values


def masked_ids(size: int, params: SamplingParams, produced: int, eos_token_ids: Sequence[int]) -> set[int]:
    """Ids that are not allowed, are banned, or would stop before min_tokens: all EOS and stop_token_ids."""
    allowed = range(size) if params.allowed_token_ids is None else params.allowed_token_ids
    stopping = {*eos_token_ids, *params.stop_token_ids} if produced < params.min_tokens else set()
    return (set(range(size)) - set(allowed)) | set(params.banned_token_ids) | stopping


def kept_ids(rule: str, values: Row, params: SamplingParams) -> set[int]:
    """What one filter leaves of logits [V] that are relative to the largest.

    top_k  the k largest and all that equal the k-th
    min_p  those at least min_p times as likely as the likeliest
    top_p  the fewest likeliest that together reach top_p of what is left; of equally likely ones the lower ids
    """
    everyone, weights = range(len(values)), integer_weights(values)
    if rule == "top_k":
        least = sorted(values)[-params.top_k] if 0 < params.top_k < len(values) else -math.inf
        return {i for i in everyone if values[i] >= least}
    if rule == "min_p":
        return {i for i in everyone if weights[i] >= Fraction(params.min_p) * max(weights)}
    kept, reached, enough = set(), 0, Fraction(params.top_p) * sum(weights)
    for i in sorted(everyone, key=lambda i: (-weights[i], i)):
        if reached < enough or params.top_p == 1.0:
            kept.add(i)
            reached += weights[i]
    return kept


def integer_weights(values: Row) -> list[int]:
    """exp(x - largest) in units of 2**-45, by the engine's own exp: another's last bit could round to another unit."""
    below = np.array([x - max(values) for x in values])
    return [round(x * 2.0**45) for x in elementary.exp(below).tolist()]


def uniform_noise(seed: int, sample_index: int, position: int, purpose: int = 0) -> int:
    """Noise in [0, 2**128): the first two words of `noise_words`, the high one first."""
    first, second, _, _ = noise_words(seed, sample_index, position, purpose)
    return first * 2**64 + second


def noise_words(seed: int, sample_index: int, position: int, purpose: int) -> tuple[int, int, int, int]:
    """One Philox4x64-10 block.

    Its key is (seed, sample_index), its counter (1, position, purpose, 0). Source: Salmon et al. (SC 2011), Philox.
    """
    word = 2**64
    key, counter = [seed, sample_index], [1, position, purpose, 0]
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * counter[0], word)
        high1, low1 = divmod(0xCA5A826395121157 * counter[2], word)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B97F4A7C15) % word, (key[1] + 0xBB67AE8584CAA73B) % word]
    return counter[0], counter[1], counter[2], counter[3]
