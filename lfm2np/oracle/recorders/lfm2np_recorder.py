"""lfm2np's own activations under the names that `locate` reads: an example of a dump, and what its tests put faults in.

The network itself runs, reference.py's or the engine's; only its arithmetic is wrapped. Which tensor an operation makes
is told from the matrix of the last product: that stays right where a fault leaves a norm or a sum out, or adds one.
Products of an expert's matrices, of some tokens each, are not kept.

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
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.sequence import sample_name
from lfm2np.oracle.locate.operations import window_of
from lfm2np.oracle.recorders.recorder import Recorder
from lfm2np.truth import reference
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import expected_tensors
from lfm2np.truth.weights import ModelWeights, named_weights
from scheduler import FREED

Array = NDArray[Any]
Dump = dict[str, Array]
Reads = dict[str, list[Array]]  # by tensor, what each request of a pass found in the caches, in the plan's order
Awaited = dict[str, list[tuple[str, str]]]  # by operation, names of the input and the output of each that comes
HEAD_NORM = "rms_norm of heads"
# After a product with the matrix of this name, what comes before the next: see `awaited_after`.
AFTER: dict[str, Awaited] = {
    "conv.in_proj": {
        "multiply": [("", "conv.u"), ("", "conv.gated")],
        "convolve": [("", "conv.conv")],
    },
    "self_attn.q_proj": {
        HEAD_NORM: [("", "self_attn.q_layernorm"), ("", "self_attn.k_layernorm")],
        "rotate": [("", "self_attn.q_rotated"), ("", "self_attn.k_rotated")],
    },
    "self_attn.g_proj": {"sigmoid": [("", "self_attn.gate")], "multiply": [("self_attn.attended", "")]},
    "feed_forward.w1": {"swiglu": [("", "feed_forward.gated")]},
    "feed_forward.gate": {
        "sigmoid": [("", "feed_forward.scores")],
        "top_k": [("", "feed_forward.experts_chosen")],
        "routing_weights": [("", "feed_forward.expert_weights")],
        "combine_experts": [("", "feed_forward.mixed")],
    },
}
TAPPED = {"rms_norm", *(operation for awaited in AFTER.values() for operation in awaited)}


def awaited_after(config: ModelConfig, index: int, name: str) -> Awaited:
    """After a product with the matrix `name` of a layer; norms tell what enters them, too."""
    layer, is_last = f"model.layers.{index}", index + 1 == config.num_hidden_layers
    leaving = [("", f"{layer}.post_ffn_norm")] if config.use_sandwich_norm else []
    leaving.append((layer, "model.embedding_norm" if is_last else f"model.layers.{index + 1}.operator_norm"))
    norms: list[tuple[str, str]] = []
    if name.endswith("out_proj"):
        norms = [("", f"{layer}.post_operator_norm")] if config.use_sandwich_norm else []
        norms += [(f"{layer}.residual", f"{layer}.ffn_norm"), *(leaving if config.is_sparse(index) else [])]
    elif name in ("feed_forward.w2", "feed_forward.gate"):
        norms = leaving
    awaited = {
        operation: [(before and f"{layer}.{before}", after and f"{layer}.{after}") for before, after in pairs]
        for operation, pairs in AFTER.get(name, {}).items()
    }
    return {**awaited, "rms_norm": norms}


class RecordingNumerics:
    """An arithmetic that keeps what passes through it: tensors of each forward pass, and its reads of the caches."""

    def __init__(self, weights: ModelWeights, config: ModelConfig, numerics: Numerics) -> None:
        self._numerics, self._config = numerics, config
        self._places = places(weights, config)
        self._awaited: Awaited = {}
        self._layer = ""
        self._keeps_reads = isinstance(numerics, Ieee)  # exact's cache holds numbers of its grid, not the keys' own
        self.passes: list[Dump] = []
        self.reads: list[Reads] = []

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._numerics, name)
        if name not in TAPPED:
            return operation

        def recorded(x: Any, *arguments: Any, **named: Any) -> Any:
            output = operation(x, *arguments, **named)
            self._keep_awaited(HEAD_NORM if name == "rms_norm" and x.ndim == 3 else name, x, output)
            return output

        return recorded

    def _keep_awaited(self, operation: str, x: Array, output: Array) -> None:
        """If it is of all tokens."""
        awaited = self._awaited.get(operation)
        if awaited and len(output) == len(self.passes[-1]["model.embed_tokens"]):
            for name, values in zip(awaited.pop(0), (x, output), strict=True):
                if name:
                    self._keep(name, values)

    def _keep(self, name: str, values: Array) -> None:
        self.passes[-1][name] = np.array(values).reshape(len(values), -1)

    def embed(self, rows: Array) -> Array:
        """A pass begins."""
        output = self._numerics.embed(rows)
        self.passes.append({})
        self.reads.append({})
        self._keep("model.embed_tokens", output)
        self._awaited = {"rms_norm": [("", "model.layers.0.operator_norm")]}
        return output

    def linear(self, x: Array, matrix: Matrix, bias: NDArray[np.float32] | None = None) -> Array:
        output, kept = self._numerics.linear(x, matrix, bias), self.passes[-1]
        if id(matrix) not in self._places:  # an expert's, or the head, or what stands in its place
            if "model.embedding_norm" in kept:
                self._keep("lm_head", output)
            return output
        index, names, sizes = self._places[id(matrix)]
        self._layer = layer = f"model.layers.{index}"
        if f"{layer}.{names[0]}" in kept:  # again, for something else than the step's tokens
            return output
        if names == ("self_attn.out_proj",):
            self._keep(f"{layer}.self_attn.{'gated' if f'{layer}.self_attn.g_proj' in kept else 'attended'}", x)
        for name, part in zip(names, np.split(output, np.cumsum(sizes)[:-1], axis=-1), strict=True):
            self._keep(f"{layer}.{name}", part)
        self._awaited = awaited_after(self._config, index, names[0])
        return output

    def combine_experts(self, outputs: Array, weights: Array) -> Array:
        """[T, K, D] by [T, K], the weights as they arrive here."""
        output = self._numerics.combine_experts(outputs, weights)
        self._keep_awaited("combine_experts", outputs, output)
        chosen = self.passes[-1].get(f"{self._layer}.feed_forward.experts_chosen")
        if chosen is not None and chosen.shape == weights.shape:
            self._keep(f"{self._layer}.feed_forward.expert_weights", weights)
            self._keep(f"{self._layer}.feed_forward.expert_outputs", outputs)
        return output

    def convolve_ragged(
        self, windows: Sequence[Array], taps: NDArray[np.float32], bias: NDArray[np.float32] | None = None
    ) -> Array:
        """All requests' rows of a pass; a window [L-1+t, D] begins with the state that its request found."""
        output = self._numerics.convolve_ragged(windows, taps, bias)
        self._keep_awaited("convolve", output, output)
        if columns := taps.shape[1] - 1:
            states = [np.array(window[:columns]).reshape(1, -1) for window in windows]
            self.reads[-1][f"{self._layer}.conv.state"] = states
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


