"""What a step computed, operation by operation: lines of kind "detail" in a trace, for the drawings, on request.

The network itself runs; only its arithmetic is wrapped. Each call becomes one line: what was done, in which layer, over
how many rows, by which line of code, with some of the numbers. Nothing of a step changes: the wrapped functions get the
same arrays and give the same ones back.
"""

from __future__ import annotations

import json
import linecache
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.weights import FeedForwardWeights, ModelWeights, ShortConvWeights
from lfm2np.numerics import Numerics
from lfm2np.numerics.attention import Parts
from lfm2np.numerics.matrix import AttentionScale, Matrix

Array = NDArray[Any]
PACKAGE = Path(__file__).resolve().parents[2]
PRODUCT, ROW, REQUEST = "one product over all tokens", "row by row", "per request"
MOST_NUMBERS = 64  # of a tensor that are kept; of a larger one the first rows and columns
FIRST_ROWS, FIRST_COLUMNS = 3, 5
MOST_CALLS = 4  # of one operation in one layer, a call for each request, whose numbers are kept; of others the shapes


class Detail:
    """An arithmetic that notes what passes through it. `taken()` gives the operations since the last call."""

    def __init__(self, weights: ModelWeights, numerics: Numerics) -> None:
        self._numerics = numerics
        self._names = names_of(weights)
        self._layer: int | None = None
        self._operations: list[dict[str, Any]] = []
        self._calls: Counter[tuple[int | None, str]] = Counter()

    def __getattr__(self, name: str) -> Any:
        """Operations that are no part of a step's network."""
        return getattr(self._numerics, name)

    def taken(self) -> list[dict[str, Any]]:
        taken, self._operations = self._operations, []
        self._layer = None
        self._calls.clear()
        return taken

    def embed(self, rows: Array) -> Array:
        made = self._numerics.embed(rows)
        return self._noted("embed", ROW, {}, made, name="embed_tokens")

    def linear(self, x: Array, matrix: Matrix, bias: NDArray[np.float32] | None = None) -> Array:
        made = self._numerics.linear(x, matrix, bias)
        return self._noted("linear", PRODUCT, {"x": x}, made, of=matrix)

    def rms_norm(self, x: Array, weight: NDArray[np.float32], eps: float) -> Array:
        made = self._numerics.rms_norm(x, weight, eps)
        return self._noted("rms_norm", ROW, {"x": x}, made, of=weight)

    def add(self, x: Array, y: Array) -> Array:
        return self._noted("add", ROW, {"x": x, "y": y}, self._numerics.add(x, y), name="residual")

    def multiply(self, x: Array, y: Array) -> Array:
        return self._noted("multiply", ROW, {"x": x, "y": y}, self._numerics.multiply(x, y), name="gate")

    def swiglu(self, gate: Array, up: Array) -> Array:
        return self._noted("swiglu", ROW, {"gate": gate, "up": up}, self._numerics.swiglu(gate, up), name="swiglu")

    def rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        made = self._numerics.rotate(x, cos, sin)
        return self._noted("rotate", ROW, {"x": x, "cos": cos, "sin": sin}, made, name="rotary")

    def cache_entries(self, keys: Array, values: Array, scale: AttentionScale) -> tuple[Array, ...]:
        made = self._numerics.cache_entries(keys, values, scale)
        self._noted("cache_entries", ROW, {"keys": keys, "values": values}, keys, name="keys and values")
        return made

    def attend_ragged(
        self, queries: Array, rows: Sequence[slice], cached: Sequence[Parts], scale: AttentionScale
    ) -> Array:
        made = self._numerics.attend_ragged(queries, rows, cached, scale)
        for own, parts in zip(rows, cached, strict=True):
            context = sum(len(part[0]) for part in parts)
            self._noted("attend", REQUEST, {"queries": queries[own]}, made[own], name="attention", context=context)
        return made

    def convolve_ragged(
        self, windows: Sequence[Array], taps: NDArray[np.float32], bias: NDArray[np.float32] | None = None
    ) -> Array:
        made, first = self._numerics.convolve_ragged(windows, taps, bias), 0
        for window in windows:
            history, u = window[: taps.shape[1] - 1], window[taps.shape[1] - 1 :]
            self._noted("convolve", REQUEST, {"history": history, "u": u}, made[first : first + len(u)], of=taps)
            first += len(u)
        return made

    def _noted(
        self,
        operation: str,
        batching: str,
        inputs: Mapping[str, Array],
        made: Array,
        of: object = None,
        name: str = "",
        **more: int,
    ) -> Array:
        """Notes a call; `of` is the weight that tells its name and layer. Returns what was made."""
        if of is not None:
            self._layer, name = self._names[id(of)]
        self._calls[self._layer, operation] += 1
        kept = batching != REQUEST or self._calls[self._layer, operation] <= MOST_CALLS
        self._operations.append(
            {
                "operation": operation,
                "class": batching,
                "layer": self._layer,
                "name": name,
                "inputs": {key: tensor(value, kept) for key, value in inputs.items()},
                "output": tensor(made, kept),
                "source": called_from(),
                **more,
            }
        )
        return made


def names_of(weights: ModelWeights) -> dict[int, tuple[int | None, str]]:
    """By a weight's identity: its layer, None for those after the last, and what it is called in the checkpoint."""
    found: dict[int, tuple[int | None, str]] = {
        id(weights.final_norm): (None, "embedding_norm"),
        id(weights.head): (None, "lm_head"),
    }
    for index, layer in enumerate(weights.layers):
        operator = layer.operator
        named: dict[str, object] = {
            "operator_norm": layer.operator_norm,
            "ffn_norm": layer.ffn_norm,
        }
        if isinstance(layer.feed_forward, FeedForwardWeights):
            named |= {
                "feed_forward.w1, w3": layer.feed_forward.gate_up_proj,
                "feed_forward.w2": layer.feed_forward.down_proj,
            }
        if isinstance(operator, ShortConvWeights):
            named |= {"conv.in_proj": operator.in_proj, "conv.conv": operator.taps, "conv.out_proj": operator.out_proj}
        else:
            named |= {
                "self_attn.q_proj, k_proj, v_proj": operator.qkv_proj,
                "self_attn.q_layernorm": operator.q_norm,
                "self_attn.k_layernorm": operator.k_norm,
                "self_attn.out_proj": operator.out_proj,
            }
        found |= {id(weight): (index, name) for name, weight in named.items()}
    return found


def detail_line(operations: list[dict[str, Any]], texts: Mapping[int, str]) -> str:
    """A line of a trace, right after its step's: what was computed, and the texts of tokens that were not told yet."""
    line = {"kind": "detail", "operations": operations, "texts": {str(one): text for one, text in texts.items()}}
    return json.dumps(line, separators=(",", ":")) + "\n"


def tensor(values: Array, with_numbers: bool = True) -> dict[str, Any]:
    """Shape, and the numbers row by row, heads side by side; of a large one the first rows and columns."""
    if not with_numbers:
        return {"shape": list(values.shape), "values": []}
    rows = np.asarray(values).reshape(len(values), -1)
    kept = rows if rows.size <= MOST_NUMBERS else rows[:FIRST_ROWS, :FIRST_COLUMNS]
    return {"shape": list(values.shape), "values": [[float(str(one)) for one in row] for row in kept]}


def called_from() -> list[Any]:
    """File, line and text of the network's line that called the arithmetic."""
    frame = sys._getframe(3)
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(PACKAGE.parent).as_posix() if path.is_relative_to(PACKAGE.parent) else path.name
    return [name, frame.f_lineno, linecache.getline(str(path), frame.f_lineno).strip()]
