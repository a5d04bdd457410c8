"""mlx-lm's activations, in process: what its BatchGenerator computes, at the modules of `mlx_lm.models.lfm2` and
`lfm2_moe`.

All requests run in one generator, as in mlx-lm's server: prompts without their last tokens in batches padded on the
right, in chunks; then one row of each request per step, in a batch whose keys are padded on the left. Each pass with
rows of the request is a step. Inputs and outputs of modules are evaluated at once, where mlx would do so later.

Not recorded: attention's scores and weights, which mlx computes within one operation; a router's scores and weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.config_json import load_config
from lfm2np.oracle.engines.records import fault
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.recorders.engine_versions import (
    around,
    require_format,
    require_model_type,
    require_request,
    require_version,
)
from lfm2np.oracle.recorders.recorder import Recorder

Array = NDArray[Any]
VERSIONS = {"mlx": ("0.32.4",), "mlx_lm": ("0.32.2",)}
FORMATS = ("float32", "bfloat16", "float16")
BEFORE = {  # a module of ours -> what it reads
    "conv.out_proj": "conv.gated",
    "self_attn.out_proj": "self_attn.attended",
    "ffn_norm": "residual",
    "feed_forward.w2": "feed_forward.gated",
}
OURS = {  # mlx-lm's names in a model with a mixture of experts
    "feed_forward.gate_proj": "feed_forward.w1",
    "feed_forward.up_proj": "feed_forward.w3",
    "feed_forward.down_proj": "feed_forward.w2",
    "feed_forward.switch_mlp": "feed_forward.expert_outputs",
}
UNKNOWN = ("conv", "self_attn", "feed_forward")  # modules whose output is that of one in them


def record(
    model: Path,
    prompts: Sequence[Sequence[int]],
    request: int,
    max_tokens: int,
    format: str,
    chunk: int = 2048,
    at_once: int = 32,
) -> Recorder:
    """Request number `request` of prompts that one BatchGenerator runs, greedily, `max_tokens` tokens each.

    chunk    most tokens of a prompt in a pass (prefill_step_size)
    at_once  most requests of a batch; 1: one after another
    """
    config = load_config(model)
    require_model_type(config, "mlx", ("lfm2", "lfm2_moe"))
    require_request(prompts, request, max_tokens, config)
    network = load(model, format)
    from mlx_lm.generate import BatchGenerator

    total = len(prompts[request]) + max_tokens - 1
    tap = Tap(names_of(network), request, total, Recorder(format=format))
    with tapped(tap, network):
        generator = BatchGenerator(
            network, prefill_step_size=chunk, prefill_batch_size=at_once, completion_batch_size=at_once
        )
        numbered = [list(prompt) for prompt in prompts]  # 0, 1, ...
        generator.insert(numbered, [max_tokens] * len(prompts))
        running = len(prompts)
        while running:
            running -= sum(response.finish_reason is not None for response in generator.next()[1])
    return tap.recorder


def load(model: Path, format: str) -> Any:
    """mlx-lm's network with all its numbers in `format`."""
    for package, known in VERSIONS.items():
        require_version(package, known)
    require_format(format, FORMATS)
    import mlx.core as mx
    from mlx_lm.utils import load_model

    try:
        network, _ = load_model(model, model_config=missing_keys(model))
    except Exception as problem:
        raise TargetError(f"mlx-lm: {model}: {fault(problem)}") from None
    biases = [(block, block.expert_bias) for block in sparse(network).values() if "expert_bias" in block]
    network.set_dtype(getattr(mx, format))
    for block, bias in biases:  # which mlx-lm casts in no conversion
        block.expert_bias = bias
    return network


def sparse(network: Any) -> dict[str, Any]:
    """The mixtures of experts, by their names."""
    return {name: module for name, module in network.named_modules() if hasattr(module, "switch_mlp")}


def missing_keys(model: Path) -> dict[str, Any]:
    """Keys that mlx-lm requires of config.json and that are missing there."""
    config, keys = load_config(model), json.loads((model / "config.json").read_text(encoding="utf-8"))
    same = ("num_key_value_heads", "max_position_embeddings", "norm_eps", "conv_bias", "conv_L_cache", "rope_theta")
    feed_forward = {
        "block_dim": config.hidden_size,
        "block_ff_dim": config.feed_forward_size,
        "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 1,
    }
    missing = {key: getattr(config, key) for key in same if keys.get(key) is None}
    if keys.get("layer_types") is None:
        missing["layer_types"] = list(config.layer_types)
    return missing | ({} if all(key in keys for key in feed_forward) else feed_forward)


def names_of(network: Any) -> dict[int, str]:
    """By a module's identity our name of its output; the whole network's are the logits."""
    names = {
        id(module): our_name(name)
        for name, module in network.named_modules()
        if name.rpartition(".")[2] not in UNKNOWN and ".switch_mlp." not in name
    }
    names |= {id(module): f"{name}.mixed" for name, module in sparse(network).items()}
    convolutions = {id(module): name for name, module in network.named_modules() if name.endswith("conv.conv")}
    return names | convolutions | {id(network): "lm_head", id(network.model): ""}


def our_name(name: str) -> str:
    layer, part = within_layer(name)
    return f"{layer}.{OURS[part]}" if part in OURS else name


@dataclass
class Pass:
    """The request's part of the pass that runs.

    Its `count` first columns of row `row` of the batch are its tokens from `start` on; count 0: it has none.
    """

    row: int = 0
    start: int = 0
    count: int = 0
    calls: dict[str, int] = field(default_factory=dict)  # of each module