def places(weights: ModelWeights, config: ModelConfig) -> dict[int, tuple[int, tuple[str, ...], tuple[int, ...]]]:
    """By a matrix's identity: its layer, the tensors it makes, and their widths."""
    matrices: dict[int, tuple[int, tuple[str, ...], tuple[int, ...]]] = {}
    shapes = expected_tensors(config)
    for index, layer in enumerate(weights.layers):
        for names, weight in named_weights(layer):
            sizes = [shapes[f"model.layers.{index}.{name}"] for name in names]
            if len(sizes[0]) == 2:
                tensors = tuple(name.removesuffix(".weight") for name in names)
                matrices[id(weight)] = index, tensors, tuple(rows for rows, _ in sizes)
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

    def run(self) -> None:
        while self.engine.has_unfinished:
            self.finished |= {output.request_id: output for output in self.engine.step() if output.finished}

    def dump(self, request_id: str, index: int = 0) -> Dump:
        """Of a finished request the tokens that went through the network, their rows, and its steps."""
        output = self.finished[request_id]
        (sample,) = (sample for sample in output.outputs if sample.index == index)
        ids, name = (*output.prompt_token_ids, *sample.token_ids)[:-1], sample_name(request_id, index)
        lines = [json.loads(line) for line in self._trace.getvalue().splitlines()]
        plans = [line["plan"]["scheduled"] for line in lines if line["kind"] == "step" and line["plan"]["scheduled"]]
        recorder = Recorder(prompt=ids)
        for number, scheduled in enumerate(plans):
            row = 0
            for place, entry in enumerate(scheduled):
                start, end = entry["start"], min(entry["start"] + len(entry["token_ids"]), len(ids))
                if entry["request_id"] == name and start < end:
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
