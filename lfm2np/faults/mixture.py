"""E, too: mixtures of experts. Routers that choose or weigh otherwise, experts that get other rows than their own.

As in model.py most of these edit what the reference computes as well. Those that depend on which tokens stand in a step
make a request's answer depend on its neighbours and its chunks.
"""

from __future__ import annotations

from lfm2np.faults.edits import Edit, Fault, in_section

ROUTE, MIXTURE = "lfm2np.reference:route", "lfm2np.reference:mixture_of_experts"
STATES, BLOCK = "lfm2np.reference:final_states", "lfm2np.reference:block"
OUTPUTS = "numerics.linear(x, weights.router)"
SCORES = f"numerics.sigmoid({OUTPUTS})"
PREFERRED = "preferred = scores if weights.bias is None else numerics.add_expert_bias(scores, weights.bias)"
CHOSEN = "chosen = numerics.top_k(preferred, mixture.num_experts_per_tok)"
OWN = "own = np.take_along_axis(scores, chosen, axis=-1)"
SHARES = "numerics.routing_weights(own, mixture.norm_topk_prob, mixture.routed_scaling_factor)"
ROUTED = "chosen, gate_weights = route(weights, config, numerics, x)"
EXPERT = "weights.expert(int(expert))"
WRITTEN = "made[tokens, places] = gated(weights.expert(int(expert)), numerics, x[tokens])"
MIXED = "numerics.combine_experts(made, gate_weights)"
FED = "feed_forward(layer.feed_forward, config, numerics, normed)"
ROUND = "from lfm2np.numerics.ieee import round_to_bfloat16\n    "
PUBLISHED_ERROR = ("mlx-lm 1354", "mlx-lm 1883", "mlx-swift-lm 332")

fault = in_section("E")