class Tap:
    """Records the request's rows of module outputs."""

    def __init__(self, names: Mapping[int, str], request: int, total: int, recorder: Recorder) -> None:
        self.names, self.recorder = names, recorder
        self._request, self._total = request, total
        self._done = 0  # tokens of the request that earlier passes had
        self._uids: list[int] = []  # of the batch that runs
        self._left: list[int] = []  # tokens of each of its rows that are still to come
        self._pass = Pass()
        self._attention = ""  # the layer whose rotation ran last

    def batch_begins(self, uids: Sequence[int], lengths: Sequence[int]) -> None:
        self._uids, self._left = list(uids), list(lengths)

    def pass_begins(self, tokens: Array) -> None:
        """tokens [B, t], of which each row's first ones count."""
        counts = valid_columns(self._left, tokens.shape[1])
        self._left = [left - count for left, count in zip(self._left, counts, strict=True)]
        self._pass = Pass()
        if self._request in self._uids:
            row = self._uids.index(self._request)
            count = min(counts[row], self._total - self._done)
            self._pass = Pass(row, self._done, count)
            self._done += count
            if count:
                self.recorder.step(tokens[row, :count].tolist())

    def module_ran(self, module: Any, given: Any, output: Any, chosen: Any = None) -> None:
        """`chosen`: the experts [B, t, K] that those of a mixture are called with."""
        name = self.names.get(id(module), "")
        if not self._pass.count or not name:
            return
        layer, part = within_layer(name)
        if part == "self_attn.rope":  # of queries, then of keys: [B, heads, t, E]
            self._attention = layer
            number = self._pass.calls[layer] = self._pass.calls.get(layer, 0) + 1
            turned = f"{layer}.self_attn.{'q' if number == 1 else 'k'}_rotated"
            self.recorder.keep(turned, self._rows(output.transpose(0, 2, 1, 3)))
            return
        if part == "conv.conv":  # reads the state, then u
            columns = given.shape[1] - output.shape[1]
            self.recorder.keep(f"{layer}.conv.state", numbers(given[self._pass.row, :columns])[None])
            self.recorder.keep(f"{layer}.conv.u", self._rows(given[:, columns:]))
        elif part == "feed_forward.expert_outputs":
            rows = np.array(chosen[self._pass.row, : self._pass.count]).astype(np.int64)
            self.recorder.keep(f"{layer}.feed_forward.experts_chosen", rows)
        elif part in BEFORE:
            self.recorder.keep(f"{layer}.{BEFORE[part]}", self._rows(given))
        self.recorder.keep(name, self._rows(output))

    def attention_runs(self, keys: Any, values: Any, cache: Any) -> None:
        """keys and values [B, G, C, E] as the cache has them, behind `left_padding` columns of each row."""
        if self._pass.count:
            padding = int(cache.left_padding[self._pass.row])
            end = self._pass.start + self._pass.count
            for name, cached in (("keys_read", keys), ("values_read", values)):
                heads = numbers(cached[self._pass.row, :, padding : padding + end])
                self.recorder.keep(f"{self._attention}.self_attn.{name}", side_by_side(heads))

    def _rows(self, batch: Any) -> Array:
        """[B, t, ...] -> [count, width]"""
        return numbers(batch[self._pass.row, : self._pass.count]).reshape(self._pass.count, -1)


def valid_columns(left: Sequence[int], columns: int) -> list[int]:
    """Of a batch padded on the right, how many columns of each row are tokens."""
    return [max(0, min(count, columns)) for count in left]


def within_layer(name: str) -> tuple[str, str]:
    """model.layers.3.conv.conv -> model.layers.3 and conv.conv; outside of layers "" and the name."""
    parts = name.split(".", 3)
    return (".".join(parts[:3]), parts[3]) if name.startswith("model.layers.") and len(parts) == 4 else ("", name)


def side_by_side(heads: Array) -> Array:
    """[G, C, E] -> [C, G * E]"""
    return heads.transpose(1, 0, 2).reshape(heads.shape[1], -1)


def numbers(array: Any) -> Array:
    """As float32, which holds float16 and bfloat16 exactly."""
    import mlx.core as mx

    return np.array(array.astype(mx.float32))


@contextmanager
def tapped(tap: Tap, network: Any) -> Iterator[None]:
    """While it lasts, batches, passes, modules and attention call the tap."""
    from mlx_lm.generate import GenerationBatch, PromptProcessingBatch

    def prompt(original: Callable[..., Any], batch: Any, tokens: Any) -> Any:
        tap.batch_begins(batch.uids, [len(prompt_tokens) for prompt_tokens in tokens])
        return original(batch, tokens)

    def step(original: Callable[..., Any], batch: Any) -> Any:
        tap.batch_begins(batch.uids, [1] * len(batch.uids))
        return original(batch)

    def attend(original: Callable[..., Any], queries: Any, keys: Any, values: Any, cache: Any, **options: Any) -> Any:
        tap.attention_runs(keys, values, cache)
        return original(queries, keys, values, cache=cache, **options)

    def call(original: Callable[..., Any], module: Any, *arguments: Any, **options: Any) -> Any:
        if module is network:
            tap.pass_begins(np.array(arguments[0]))
        output = original(module, *arguments, **options)
        chosen = arguments[1] if hasattr(module, "down_proj") and len(arguments) > 1 else None
        tap.module_ran(module, arguments[0], output, chosen)
        return output

    with ExitStack() as stack:
        stack.enter_context(around(PromptProcessingBatch, "prompt", prompt))
        stack.enter_context(around(GenerationBatch, "_step", step))
        modeling = sys.modules[type(network).__module__]  # of lfm2 or lfm2_moe
        stack.enter_context(around(modeling, "scaled_dot_product_attention", attend))
        for kind in {type(module) for _, module in network.named_modules() if id(module) in tap.names}:
            stack.enter_context(around(kind, "__call__", call))
        yield
