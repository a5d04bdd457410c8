"""lfm2np's own activations under the names that `locate` reads: an example of a dump, and what its tests put faults in.

The network itself runs, reference.py's or the engine's; only its arithmetic is wrapped. Which tensor an operation makes
is told from the matrix of the last product: that stays right where a fault leaves a norm or a sum out, or adds one.
From a sparse layer's last norm, or its router's product, to the next norm, products are those of experts, of some
tokens each: they are not kept.

T tokens of a pass, D hidden, G key/value heads, E head_dim, L convolution taps, C tokens that a request sees, N
experts, K experts of a token.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import Numerics
from lfm2np.arithmetic.attention import Parts
from lfm2np.arithmetic.ieee import Ieee
from lfm2np.arithmetic.matrix import AttentionScale, Matrix
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.engine import Engine
from lfm2np.engine.outputs import RequestOutput
from lfm2np.engine.samples import sample_name
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle.locate.operations import window_of
from lfm2np.oracle.recorders.recorder import Recorder
from lfm2np.truth import reference
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import expected_tensors
from lfm2np.truth.weights import MixtureWeights, ModelWeights, named_weights
from scheduler import FREED

Array = NDArray[Any]
Dump = dict[str, Array]
LAST, ROUTER = "feed_forward.w2", "feed_forward.gate"  # products after which the next norm is the next layer's
OUTPUTS = {  # of an operation: under the first of these names that its layer does not have yet
    "rotate": ("self_attn.q_rotated", "self_attn.k_rotated"),
    "top_k": ("feed_forward.experts_chosen",),
    "routing_weights": ("feed_forward.expert_weights",),
}
Reads = dict[str, list[Array]]  # by tensor, what each request of a pass found in the caches, in the plan's order


class RecordingNumerics:
    """An arithmetic that keeps what passes through it: tensors of each forward pass, and its reads of the caches."""

    def __init__(self, weights: ModelWeights, config: ModelConfig, numerics: Numerics) -> None:
        self._numerics = numerics
        self._places = places(weights, config)
        self._sandwich = config.use_sandwich_norm
        self._last = f"model.layers.{len(weights.layers) - 1}"
        self._before_experts = {
            f"model.layers.{index}.ffn_norm"
            for index, layer in enumerate(weights.layers)
            if isinstance(layer.feed_forward, MixtureWeights)
        }
        self._layer = self._norm = self._entering = ""
        self._in_experts = False
        self._keeps_reads = isinstance(numerics, Ieee)  # exact's cache holds numbers of its grid, not the keys' own
        self.passes: list[Dump] = []
        self.reads: list[Reads] = []

    def __getattr__(self, name: str) -> Any:
        """Operations whose output alone is recorded, or nothing."""
        operation = getattr(self._numerics, name)
        if name not in OUTPUTS:
            return operation

        def recorded(*arguments: Any, **named: Any) -> Any:
            output = operation(*arguments, **named)
            self._keep_first(OUTPUTS[name], output)
            return output

        return recorded

    def _keep(self, name: str, values: Array) -> None:
        if name:
            self.passes[-1][name] = np.array(values).reshape(len(values), -1)

    def embed(self, rows: Array) -> Array:
        """A pass begins."""
        output = self._numerics.embed(rows)
        self.passes.append({})
        self.reads.append({})
        self._keep("model.embed_tokens", output)
        self._norm, self._entering = "model.layers.0.operator_norm", ""
        self._in_experts = False
        return output

    def rms_norm(self, x: Array, weight: NDArray[np.float32], eps: float) -> Array:
        """Also keeps what enters the norm: the sum before it."""
        output = self._numerics.rms_norm(x, weight, eps)
        if x.ndim == 3:
            first, second = (f"{self._layer}.self_attn.{part}_layernorm" for part in "qk")
            self._keep(second if first in self.passes[-1] else first, output)
        else:
            self._in_experts = False
            self._keep(self._entering, x)
            self._keep(self._norm, output)
            if self._norm in self._before_experts:
                self._enter_feed_forward(True)
            elif self._norm.endswith("post_operator_norm"):
                self._norm, self._entering = f"{self._layer}.ffn_norm", f"{self._layer}.residual"
            elif self._norm.endswith("post_ffn_norm"):
                self._leave_layer()
        return output

    def _enter_feed_forward(self, of_experts: bool) -> None:
        """The next norm is this layer's last, if it has one, or the next layer's, which reads this layer's output."""
        self._in_experts = of_experts
        if self._sandwich:
            self._norm, self._entering = f"{self._layer}.post_ffn_norm", ""
        else:
            self._leave_layer()

    def _leave_layer(self) -> None:
        following = f"model.layers.{int(self._layer.rpartition('.')[2]) + 1}.operator_norm"
        self._norm = "model.embedding_norm" if self._layer == self._last else following
        self._entering = self._layer

    def linear(self, x: Array, matrix: Matrix, bias: NDArray[np.float32] | None = None) -> Array:
        output = self._numerics.linear(x, matrix, bias)
        if id(matrix) not in self._places:  # an expert's, or the head, or what stands in its place
            self._keep("" if self._in_experts else "lm_head", output)
            return output
        self._layer, names, sizes = self._places[id(matrix)]
        if f"{self._layer}.{names[0]}" in self.passes[-1]:  # again, for something else than the step's tokens
            return output
        if names == ("self_attn.out_proj",):
            self._keep(f"{self._layer}.self_attn.{'gated' if self._has_gates() else 'attended'}", x)
        for name, part in zip(names, np.split(output, np.cumsum(sizes)[:-1], axis=-1), strict=True):
            self._keep(f"{self._layer}.{name}", part)
        if names[0].endswith("out_proj") and self._sandwich:
            self._norm, self._entering = f"{self._layer}.post_operator_norm", ""
        elif names[0].endswith("out_proj"):
            self._norm, self._entering = f"{self._layer}.ffn_norm", f"{self._layer}.residual"
        elif names[0] in (LAST, ROUTER):
            self._enter_feed_forward(names[0] == ROUTER)
        return output

    def _has_gates(self) -> bool:
        return f"{self._layer}.self_attn.g_proj" in self.passes[-1]

    def _keep_first(self, names: Sequence[str], values: Array) -> None:
        """Under the first of these names in this layer that has none in this pass, if it is of all tokens."""
        kept = self.passes[-1]
        free = [name for name in (f"{self._layer}.{part}" for part in names) if name not in kept]
        if free and len(values) == len(kept["model.embed_tokens"]):
            self._keep(free[0], values)

    def multiply(self, x: Array, y: Array) -> Array:
        """The gate on a convolution's input, then the one on its output; that on attention's heads."""
        output = self._numerics.multiply(x, y)
        if self._has_gates() and x.ndim == 3:
            self._keep_first(("self_attn.attended",), x)
        elif not self._has_gates():
            self._keep_first(("conv.u", "conv.gated"), output)
        return output

    def swiglu(self, gate: Array, up: Array) -> Array:
        output = self._numerics.swiglu(gate, up)
        self._keep("" if self._in_experts else f"{self._layer}.feed_forward.gated", output)
        return output

    def sigmoid(self, x: Array) -> Array:
        output = self._numerics.sigmoid(x)
        gate = self._has_gates() and not self._in_experts
        self._keep_first(("self_attn.gate",) if gate else ("feed_forward.scores",), output)
        return output

    def combine_experts(self, outputs: Array, weights: Array) -> Array:
        """[T, K, D] by [T, K], the weights as they arrive here."""
        output = self._numerics.combine_experts(outputs, weights)
        kept, mlp = self.passes[-1], f"{self._layer}.feed_forward"
        if len(output) == len(kept["model.embed_tokens"]):
            self._keep(f"{mlp}.mixed", output)
            if f"{mlp}.experts_chosen" in kept and kept[f"{mlp}.experts_chosen"].shape == weights.shape:
                self._keep(f"{mlp}.expert_weights", weights)
                self._keep(f"{mlp}.expert_outputs", outputs)
        return output

    def convolve_ragged(
        self, windows: Sequence[Array], taps: NDArray[np.float32], bias: NDArray[np.float32] | None = None
    ) -> Array:
        """All requests' rows of a pass; a window [L-1+t, D] begins with the state that its request found."""
        output = self._numerics.convolve_ragged(windows, taps, bias)
        self._keep(f"{self._layer}.conv.conv", output)
        columns = taps.shape[1] - 1
        if columns:
            self.reads[-1][f"{self._layer}.conv.state"] = [
                np.array(window[:columns]).reshape(1, -1) for window in windows
            ]
        return output

    def convolve(
        self, history: Array, u: Array, taps: NDArray[np.float32], bias: NDArray[np.float32] | None = None
    ) -> Array:
        output = self._numerics.convolve(history, u, taps, bias)
        self._keep(f"{self._layer}.conv.conv", output)
        return output

    def attend_ragged(
        self, queries: Array, rows: Sequence[slice], cached: Sequence[Parts], scale: AttentionScale
    ) -> Array:
        """All requests' rows of a pass, and the keys and values [C, G*E] that each found."""
        for index, what in enumerate(("keys_read", "values_read") if self._keeps_reads else ()):
            self.reads[-1][f"{self._layer}.self_attn.{what}"] = [
                np.concatenate([part[index] for part in parts]).reshape(sum(len(part[index]) for part in parts), -1)
                for parts in cached
            ]
        return self._numerics.attend_ragged(queries, rows, cached, scale)


