"""E, too: mixtures of experts. Routers that choose or weigh otherwise, experts that get other rows than their own.

As in model.py most of these edit what the reference computes as well. Those that depend on which tokens stand in a step
make a request's answer depend on its neighbours and its chunks.
"""

from __future__ import annotations

from lfm2np.faults.edits import Edit, Fault

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

FAULTS: tuple[Fault, ...] = (
    # --- which experts
    Fault(
        name="softmax-for-sigmoid",
        section="E",
        sentence="Experts' scores are a softmax over all of them, so that the bias weighs more in the choice.",
        seen_in=PUBLISHED_ERROR,
        edits=(Edit(ROUTE, SCORES, f"np.exp(numerics.log_softmax({OUTPUTS})).astype(x.dtype)"),),
    ),
    Fault(
        name="expert-bias-ignored",
        section="E",
        sentence="Experts are chosen by their scores alone: a class of tensors that are loaded and not used.",
        seen_in=(),
        edits=(Edit(ROUTE, PREFERRED, "preferred = scores"),),
    ),
    Fault(
        name="expert-bias-added-after-the-choice",
        section="E",
        sentence="Experts are chosen by their scores alone, and the bias is added to their weights: a class of steps "
        "in the wrong order.",
        seen_in=(),
        edits=(
            Edit(
                ROUTE,
                f"{CHOSEN}\n    {OWN}",
                "chosen = numerics.top_k(scores, mixture.num_experts_per_tok)\n"
                "    own = np.take_along_axis(preferred, chosen, axis=-1)",
            ),
        ),
    ),
    Fault(
        name="expert-bias-in-bfloat16",
        section="E",
        sentence="The bias is rounded to bfloat16, as the rest of the file is: experts whose biases are near each "
        "other change places.",
        seen_in=("SGLang 31213", "SGLang 37133", "SGLang 38719", "Megatron-LM 1482"),
        edits=(Edit(ROUTE, PREFERRED, ROUND + PREFERRED.replace("weights.bias)", "round_to_bfloat16(weights.bias))")),),
    ),
    Fault(
        name="router-in-bfloat16",
        section="E",
        sentence="The gate's outputs are rounded to bfloat16 in a network that is not: near scores change places, and "
        "all weights are off.",
        seen_in=("vLLM 14027", "SGLang 33764"),
        edits=(Edit(ROUTE, f"scores = {SCORES}", f"{ROUND}scores = numerics.sigmoid(round_to_bfloat16({OUTPUTS}))"),),
    ),
    Fault(
        name="router-in-bfloat16-in-large-steps",
        section="E",
        sentence="The gate's outputs are rounded to bfloat16 where a step has more than eight tokens, for which "
        "another kernel is taken.",
        seen_in=("vLLM 54048",),
        edits=(
            Edit(
                ROUTE,
                f"scores = {SCORES}",
                f"{ROUND}outputs = {OUTPUTS}\n"
                "    scores = numerics.sigmoid(round_to_bfloat16(outputs) if len(x) > 8 else outputs)",
            ),
        ),
    ),
    Fault(
        name="last-expert-never-chosen",
        section="E",
        sentence="The choice is made among all experts but the last: a class of bounds that are off by one.",
        seen_in=(),
        edits=(
            Edit(
                ROUTE,
                CHOSEN,
                "some = preferred[:, : max(mixture.num_experts - 1, mixture.num_experts_per_tok)]\n"
                "    chosen = numerics.top_k(some, mixture.num_experts_per_tok)",
            ),
        ),
    ),
    Fault(
        name="experts-counted-from-the-other-end",
        section="E",
        sentence="The router's first output is the last expert's: a class of maps from experts to devices, read the "
        "wrong way.",
        seen_in=(),
        edits=(Edit(MIXTURE, EXPERT, "weights.expert(config.mixture.num_experts - 1 - int(expert))"),),
    ),
    Fault(
        name="experts-in-the-order-of-their-names",
        section="E",
        sentence="Tensors are stacked sorted by name, expert 10 before expert 2: a class that needs more than ten.",
        seen_in=(),
        edits=(
            Edit(
                MIXTURE, EXPERT, "weights.expert(int(sorted(map(str, range(config.mixture.num_experts)))[int(expert)]))"
            ),
        ),
    ),
    # --- how much of each
    Fault(
        name="expert-bias-in-the-weights",
        section="E",
        sentence="The bias, which is to choose, also stands in the weights of those that were chosen.",
        seen_in=PUBLISHED_ERROR,
        edits=(Edit(ROUTE, OWN, OWN.replace("scores", "preferred")),),
    ),
    Fault(
        name="expert-weights-not-normalised",
        section="E",
        sentence="The weights of a token's experts are not divided by their sum.",
        seen_in=("torchtitan 1448",),
        edits=(Edit(ROUTE, SHARES, SHARES.replace("mixture.norm_topk_prob", "False")),),
    ),
    Fault(
        name="expert-weights-always-normalised",
        section="E",
        sentence="The weights of a token's experts are divided by their sum also where norm_topk_prob says no.",
        seen_in=("mlxcel 391",),
        edits=(Edit(ROUTE, SHARES, SHARES.replace("mixture.norm_topk_prob", "True")),),
    ),
    Fault(
        name="expert-weights-normalised-over-all-experts",
        section="E",
        sentence="Weights are divided by the sum over all experts, chosen or not: a class of sums over the wrong axis "
        "or before the choice.",
        seen_in=(),
        edits=(
            Edit(
                ROUTE,
                SHARES,
                "numerics.routing_weights(own / scores.sum(-1, keepdims=True) if mixture.norm_topk_prob else own, "
                "False, mixture.routed_scaling_factor)",
            ),
        ),
    ),
    Fault(
        name="gate-outputs-as-weights",
        section="E",
        sentence="Where weights are not normalised they are the gate's outputs, not their sigmoid.",
        seen_in=("SGLang 35160",),
        edits=(Edit(ROUTE, OWN, OWN.replace("(scores", f"(scores if mixture.norm_topk_prob else {OUTPUTS}")),),
    ),
    Fault(
        name="routed-scaling-missing",
        section="E",
        sentence="The factor on the weights of all experts is not read.",
        seen_in=PUBLISHED_ERROR,
        edits=(Edit(ROUTE, SHARES, SHARES.replace("mixture.routed_scaling_factor", "1.0")),),
    ),
    Fault(
        name="routed-scaling-twice",
        section="E",
        sentence="The factor is in the weights of experts, and applied to what they made once more.",
        seen_in=("vLLM 24119", "vLLM 45037", "SGLang 35152"),
        edits=(Edit(ROUTE, SHARES, SHARES.replace("scaling_factor", "scaling_factor**2")),),
    ),
    Fault(
        name="routed-scaling-only-where-normalised",
        section="E",
        sentence="The factor on experts' weights is applied within the branch that normalises them.",
        seen_in=("sglang-jax 1282",),
        edits=(
            Edit(ROUTE, SHARES, SHARES.replace("scaling_factor", "scaling_factor if mixture.norm_topk_prob else 1.0")),
        ),
    ),
    Fault(
        name="scaled-output-of-one-expert-lost",
        section="E",
        sentence="With one expert a token and a factor other than 1, what is scaled is a buffer that nothing wrote to.",
        seen_in=("SGLang 40187",),
        edits=(
            Edit(
                MIXTURE,
                f"return {MIXED}",
                "several = made.shape[1] > 1 or config.mixture.routed_scaling_factor == 1.0\n"
                "    return numerics.combine_experts(made * several, gate_weights)",
            ),
        ),
    ),
    Fault(
        name="expert-weights-of-the-token-before",
        section="E",
        sentence="Each token's experts are mixed by the weights of the token before it in the step: a class of rows "
        "that are counted from another start.",
        seen_in=(),
        edits=(Edit(MIXTURE, ROUTED, ROUTED + "\n    gate_weights = np.roll(gate_weights, 1, axis=0)"),),
    ),
    Fault(
        name="expert-weights-in-another-order",
        section="E",
        sentence="A token's experts are sorted by id, their weights still by size: a class of sorts of keys without "
        "their values.",
        seen_in=(),
        edits=(Edit(MIXTURE, ROUTED, ROUTED + "\n    chosen = np.sort(chosen, axis=-1)"),),
    ),
    Fault(
        name="first-weight-for-all-experts-of-a-token",
        section="E",
        sentence="All experts of a token have the weight of the first: right with one expert a token.",
        seen_in=("vllm-xpu-kernels 66",),
        edits=(
            Edit(
                MIXTURE,
                MIXED,
                "numerics.combine_experts(made, np.repeat(gate_weights[:, :1], gate_weights.shape[1], axis=1))",
            ),
        ),
    ),
    # --- what each computes
    Fault(
        name="only-the-first-expert-of-a-token",
        section="E",
        sentence="A flattened list of ids gives each token one expert, the others are left out.",
        seen_in=("vllm-exl3 2",),
        edits=(Edit(MIXTURE, MIXED, "numerics.combine_experts(made[:, :1], gate_weights[:, :1])"),),
    ),
    Fault(
        name="gate-and-up-swapped-in-one-expert",
        section="E",
        sentence="In the second expert SiLU is applied to w3, not to w1: a class of tensors loaded one by one.",
        seen_in=(),
        edits=(
            Edit(
                MIXTURE,
                WRITTEN,
                WRITTEN + "\n        if expert == 1:\n"
                f"            up, gate = np.split(numerics.linear(x[tokens], {EXPERT}.gate_up_proj), 2, axis=-1)\n"
                f"            made[tokens, places] = numerics.linear(numerics.swiglu(gate, up), {EXPERT}.down_proj)",
            ),
        ),
    ),
    Fault(
        name="last-expert-gives-nothing",
        section="E",
        sentence="Rows of the last expert are neither counted nor placed.",
        seen_in=("SGLang 15250",),
        edits=(Edit(MIXTURE, WRITTEN, WRITTEN + " * (expert < config.mixture.num_experts - 1)"),),
    ),
    Fault(
        name="expert-takes-four-tokens-a-step",
        section="E",
        sentence="An expert has room for four tokens of a step; those beyond get nothing of it: a class of capacities, "
        "as in training.",
        seen_in=(),
        edits=(Edit(MIXTURE, WRITTEN, WRITTEN + " * (np.arange(len(tokens)) < 4)[:, None]"),),
    ),
    Fault(
        name="expert-takes-its-first-token-only",
        section="E",
        sentence="Of an expert's rows only the first is computed.",
        seen_in=("vllm-xpu-kernels 453",),
        edits=(Edit(MIXTURE, WRITTEN, WRITTEN + " * (np.arange(len(tokens)) < 1)[:, None]"),),
    ),
    Fault(
        name="expert-rows-not-put-back",
        section="E",
        sentence="What an expert computed is written to the rows of its group in another order than it was read from.",
        seen_in=("TileOPs 640", "torchtitan 1340"),
        edits=(Edit(MIXTURE, WRITTEN, WRITTEN.replace("x[tokens]", "x[np.roll(tokens, 1)]")),),
    ),
    # --- which layers
    Fault(
        name="last-dense-layer-is-a-mixture",
        section="E",
        sentence="The last dense layer takes the experts of the one behind it: a class of counts of layers that are "
        "off by one.",
        seen_in=(),
        edits=(
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
    ),
    Fault(
        name="mixture-taken-for-dense",
        section="E",
        sentence="A layer with experts is computed as a dense one, with the weights of its first expert.",
        seen_in=("mlx-vlm 1074",),
        edits=(
            Edit(
                "lfm2np.reference:feed_forward",
                "return mixture_of_experts(weights, config, numerics, x)",
                "return gated(weights.expert(0), numerics, x)",
            ),
        ),
    ),
    # --- from step to step
    Fault(
        name="expert-outputs-of-an-earlier-step",
        section="E",
        sentence="Where a step's tokens choose the experts that those of an earlier step chose, they get what was "
        "computed then: a class of buffers whose key leaves out the tokens.",
        seen_in=(),
        edits=(
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
    ),
)
