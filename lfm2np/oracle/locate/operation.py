"""An operation of the network as `locate` sees it, and what operations need beside their inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.matrix import Weights
from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.checkpoint.weights import vector, widened
from lfm2np.oracle.locate import rounded_inputs, spread
from lfm2np.oracle.locate.patterns import TOKEN, Per, Steps
from lfm2np.oracle.locate.spread import Measured, Precision
from lfm2np.truth.config import MixtureConfig, ModelConfig

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Oracle:
    tensors: Mapping[str, StoredTensor]
    config: ModelConfig
    precision: Precision
    token_ids: Array  # [T] int64
    steps: Steps
    rounds_inputs: bool = False  # of products with quantised weights

    def matrix(self, name: str) -> Weights:
        return widened(self.tensors, name + ".weight")

    def vector(self, name: str) -> NDArray[np.float32]:
        return vector(self.tensors, name + ".weight")

    def bias(self, name: str) -> NDArray[np.float32] | None:
        return vector(self.tensors, name + ".bias") if name + ".bias" in self.tensors else None

    @property
    def mixture(self) -> MixtureConfig:
        assert self.config.mixture is not None
        return self.config.mixture


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation: computes the tensor `name` [rows, width] from `inputs`."""

    name: str
    words: str  # what it computes from its inputs
    inputs: tuple[str, ...]
    width: int
    compute: Callable[..., Measured]  # of an Oracle and the measured inputs
    heads: int = 0  # its channels are those of so many heads, one after another; 0: there are none
    parts: tuple[str, ...] = ()  # its channels are these, of equal width, one after another
    per: Per = TOKEN  # what has a row: a token, a step, or each token that a step sees
    by_position: bool = False  # `width` channels for each of the T positions, one position after another
    noun: str = "channel"  # what a column is
    prefers: Callable[..., Measured] | None = None  # of ids of experts: the preferences they are chosen by (mixture.py)
    weights: str = ""  # the matrix that it multiplies by, or one of several alike
    chosen: str = ""  # the tensor of the experts whose numbers these are, place by place or added up

    @property
    def layer(self) -> int | None:
        match = re.match(r"model\.layers\.(\d+)", self.name)
        return int(match[1]) if match else None


def product(name: str, words: str, source: str, width: int, weights: str = "", **more: Any) -> Operation:
    """A product of one tensor with the matrix of the same name, unless `weights` names another."""
    matrix = weights or name
    return Operation(name, words, (source,), width, partial(projection, matrix), weights=matrix, **more)


def at_precision(function: Callable[..., Measured]) -> Callable[..., Measured]:
    """A function of inputs and a precision as the `compute` of an operation."""

    def compute(oracle: Oracle, *inputs: Measured) -> Measured:
        return function(*inputs, oracle.precision)

    return compute


def is_wanted(name: str, dumped: Container[str] | None) -> bool:
    """Whether a tensor is dumped; without `dumped` all are."""
    return dumped is None or name in dumped


def projection(name: str, oracle: Oracle, x: Measured) -> Measured:
    tensor = oracle.tensors[name + ".weight"]
    if oracle.rounds_inputs and rounded_inputs.rounds(tensor):
        return rounded_inputs.linear(x, oracle.matrix(name), oracle.bias(name), tensor, oracle.precision)
    return spread.linear(x, oracle.matrix(name), oracle.bias(name), oracle.precision)
