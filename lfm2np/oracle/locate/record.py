"""lfm2np's own activations under the names that `locate` reads: an example of a dump, and what its tests put faults in.

The network itself runs, reference.py's or the engine's; only its arithmetic is wrapped. Which tensor an operation makes
is told from the matrix of the last product: that stays right where a fault leaves a norm or a sum out, or adds one.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lfm2np import reference
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.weights import ModelWeights, ShortConvWeights
from lfm2np.engine.engine import Engine
from lfm2np.engine.outputs import RequestOutput
from lfm2np.numerics import Numerics
from lfm2np.numerics.matrix import Matrix
from lfm2np.sampling.params import SamplingParams

Array = NDArray[Any]
Dump = dict[str, Array]


class Recorder:
    """An arithmetic that keeps what passes through it; `passes` has one dict of tensors for each forward pass."""

    def __init__(self, weights: ModelWeights, numerics: Numerics) -> None:
        self._numerics = numerics
        self._places = places(weights)
        self._last = f"model.layers.{len(weights.layers) - 1}"
        self._layer = self._norm = self._entering = ""
        self.passes: list[Dump] = []

    def __getattr__(self, name: str) -> Any:
        """Operations that are not recorded."""
        return getattr(self._numerics, name)

    def _keep(self, name: str, values: Array) -> None:
        if name:
            self.passes[-1][name] = np.array(values).reshape(len(values), -1)

    def embed(self, rows: Array) -> Array:
        """A pass begins."""
        made = self._numerics.embed(rows)
        self.passes.append({})
        self._keep("model.embed_tokens", made)
        self._norm, self._entering = "model.layers.0.operator_norm", ""
        return made

    def rms_norm(self, x: Array, weight: NDArray[np.float32], eps: float) -> Array:
        """Also keeps what enters the norm: the sum before it."""
        made = self._numerics.rms_norm(x, weight, eps)
        if x.ndim == 3:
            first, second = (f"{self._layer}.self_attn.{part}_layernorm" for part in "qk")
            self._keep(second if first in self.passes[-1] else first, made)
        else:
            self._keep(self._entering, x)
            self._keep(self._norm, made)
        return made

    def linear(self, x: Array, matrix: Matrix, bias: NDArray[np.float32] | None = None) -> Array:
        made = self._numerics.linear(x, matrix, bias)
        if id(matrix) not in self._places:  # the head, or what stands in its place
            self._keep("lm_head", made)
            return made
        self._layer, names, sizes = self._places[id(matrix)]
        if f"{self._layer}.{names[0]}" in self.passes[-1]:  # again, for something else than the step's tokens
            return made
        if names == ("self_attn.out_proj",):
            self._keep(f"{self._layer}.self_attn.attended", x)
        for name, part in zip(names, np.split(made, np.cumsum(sizes)[:-1], axis=-1), strict=True):
            self._keep(f"{self._layer}.{name}", part)
        if names[0].endswith("out_proj"):
            self._norm, self._entering = f"{self._layer}.ffn_norm", f"{self._layer}.residual"
        elif names == ("feed_forward.w2",):
            following = f"model.layers.{int(self._layer.rpartition('.')[2]) + 1}.operator_norm"
            self._norm = "model.embedding_norm" if self._layer == self._last else following
            self._entering = self._layer
        return made

    def convolve_ragged(
        self, windows: Sequence[Array], taps: NDArray[np.float32], bias: NDArray[np.float32] | None = None
    ) -> Array:
        """All requests' rows of a pass."""
        made = self._numerics.convolve_ragged(windows, taps, bias)
        self._keep(f"{self._layer}.conv.conv", made)
        return made

    def convolve(
        self, history: Array, u: Array, taps: NDArray[np.float32], bias: NDArray[np.float32] | None = None
    ) -> Array:
        made = self._numerics.convolve(history, u, taps, bias)
        self._keep(f"{self._layer}.conv.conv", made)
        return made


