"""What a step computed, operation by operation: lines of kind "detail" in a trace, for the drawings, on request.

The network itself runs; only its arithmetic is wrapped. Each call becomes one line: what was done, in which layer, over
how many rows, by which line of code, with some of the numbers. Nothing of a step changes: the wrapped functions get the
same arrays and give the same ones back.
"""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import Numerics
from lfm2np.arithmetic.attention import Parts
from lfm2np.arithmetic.matrix import AttentionScale, Matrix
from lfm2np.truth.layers import expert_parts
from lfm2np.truth.weights import FeedForwardWeights, LayerWeights, ModelWeights, named_weights, tensors_of

Array = NDArray[Any]
PACKAGE = Path(__file__).resolve().parents[3]
PRODUCT, EXPERT = "one product over all tokens", "one product per expert"
ROW, REQUEST = "row by row", "per request"
MOST_NUMBERS = 64  # of a tensor in the trace; of a larger one the first rows and columns
FIRST_ROWS, FIRST_COLUMNS = 3, 5
MOST_CALLS = 4  # with numbers, of one line of code in one layer: a call for each request or expert


class Detail:
    """An arithmetic that notes what passes through it. `taken()` gives the operations since the last call.

    The network must run on `self.weights`: those given, whose experts are known by name once they are asked for.
    """

    def __init__(self, weights: ModelWeights, numerics: Numerics) -> None:
        self._numerics = numerics
        self._names = names_of(weights)
        layers = (layer_naming_experts(index, layer, self._names) for index, layer in enumerate(weights.layers))
        self.weights = replace(weights, layers=tuple(layers))
        self._layer: int | None = None
        self._expert: int | None = None  # whose weights were used last
        self._operations: list[dict[str, Any]] = []
        self._calls: Counter[tuple[int | None, str, int]] = Counter()

    def __getattr__(self, name: str) -> Any:
        """Operations that are no part of a step's network."""
        return getattr(self._numerics, name)

    def taken(self) -> list[dict[str, Any]]:
        taken, self._operations = self._operations, []
        self._layer = self._expert = None
        self._calls.clear()
        return taken

    def embed(self, rows: Array) -> Array:
        result = self._numerics.embed(rows)
        return self._noted("embed", ROW, {}, result, name="embed_tokens")

    def linear(self, x: Array, matrix: Matrix, bias: NDArray[np.float32] | None = None) -> Array:
        result = self._numerics.linear(x, matrix, bias)
        batching = PRODUCT if self._names[id(matrix)].expert is None else EXPERT
        return self._noted("linear", batching, {"x": x}, result, of=matrix)

    def rms_norm(self, x: Array, weight: NDArray[np.float32], eps: float) -> Array:
        result = self._numerics.rms_norm(x, weight, eps)
        return self._noted("rms_norm", ROW, {"x": x}, result, of=weight)

    def add(self, x: Array, y: Array) -> Array:
        return self._noted("add", ROW, {"x": x, "y": y}, self._numerics.add(x, y), name="residual")

    def multiply(self, x: Array, y: Array) -> Array:
        return self._noted("multiply", ROW, {"x": x, "y": y}, self._numerics.multiply(x, y), name="gate")

    def swiglu(self, gate: Array, up: Array) -> Array:
        result = self._numerics.swiglu(gate, up)
        return self._noted("swiglu", ROW, {"gate": gate, "up": up}, result, name="swiglu", expert=self._expert)

    def sigmoid(self, x: Array) -> Array:
        is_gate = self._operations[-1]["name"].endswith("g_proj")  # of an LFM3's heads
        name = "gates of the heads" if is_gate else "experts' scores"
        return self._noted("sigmoid", ROW, {"x": x}, self._numerics.sigmoid(x), name=name)

    def add_expert_bias(self, scores: Array, bias: NDArray[np.float32]) -> Array:
        result = self._numerics.add_expert_bias(scores, bias)
        return self._noted("prefer", ROW, {"scores": scores}, result, of=bias)

    def top_k(self, preferred: Array, count: int) -> NDArray[np.int64]:
        result = self._numerics.top_k(preferred, count)
        self._noted("best", ROW, {"preferred": preferred}, result, name="chosen experts", chosen=result.tolist())
        return result

    def routing_weights(self, scores: Array, normalised: bool, factor: float) -> Array:
        result = self._numerics.routing_weights(scores, normalised, factor)
        return self._noted(
            "shares", ROW, {"scores": scores}, result, name="experts' weights", normalised=normalised, factor=factor
        )

    def combine_experts(self, outputs: Array, weights: Array) -> Array:
        mixed = self._numerics.combine_experts(outputs, weights)
        return self._noted("mix", ROW, {"made": outputs, "weights": weights}, mixed, name="experts' outputs")

    def rotate(self, x: Array, cos: Array, sin: Array, float32_table: bool = False) -> Array:
        result = self._numerics.rotate(x, cos, sin, float32_table)
        return self._noted("rotate", ROW, {"x": x, "cos": cos, "sin": sin}, result, name="rotary")

    def cache_entries(self, keys: Array, values: Array, scale: AttentionScale) -> tuple[Array, ...]:
        result = self._numerics.cache_entries(keys, values, scale)
        self._noted("cache_entries", ROW, {"keys": keys, "values": values}, keys, name="keys and values")
        return result

    def attend_ragged(
        self, queries: Array, rows: Sequence[slice], cached: Sequence[Parts], scale: AttentionScale
    ) -> Array:
        result = self._numerics.attend_ragged(queries, rows, cached, scale)
        for span, parts in zip(rows, cached, strict=True):
            context = sum(len(part[0]) for part in parts)
            window = {} if scale.window is None else {"window": scale.window}
            inputs = {"queries": queries[span]}
            self._noted("attend", REQUEST, inputs, result[span], name="attention", context=context, **window)
        return result

    def convolve_ragged(
        self, windows: Sequence[Array], taps: NDArray[np.float32], bias: NDArray[np.float32] | None = None
    ) -> Array:
        result, first = self._numerics.convolve_ragged(windows, taps, bias), 0
        for window in windows:
            history, u = window[: taps.shape[1] - 1], window[taps.shape[1] - 1 :]
            self._noted("convolve", REQUEST, {"history": history, "u": u}, result[first : first + len(u)], of=taps)
            first += len(u)
        return result

    def _noted(
        self,
        operation: str,
        batching: str,
        inputs: Mapping[str, Array],
        result: Array,
        of: object = None,
        name: str = "",
        expert: int | None = None,
        **more: Any,
    ) -> Array:
        """Notes a call; `of` is the weight that tells its name, its layer and whose it is. Returns what was made."""
        if of is not None:
            weight = self._names[id(of)]
            self._layer, self._expert = weight.layer, weight.expert
            name, expert = weight.name, weight.expert
        source = called_from()
        calls = self._layer, operation, source[1]
        self._calls[calls] += 1
        is_one_of_many = batching == REQUEST or expert is not None
        most = 0 if is_one_of_many and self._calls[calls] > MOST_CALLS else MOST_NUMBERS
        self._operations.append(
            {
                "operation": operation,
                "class": batching,
                "layer": self._layer,
                "name": name,
                "inputs": {key: tensor(value, most) for key, value in inputs.items()},
                "output": tensor(result, most),
                "source": source,
                **({} if expert is None else {"expert": expert}),
                **more,
            }
        )
        return result


