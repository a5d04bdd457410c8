"""The floor: a step's matrix products and nothing else, in plain NumPy.

What any implementation of the step must compute, with the weights of every layer, since to stream them from memory is
the cost of a small step. Two parts, timed apart: the linear maps over all tokens, and attention's products of each
request, scores and weighted values. For exact arithmetic in float64: a second slice of weights where they need one,
and two slices of attention's weights (see arithmetic/exact.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.matrix import Weights
from lfm2np.arithmetic.weight_grids import has_short_significands, prove_grid
from lfm2np.checkpoint.files import read_config, read_tensors
from lfm2np.checkpoint.weights import joined
from lfm2np.commands.bench.sides.cells import DECODE, Cell
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.layers import expected_tensors, matrix_parts
from lfm2np.truth.weights import EMBEDDING, HEAD

Array = NDArray[Any]
WARM_UP = 1
EXPERT = re.compile(r"model\.layers\.(\d+)\.feed_forward\.experts\.(\d+)\.")
SHARE_SLICES = {"float64": 2, "float32": 1}


@dataclass(frozen=True)
class Product:
    """x [rows, inputs] times weights [outputs, inputs] transposed."""

    rows: int
    inputs: int
    outputs: int


def linear_products(config: ModelConfig, cell: Cell) -> Iterator[Product]:
    """Every linear map of one step, in the network's order; the head only for the last token of each request."""
    shapes = expected_tensors(config)
    for names in matrix_parts(config):
        inputs, outputs = shapes[names[0]][1], sum(shapes[name][0] for name in names)
        expert = EXPERT.match(names[0])
        if expert:
            rows = tokens_of_experts(config, cell.num_tokens, int(expert[1]))[int(expert[2])]
        else:
            rows = cell.requests if names[0] in (EMBEDDING, HEAD) else cell.num_tokens
        yield Product(rows, inputs, outputs)


@lru_cache
def tokens_of_experts(config: ModelConfig, tokens: int, layer: int) -> list[int]:
    """How many tokens choose each expert of a layer, at random."""
    mixture = config.mixture
    assert mixture is not None
    rng = np.random.default_rng(layer)
    chosen = rng.permuted(np.tile(np.arange(mixture.num_experts), (tokens, 1)), axis=1)
    rows = np.bincount(chosen[:, : mixture.num_experts_per_tok].ravel(), minlength=mixture.num_experts)
    return [int(count) for count in rows]


def slices_of(weight: Weights, name: str) -> int:
    """How many the arithmetic exact takes; of float32 weights that is known without the whole proof."""
    if weight.dtype == np.float32:
        return 1 if has_short_significands(weight) else 2
    return prove_grid(weight, name).slices


class FloorSide:
    """`dtype` float64 for the arithmetic exact, float32 for float32."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def load(self, directory: Path, threads: int) -> dict[str, str]:
        self._config = config = read_config(directory)
        tensors = read_tensors(directory, config)
        self._weights: list[Array] = []
        for names in matrix_parts(config):
            weight = joined(tensors, names)
            slices = slices_of(weight, names[0]) if self._dtype == "float64" else 1
            self._weights.append(np.concatenate([weight] * slices).astype(self._dtype))
        return {}

    def time(self, cell: Cell, steps: int) -> list[dict[str, float]]:
        """Seconds of all products, and of either kind, of each of `steps` repetitions, after one more."""
        operands = self.linear_operands(cell)
        attention = Attention(self._config, cell, self._dtype)
        times = []
        for _ in range(WARM_UP + steps):
            began = time.perf_counter()
            for x, weight in operands:
                x @ weight.T
            linear = time.perf_counter() - began
            attention.compute()
            seconds = time.perf_counter() - began
            times.append({"seconds": seconds, "linear": linear, "attention": seconds - linear})
        return times[WARM_UP:]

    def linear_operands(self, cell: Cell) -> list[tuple[Array, Array]]:
        """x [rows, inputs] and weights [outputs, inputs] of each linear map; those of one shape share their x."""
        rng = np.random.default_rng(0)
        shared: dict[tuple[int, int], Array] = {}
        operands = []
        for product, weight in zip(linear_products(self._config, cell), self._weights, strict=True):
            shape = (product.rows, product.inputs)
            if shape not in shared:
                shared[shape] = rng.standard_normal(shape).astype(self._dtype)
            operands.append((shared[shape], weight))
        return operands


class Attention:
    """Products of attention: S requests of t new tokens each, which see C positions; M attention layers.

    All layers have their own keys and values [S, G, C, E], since those, too, come from memory.
    """

    def __init__(self, config: ModelConfig, cell: Cell, dtype: str) -> None:
        groups, head_dim, context = config.num_key_value_heads, config.head_dim, cell.longest
        new = 1 if cell.kind == DECODE else cell.context
        rows = config.num_attention_heads // groups * new
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> Array:
            return rng.standard_normal(shape).astype(dtype)

        self.queries = normal(cell.requests, groups, rows, head_dim)
        self.weights = normal(1, 1, SHARE_SLICES[dtype] * rows, context)
        sample = normal(context, head_dim)
        shape = (cell.requests, groups, context, head_dim)
        self.layers: list[tuple[Array, Array]] = []
        for _ in range(len(config.attention_layers)):
            keys, values = np.empty(shape, dtype), np.empty(shape, dtype)
            keys[...], values[...] = sample, sample
            self.layers.append((keys, values))

    def compute(self) -> None:
        for keys, values in self.layers:
            self.queries @ keys.transpose(0, 1, 3, 2)
            self.weights @ values