def places(weights: ModelWeights) -> dict[int, tuple[str, tuple[str, ...], tuple[int, ...]]]:
    """By a matrix's identity: its layer, the tensors it makes, and their widths."""
    found: dict[int, tuple[str, tuple[str, ...], tuple[int, ...]]] = {}
    for index, layer in enumerate(weights.layers):
        prefix, hidden = f"model.layers.{index}", len(layer.operator_norm)
        if isinstance(layer.operator, ShortConvWeights):
            found[id(layer.operator.in_proj)] = prefix, ("conv.in_proj",), (3 * hidden,)
            found[id(layer.operator.out_proj)] = prefix, ("conv.out_proj",), (hidden,)
        else:
            heads_width = layer.operator.out_proj.inputs
            keys_width = layer.operator.scale.values.size
            names = tuple(f"self_attn.{part}_proj" for part in "qkv")
            found[id(layer.operator.qkv_proj)] = prefix, names, (heads_width, keys_width, keys_width)
            found[id(layer.operator.out_proj)] = prefix, ("self_attn.out_proj",), (hidden,)
        width = layer.down_proj.inputs
        found[id(layer.gate_up_proj)] = prefix, ("feed_forward.w1", "feed_forward.w3"), (width, width)
        found[id(layer.down_proj)] = prefix, ("feed_forward.w2",), (hidden,)
    return found


def record(model: LoadedModel, token_ids: Sequence[int]) -> Dump:
    """All tensors [T, width] of one sequence as reference.py computes them, and `token_ids`."""
    ids = model.prompt_ids(list(token_ids))
    recorder = Recorder(model.weights, model.numerics)
    numerics = cast(Numerics, recorder)
    states = reference.hidden_states(model.weights, model.config, numerics, ids)
    logits = reference.output_logits(model.weights, numerics, states)
    return {"token_ids": np.array(ids, np.int64), **recorder.passes[0], "lm_head": logits}


class RecordedEngine:
    """An engine whose passes are recorded; `dump` puts one sequence's rows together from the steps that computed them.

    Rows that came from the prefix cache are those of the request that computed them. Logits are not among them, as the
    engine computes those of few positions only.
    """

    def __init__(self, model: LoadedModel, **options: Any) -> None:
        self._recorder = Recorder(model.weights, model.numerics)
        self._trace = io.StringIO()
        recorded = replace(model, numerics=cast(Numerics, self._recorder))
        self.engine = Engine(recorded, trace=self._trace, **options)
        self.finished: dict[str, RequestOutput] = {}

    def add(self, request_id: str, token_ids: Sequence[int], max_tokens: int = 1, **params: Any) -> None:
        greedy = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params})
        self.engine.add_request(request_id, token_ids, greedy)

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self.finished[output.request_id] = output

    def run(self) -> None:
        while self.engine.has_unfinished:
            self.step()

    def dump(self, request_id: str, index: int = 0) -> Dump:
        """Of a finished request the tokens that went through the network, and their rows: the latest of each."""
        sequences = {
            sample_name(output.request_id, one.index): output.prompt_token_ids + one.token_ids
            for output in self.finished.values()
            for one in output.outputs
        }
        own = sample_name(request_id, index)
        table = rows_by_prefix(self._recorder.passes, self._trace.getvalue().splitlines(), sequences, own)
        ids = sequences[own][:-1]
        rows = [table[ids[: position + 1]] for position in range(len(ids))]
        return {"token_ids": np.array(ids, np.int64)} | {
            name: np.stack([row[name] for row in rows]) for name in rows[0]
        }


def sample_name(request_id: str, index: int) -> str:
    """What the scheduler calls a sample."""
    return request_id if index == 0 else f"{request_id}#{index}"


def rows_by_prefix(
    passes: Sequence[Dump], trace: Sequence[str], sequences: Mapping[str, tuple[int, ...]], own: str
) -> dict[tuple[int, ...], Dump]:
    """By a token and all before it: its row of every tensor. Those of the request `own` come before any other's."""
    steps = [line for line in map(json.loads, trace) if line["kind"] == "step" and line["plan"]["scheduled"]]
    found: dict[tuple[int, ...], Dump] = {}
    for line, tensors in zip(steps, passes, strict=True):
        row = 0
        for entry in line["plan"]["scheduled"]:
            name, start, count = entry["request_id"], entry["start"], len(entry["token_ids"])
            rejected = max(0, entry["num_drafts"] - max(0, len(line["tokens"].get(name, ())) - 1))
            for index in range(count - rejected if name in sequences else 0):
                computed = {key: tensor[row + index] for key, tensor in tensors.items() if key != "lm_head"}
                prefix = sequences[name][: start + index + 1]
                if name == own or prefix not in found:
                    found[prefix] = computed
            row += count
    return found