FAULTS: tuple[Fault, ...] = (
    # --- which experts
    fault(
        "softmax-for-sigmoid",
        "Experts' scores are a softmax over all of them, so that the bias weighs more in the choice.",
        Edit(ROUTE, SCORES, f"np.exp(numerics.log_softmax({OUTPUTS})).astype(x.dtype)"),
        seen_in=PUBLISHED_ERROR,
    ),
    fault(
        "expert-bias-ignored",
        "Experts are chosen by their scores alone: a class of tensors that are loaded and not used.",
        Edit(ROUTE, PREFERRED, "preferred = scores"),
    ),
    fault(
        "expert-bias-added-after-the-choice",
        "Experts are chosen by their scores alone, and the bias is added to their weights: a class of steps "
        "in the wrong order.",
        Edit(
            ROUTE,
            f"{CHOSEN}\n    {OWN}",
            "chosen = numerics.top_k(scores, mixture.num_experts_per_tok)\n"
            "    own = np.take_along_axis(preferred, chosen, axis=-1)",
        ),
    ),
    fault(
        "expert-bias-in-bfloat16",
        "The bias is rounded to bfloat16, as the rest of the file is: experts whose biases are near each "
        "other change places.",
        Edit(ROUTE, PREFERRED, ROUND + PREFERRED.replace("weights.bias)", "round_to_bfloat16(weights.bias))")),
        seen_in=("SGLang 31213", "SGLang 37133", "SGLang 38719", "Megatron-LM 1482"),
    ),
    fault(
        "router-in-bfloat16",
        "The gate's outputs are rounded to bfloat16 in a network that is not: near scores change places, and "
        "all weights are off.",
        Edit(ROUTE, f"scores = {SCORES}", f"{ROUND}scores = numerics.sigmoid(round_to_bfloat16({OUTPUTS}))"),
        seen_in=("vLLM 14027", "SGLang 33764"),
    ),
    fault(
        "router-in-bfloat16-in-large-steps",
        "The gate's outputs are rounded to bfloat16 where a step has more than eight tokens, for which "
        "another kernel is taken.",
        Edit(
            ROUTE,
            f"scores = {SCORES}",
            f"{ROUND}outputs = {OUTPUTS}\n"
            "    scores = numerics.sigmoid(round_to_bfloat16(outputs) if len(x) > 8 else outputs)",
        ),
        seen_in=("vLLM 54048",),
    ),
    fault(
        "last-expert-never-chosen",
        "The choice is made among all experts but the last: a class of bounds that are off by one.",
        Edit(
            ROUTE,
            CHOSEN,
            "some = preferred[:, : max(mixture.num_experts - 1, mixture.num_experts_per_tok)]\n"
            "    chosen = numerics.top_k(some, mixture.num_experts_per_tok)",
        ),
    ),
    fault(
        "experts-counted-from-the-other-end",
        "The router's first output is the last expert's: a class of maps from experts to devices, read the wrong way.",
        Edit(MIXTURE, EXPERT, "weights.expert(config.mixture.num_experts - 1 - int(expert))"),
    ),
    fault(
        "experts-in-the-order-of-their-names",
        "Tensors are stacked sorted by name, expert 10 before expert 2: a class that needs more than ten.",
        Edit(MIXTURE, EXPERT, "weights.expert(int(sorted(map(str, range(config.mixture.num_experts)))[int(expert)]))"),
    ),
    # --- how much of each
    fault(
        "expert-bias-in-the-weights",
        "The bias, which is to choose, also stands in the weights of those that were chosen.",
        Edit(ROUTE, OWN, OWN.replace("scores", "preferred")),
        seen_in=PUBLISHED_ERROR,
    ),
    fault(
        "expert-weights-not-normalised",
        "The weights of a token's experts are not divided by their sum.",
        Edit(ROUTE, SHARES, SHARES.replace("mixture.norm_topk_prob", "False")),
        seen_in=("torchtitan 1448",),
    ),
    fault(
        "expert-weights-always-normalised",
        "The weights of a token's experts are divided by their sum also where norm_topk_prob says no.",
        Edit(ROUTE, SHARES, SHARES.replace("mixture.norm_topk_prob", "True")),
        seen_in=("mlxcel 391",),
    ),
    fault(
        "expert-weights-normalised-over-all-experts",
        "Weights are divided by the sum over all experts, chosen or not: a class of sums over the wrong axis "
        "or before the choice.",
        Edit(
            ROUTE,
            SHARES,
            "numerics.routing_weights(own / scores.sum(-1, keepdims=True) if mixture.norm_topk_prob else own, "
            "False, mixture.routed_scaling_factor)",
        ),
    ),
    fault(
        "gate-outputs-as-weights",
        "Where weights are not normalised they are the gate's outputs, not their sigmoid.",
        Edit(ROUTE, OWN, OWN.replace("(scores", f"(scores if mixture.norm_topk_prob else {OUTPUTS}")),
        seen_in=("SGLang 35160",),
    ),
    fault(
        "routed-scaling-missing",
        "The factor on the weights of all experts is not read.",
        Edit(ROUTE, SHARES, SHARES.replace("mixture.routed_scaling_factor", "1.0")),
        seen_in=PUBLISHED_ERROR,
    ),
    fault(
        "routed-scaling-twice",
        "The factor is in the weights of experts, and applied to what they made once more.",
        Edit(ROUTE, SHARES, SHARES.replace("scaling_factor", "scaling_factor**2")),
        seen_in=("vLLM 24119", "vLLM 45037", "SGLang 35152"),
    ),
    fault(
        "routed-scaling-only-where-normalised",
        "The factor on experts' weights is applied within the branch that normalises them.",
        Edit(ROUTE, SHARES, SHARES.replace("scaling_factor", "scaling_factor if mixture.norm_topk_prob else 1.0")),
        seen_in=("sglang-jax 1282",),
    ),
    fault(
        "scaled-output-of-one-expert-lost",
        "With one expert a token and a factor other than 1, what is scaled is a buffer that nothing wrote to.",
        Edit(
            MIXTURE,
            f"return {MIXED}",
            "several = made.shape[1] > 1 or config.mixture.routed_scaling_factor == 1.0\n"
            "    return numerics.combine_experts(made * several, gate_weights)",
        ),
        seen_in=("SGLang 40187",),
    ),
    fault(
        "expert-weights-of-the-token-before",
        "Each token's experts are mixed by the weights of the token before it in the step: a class of rows "
        "that are counted from another start.",
        Edit(MIXTURE, ROUTED, ROUTED + "\n    gate_weights = np.roll(gate_weights, 1, axis=0)"),
    ),
    fault(
        "expert-weights-in-another-order",
        "A token's experts are sorted by id, their weights still by size: a class of sorts of keys without "
        "their values.",
        Edit(MIXTURE, ROUTED, ROUTED + "\n    chosen = np.sort(chosen, axis=-1)"),
    ),
    fault(
        "first-weight-for-all-experts-of-a-token",
        "All experts of a token have the weight of the first: right with one expert a token.",
        Edit(
            MIXTURE,
            MIXED,
            "numerics.combine_experts(made, np.repeat(gate_weights[:, :1], gate_weights.shape[1], axis=1))",
        ),
        seen_in=("vllm-xpu-kernels 66",),
    ),
    # --- what each computes
    fault(
        "only-the-first-expert-of-a-token",
        "A flattened list of ids gives each token one expert, the others are left out.",
        Edit(MIXTURE, MIXED, "numerics.combine_experts(made[:, :1], gate_weights[:, :1])"),
        seen_in=("vllm-exl3 2",),
    ),
    fault(
        "gate-and-up-swapped-in-one-expert",
        "In the second expert SiLU is applied to w3, not to w1: a class of tensors loaded one by one.",
        Edit(
            MIXTURE,
            WRITTEN,
            WRITTEN + "\n        if expert == 1:\n"
            f"            up, gate = np.split(numerics.linear(x[tokens], {EXPERT}.gate_up_proj), 2, axis=-1)\n"
            f"            made[tokens, places] = numerics.linear(numerics.swiglu(gate, up), {EXPERT}.down_proj)",
        ),
    ),
    fault(
        "last-expert-gives-nothing",
        "Rows of the last expert are neither counted nor placed.",
        Edit(MIXTURE, WRITTEN, WRITTEN + " * (expert < config.mixture.num_experts - 1)"),
        seen_in=("SGLang 15250",),
    ),
    fault(
        "expert-takes-four-tokens-a-step",
        "An expert has room for four tokens of a step; those beyond get nothing of it: a class of capacities, "
        "as in training.",
        Edit(MIXTURE, WRITTEN, WRITTEN + " * (np.arange(len(tokens)) < 4)[:, None]"),
    ),
    fault(
        "expert-takes-its-first-token-only",
        "Of an expert's rows only the first is computed.",
        Edit(MIXTURE, WRITTEN, WRITTEN + " * (np.arange(len(tokens)) < 1)[:, None]"),
        seen_in=("vllm-xpu-kernels 453",),
    ),
    fault(
        "expert-rows-not-put-back",
        "What an expert computed is written to the rows of its group in another order than it was read from.",
        Edit(MIXTURE, WRITTEN, WRITTEN.replace("x[tokens]", "x[np.roll(tokens, 1)]")),
        seen_in=("TileOPs 640", "torchtitan 1340"),
    ),
    # --- which layers
    fault(
        "last-dense-layer-is-a-mixture",
        "The last dense layer takes the experts of the one behind it: a class of counts of layers that are off by one.",
        Edit(
            STATES,
            "x = block(layer, config, numerics, x, rotary, mixing)",
            "from dataclasses import replace\n"
            "            after = weights.layers[index + 1 : index + 2]\n"
            "            if config.mixture and index + 1 == config.mixture.num_dense_layers and after:\n"
            "                layer = replace(layer, feed_forward=after[0].feed_forward)\n"
            "            x = block(layer, config, numerics, x, rotary, mixing)",
        ),
    ),
    fault(
        "mixture-taken-for-dense",
        "A layer with experts is computed as a dense one, with the weights of its first expert.",
        Edit(
            "lfm2np.reference:feed_forward",
            "return mixture_of_experts(weights, config, numerics, x)",
            "return gated(weights.expert(0), numerics, x)",
        ),
        seen_in=("mlx-vlm 1074",),
    ),
    # --- from step to step
    fault(
        "expert-outputs-of-an-earlier-step",
        "Where a step's tokens choose the experts that those of an earlier step chose, they get what was "
        "computed then: a class of buffers whose key leaves out the tokens.",
        Edit(
            BLOCK,
            f"fed = {FED}",
            f"fed = {FED}\n"
            "    caches = [part for part in getattr(mixing.convolve, 'args', ()) if hasattr(part, 'checkpoints')]\n"
            "    if caches and hasattr(layer.feed_forward, 'router'):\n"
            "        chosen, _ = route(layer.feed_forward, config, numerics, normed)\n"
            "        key = (id(layer), chosen.tobytes())\n"
            "        fed = caches[0].__dict__.setdefault('made', {}).setdefault(key, fed)",
        ),
    ),
)