def places(weights: ModelWeights, config: ModelConfig) -> dict[int, tuple[str, tuple[str, ...], tuple[int, ...]]]:
    """By a matrix's identity: its layer, the tensors it makes, and their widths."""
    matrices: dict[int, tuple[str, tuple[str, ...], tuple[int, ...]]] = {}
    shapes = expected_tensors(config)
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        for names, weight in named_weights(layer):
            sizes = [shapes[f"{prefix}.{name}"] for name in names]
            if len(sizes[0]) == 2:
                tensors = tuple(name.removesuffix(".weight") for name in names)
                matrices[id(weight)] = prefix, tensors, tuple(rows for rows, _ in sizes)
    return matrices


def record(model: LoadedModel, token_ids: Sequence[int]) -> Dump:
    """All tensors [T, width] of one sequence as reference.py computes them, and `token_ids`."""
    ids = model.prompt_ids(list(token_ids))
    recorder = RecordingNumerics(model.weights, model.config, model.numerics)
    numerics = cast(Numerics, recorder)
    states = reference.hidden_states(model.weights, model.config, numerics, ids)
    logits = reference.output_logits(model.weights, numerics, states)
    return {"token_ids": np.array(ids, np.int64), **recorder.passes[0], "lm_head": logits}


class RecordedEngine:
    """An engine whose passes are recorded; `dump` keeps one sequence's rows of the steps that computed them.

    Rows that came from the prefix cache, or from the sequence that it was forked of, are not among them, and no logits,
    as the engine computes those of few positions only. A pass with an overflow, or one computed again, can't be
    recorded.
    """

    def __init__(self, model: LoadedModel, **options: Any) -> None:
        self._recorder = RecordingNumerics(model.weights, model.config, model.numerics)
        self._trace = io.StringIO()
        recorded = replace(model, numerics=cast(Numerics, self._recorder))
        self.engine = Engine(recorded, trace=self._trace, **options)
        self._block_size = self.engine.scheduler.config.block_size
        self._windows = [window_of(model.config, index) for index in range(model.config.num_hidden_layers)]
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
        """Of a finished request the tokens that went through the network, their rows, and its steps."""
        output = self.finished[request_id]
        (sample,) = (sample for sample in output.outputs if sample.index == index)
        ids, name = (*output.prompt_token_ids, *sample.token_ids)[:-1], sample_name(request_id, index)
        lines = [json.loads(line) for line in self._trace.getvalue().splitlines()]
        plans = [line["plan"]["scheduled"] for line in lines if line["kind"] == "step" and line["plan"]["scheduled"]]
        recorder = Recorder()
        for number, scheduled in enumerate(plans):
            row = 0
            for place, entry in enumerate(scheduled):
                start, end = entry["start"], min(entry["start"] + len(entry["token_ids"]), len(ids))
                if entry["request_id"] == name and start < end:
                    if not recorder.sizes:
                        recorder.token_ids = list(ids[:start])
                    recorder.step(ids[start:end], start)
                    for tensor, rows in self._recorder.passes[number].items():
                        if tensor != "lm_head":
                            recorder.keep(tensor, rows[row : row + end - start])
                    freed = self._block_size * entry.get("window_table", ()).count(FREED)
                    for tensor, found in self._recorder.reads[number].items():
                        recorder.keep(tensor, self._seen(tensor, found[place], start, end, freed))
                row += len(entry["token_ids"])
        return recorder.tensors()

    def _seen(self, tensor: str, found: Array, start: int, end: int, freed: int) -> Array:
        """A state; of keys and values all that the rows from `start` to `end` see (NaN: none).

        freed  positions whose blocks of layers with a window were given back
        """
        if tensor.endswith(".state"):
            return found
        first, window = 0, self._windows[int(tensor.split(".")[2])]
        if window is not None:
            first, end = max(0, start + 1 - window) - freed, end - freed
        rows, early = found[max(0, first) : end], max(0, -first)
        return np.pad(rows, [(early, end - first - early - len(rows)), (0, 0)], constant_values=np.nan)