def tensor(values: Array, most: int) -> dict[str, Any]:
    """Shape, and the numbers row by row, heads side by side; of more than `most` the first rows and columns."""
    if most == 0:
        return {"shape": list(values.shape), "values": []}
    rows = np.asarray(values).reshape(len(values), -1)
    kept = rows if rows.size <= most else rows[:FIRST_ROWS, :FIRST_COLUMNS]
    return {"shape": list(values.shape), "values": [[float(str(value)) for value in row] for row in kept]}


def called_from() -> list[Any]:
    """File, line and text of the network's line that called the arithmetic."""
    frame = sys._getframe(3)
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(PACKAGE.parent).as_posix() if path.is_relative_to(PACKAGE.parent) else path.name
    return [name, frame.f_lineno, linecache.getline(str(path), frame.f_lineno).strip()]


# --- what a weight is called: experts' weights get their names when the network first asks for them


@dataclass(frozen=True)
class Named:
    """A weight's layer, None for those after the last, its name in the checkpoint, and the expert that it is of."""

    layer: int | None
    name: str
    expert: int | None = None


Names = dict[int, Named]  # by id()


def names_of(weights: ModelWeights) -> Names:
    """Of all weights but experts'."""
    named = {id(weights.final_norm): Named(None, "embedding_norm"), id(weights.head): Named(None, "lm_head")}
    for index, layer in enumerate(weights.layers):
        named |= {id(weight): Named(index, shown(names)) for names, weight in named_weights(layer)}
    return named


def shown(names: tuple[str, ...]) -> str:
    """Tensors of one product: "self_attn.q_proj, k_proj, v_proj"."""
    first, *others = (name.removesuffix(".weight") for name in names)
    return ", ".join([first, *(other.rpartition(".")[2] for other in others)])


def layer_naming_experts(index: int, layer: LayerWeights, names: Names) -> LayerWeights:
    """The same weights; an expert enters `names` when it is used."""
    mixture = layer.feed_forward
    if isinstance(mixture, FeedForwardWeights):
        return layer

    def expert(number: int) -> FeedForwardWeights:
        expert_weights = mixture.expert(number)
        for tensors, field in zip(expert_parts(number), tensors_of(expert_weights), strict=True):
            names[id(getattr(expert_weights, field))] = Named(index, shown(tensors), number)
        return expert_weights

    return replace(layer, feed_forward=replace(mixture, expert=expert))
