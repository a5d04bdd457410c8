"""Activations of Hugging Face's transformers, as it generates: by hooks on its modules, and around the functions that
run between them. Needs the extra `peers`.

Not tapped: of a mixture of experts the scores, and what each expert makes, which transformers has in another order.

B requests of a batch, T columns of a forward pass, D hidden, H query heads, G key/value heads, E head_dim, C columns in
the cache, of which a layer with a window holds the last, L convolution taps, N experts, K experts of a token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.config_json import load_config
from lfm2np.oracle.engines.records import greedy
from lfm2np.oracle.engines.transformers_target import generate, load_model
from lfm2np.oracle.locate.operations import window_of
from lfm2np.oracle.recorders.recorder import Recorder
from lfm2np.truth.config import CONV, ModelConfig

Array = NDArray[Any]
EMBEDDINGS = "model.embed_tokens"
OUTPUTS = (EMBEDDINGS, "_proj", "_norm", "_layernorm", ".w1", ".w2", ".w3", "lm_head")  # ends of modules' names
NAMES = {".q_norm": ".q_layernorm", ".k_norm": ".k_layernorm", ".o_proj": ".out_proj"}  # ends that an LFM3 has, ours
INPUTS = {  # by the end of a module's name, what its input is; of an LFM2 the first is what the layer attended to
    ".self_attn.out_proj": ".self_attn.gated",
    ".conv.out_proj": ".conv.gated",
    ".feed_forward.w2": ".feed_forward.gated",
    ".ffn_norm": ".residual",
}
ROUTER, EXPERTS = "feed_forward.gate", "feed_forward.experts"  # modules of a mixture
ROUTED = ("gate", "expert_weights", "experts_chosen")  # what a router returns: [B*T, N], then [B*T, K] twice


def record(
    model: Path,
    prompts: Sequence[Sequence[int]],
    request: int = 0,
    max_tokens: int = 1,
    format: str = "float32",
    padded: bool = False,
    prepare: Callable[[Any], None] = lambda network: None,
) -> Recorder:
    """What `transformers:` (or `transformers:padded:`) computes for one request: greedy, a step for each new token.

    padded   all prompts in one left-padded batch; else the request runs alone
    prepare  is called with the loaded model: to choose another attention, say, or other products of experts
    errors   RequestError for what can't be run; TargetError without the libraries, or if they fail
    """
    config = load_config(model, "transformers")
    network = load_model(str(model), format)
    prepare(network)
    chosen, row = (list(prompts), request) if padded else ([prompts[request]], 0)
    columns = RequestColumns(
        config, format, row, max(map(len, chosen)) - len(chosen[row]), len(chosen[row]) + max_tokens - 1
    )
    with columns.tapped(network):
        generate(
            network,
            [greedy(str(index), tuple(prompt), max_tokens, case="record") for index, prompt in enumerate(chosen)],
        )
    return columns.recorder


class RequestColumns:
    """One request's columns of each forward pass: row `row` of the batch, in the first pass behind `padding`."""

    def __init__(self, config: ModelConfig, format: str, row: int, padding: int, tokens: int) -> None:
        self.recorder = Recorder(format=format)
        self.row, self.padding, self.tokens = row, padding, tokens
        self._layers, self._has_gates = config.layer_types, config.use_attention_gate
        self._windows = [window_of(config, layer) or tokens for layer in range(config.num_hidden_layers)]
        self._reached: dict[str, Iterator[int]] = {}

    def begin(self, ids: Any) -> None:
        """A pass over ids [B, T]: its last columns are the request's, the others padding."""
        self._batch = tuple(ids.shape)
        columns = ids[self.row].tolist()
        self.recorder.step(columns if self.recorder.sizes else columns[self.padding :])
        convolutions = [index for index, kind in enumerate(self._layers) if kind == CONV]
        others = [index for index, kind in enumerate(self._layers) if kind != CONV]
        self._reached = {"u": iter(convolutions), "rotated": iter(others), "gate": iter(others)}

    @property
    def count(self) -> int:
        """Rows of this pass that are the request's."""
        return self.recorder.sizes[-1]

    def layer(self, part: str) -> str:
        """Of the layer whose `part` this pass comes to next."""
        return f"model.layers.{next(self._reached[part])}"

    def keep(self, name: str, tensor: Any) -> None:
        """[B, T, ...], or [B*T, ...] as a mixture has it, of which the request's rows stay; of logits the last of them
        may be all there are.
        """
        if tensor.ndim == 2:
            tensor = tensor.reshape(*self._batch, -1)
        rows = as_numbers(tensor[self.row])[-self.count :]
        self.recorder.keep(name, rows.reshape(len(rows), -1))

    # --- what hooks and wrapped functions see

    def module_ran(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        if name == EMBEDDINGS:
            self.begin(inputs[0])
        for end, meaning in INPUTS.items():
            if name.endswith(end) and (self._has_gates or end != ".self_attn.out_proj"):
                self.keep(name.removesuffix(end) + meaning, inputs[0])
        self.keep(name, output[0] if isinstance(output, tuple) else output)

    def router_ran(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        for part, tensor in zip(ROUTED, output, strict=True):
            self.keep(name.removesuffix("gate") + part, tensor)

    def experts_ran(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        self.keep(name.removesuffix("experts") + "mixed", output)

    def rotated(self, original: Any, *arguments: Any, **options: Any) -> Any:
        """Queries [B, H, T, E] and keys [B, G, T, E]."""
        output, layer = original(*arguments, **options), self.layer("rotated")
        for name, heads in zip(("q_rotated", "k_rotated"), output, strict=True):
            self.keep(f"{layer}.self_attn.{name}", heads.transpose(1, 2))
        return output

    def updated(self, original: Any, cache: Any, keys: Any, values: Any, layer: int, *more: Any, **options: Any) -> Any:
        """Keys and values [B, G, C, E] as attention finds them in the cache."""
        output = original(cache, keys, values, layer, *more, **options)
        end = len(self.recorder.token_ids)
        first = max(0, end - self.count - self._windows[layer] + 1)
        for name, heads in zip(("keys_read", "values_read"), output, strict=True):
            positions = as_numbers(heads[self.row].transpose(0, 1))[first - end :]
            self.recorder.keep(f"model.layers.{layer}.self_attn.{name}", positions.reshape(len(positions), -1))
        return output

    def interface(self, original: Any, *arguments: Any, **options: Any) -> Any:
        """The attention that the model asks for, tapped."""
        return partial(self.attended, original(*arguments, **options))

    def attended(self, original: Any, module: Any, *arguments: Any, **options: Any) -> Any:
        """Attention's output [B, T, H, E]; its weights [B, H, T, C], where they are made."""
        output, prefix = original(module, *arguments, **options), f"model.layers.{module.layer_idx}.self_attn"
        self.keep(f"{prefix}.attended", output[0])
        if output[1] is not None:
            weights, end = as_numbers(output[1][self.row].transpose(0, 1))[-self.count :], len(self.recorder.token_ids)
            columns = min(weights.shape[2], end)
            wide = np.pad(weights[:, :, -columns:], ((0, 0), (0, 0), (end - columns, self.tokens - end)))
            self.recorder.keep(f"{prefix}.weights", wide.reshape(len(wide), -1))
        return output

    def gates(self, original: Any, *arguments: Any, **options: Any) -> Any:
        """The heads' gates [B, T, H]: the one sigmoid of an LFM3."""
        output = original(*arguments, **options)
        self.keep(f"{self.layer('gate')}.self_attn.gate", output)
        return output

    def convolved(self, cached: int, original: Any, u: Any, *arguments: Any, **options: Any) -> Any:
        """u [B, D, columns]: what the cache holds, if anything, then this pass's columns; or those of a step of one
        token, behind `cached` argument: the cached columns [B, D, L-1 or L], which are moved on.
        """
        parts = [as_numbers(part[self.row].T) for part in (*arguments[:cached], u)]
        output, window = original(u, *arguments, **options), np.concatenate(parts)  # [columns, D]
        layer, columns = f"{self.layer('u')}.conv", self.taps - 1
        self.recorder.keep(f"{layer}.u", window[-self.count :])
        before = np.pad(window[: -self.count], ((columns, 0), (0, 0)))  # zeros where there is nothing
        self.recorder.keep(f"{layer}.state", before[len(before) - columns :].reshape(1, -1))
        self.keep(f"{layer}.conv", output.transpose(1, 2))
        return output

    @contextmanager
    def tapped(self, network: Any) -> Iterator[None]:
        """Hooks and wrapped functions, as long as the block lasts."""
        from transformers.cache_utils import Cache

        modeling = sys.modules[type(network).__module__]  # of lfm2, lfm2_moe or lfm3
        self.taps = network.config.conv_L_cache
        with ExitStack() as stack:
            stack.enter_context(around(modeling, "apply_rotary_pos_emb", self.rotated))
            stack.enter_context(around(modeling, "causal_conv1d_fn", partial(self.convolved, 0)))
            stack.enter_context(around(modeling, "causal_conv1d_update", partial(self.convolved, 1)))
            stack.enter_context(around(Cache, "update", self.updated))
            stack.enter_context(around(modeling.ALL_ATTENTION_FUNCTIONS, "get_interface", self.interface))
            if self._has_gates:
                stack.enter_context(around(modeling.torch, "sigmoid", self.gates))
            for module_name, module in network.named_modules():
                name = ours(module_name)
                if type(module).__name__ == "Identity":  # where an LFM3 has no norm behind its operators
                    continue
                is_layer = name.startswith("model.layers.") and name.count(".") == 2
                if name.endswith(ROUTER):
                    ran = self.router_ran
                elif name.endswith(EXPERTS):
                    ran = self.experts_ran
                elif is_layer or name.endswith(OUTPUTS):
                    ran = self.module_ran
                else:
                    continue
                stack.callback(module.register_forward_hook(partial(ran, name)).remove)
            yield


def ours(name: str) -> str:
    """A module's name as `locate` has it."""
    for end, meaning in NAMES.items():
        if name.endswith(end):
            return name.removesuffix(end) + meaning
    return name


def as_numbers(tensor: Any) -> Array:
    """A copy; of float16 and bfloat16 in float32, in which they are exact. Whole numbers stay whole."""
    rows = tensor.detach().cpu()
    return np.array((rows.float() if rows.is_floating_point() else rows).numpy())


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> Any:
    """A context manager: while it lasts, owner.name(...) is wrapper(original, ...)."""
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        return wrapper(original, *arguments, **options)

    return patch.object(owner, name, wrapped)
