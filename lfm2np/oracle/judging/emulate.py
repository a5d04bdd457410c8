"""What an engine's number format may do to LFM2: the network under that format, rounded where engines round.

No two engines round at the same places, nor add in the same order. One `Emulated` is one engine that could be: where it
has a choice, the choice is drawn, once for all its operations. The spread of many says how far a right engine may be
off, at each position by itself: see noise.py.

drawn                     what engines do
order of each sum         blocks of a BLAS, lanes, threads: inputs cut into pieces, which are added one after another;
                          in a matrix they are permuted before, for all engines alike, so that they share its weights
fused norm, gate, rotary  rounded after each operation (PyTorch's eager kernels), or once at the end (fused kernels)
attention                 scores and weights rounded (eager), or not (flash kernels)
residual stream           in the format, or in float32 (llama.cpp)
logits                    in the format, or in float32
router                    scores and weights in the format, or in float32; its own weights are not quantised
sum over experts          rounded after each, or once
frequencies of rotary     powers, repeated products, or exp2: each some units in the last place of float32 off
quantised weights         which of the two nearest steps a weight goes to: at random, where its scheme is not known

Not drawn: what the inputs of a product are rounded to, and what keys and values are (formats.py); those in float16
are added in float16, which llama.cpp does by default, and which is most of what it errs by then. Before they go to
blocks of 8 or 4 bits every second engine turns heads, as llama.cpp does with those of 64 numbers.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.attention import Parts
from lfm2np.arithmetic.ieee import Ieee, unchanged
from lfm2np.arithmetic.matrix import AttentionScale, Matrix, Weights
from lfm2np.arithmetic.pieces import over_pieces
from lfm2np.arithmetic.products.product import product
from lfm2np.arithmetic.routing import LEAST_SUM
from lfm2np.oracle.judging.formats import (
    KEPT,
    TURNED,
    Format,
    Inputs,
    Kept,
    Rounding,
    format_named,
    in_blocks,
    out_of_blocks,
    rounded_to,
    turned,
)
from lfm2np.truth import rope

Array = NDArray[Any]
Float32 = NDArray[np.float32]
ROTARY_UNITS = 20  # of float32: a frequency as exp2 of a product with log2(theta), which is 20 for LFM2 (mlx does so)
MOST_FREQUENCIES = 512
BLOCK = 2**16  # weights that are quantised at once
MOST_CUTS = 2  # of a sum; more would show little more and cost a third of a product each


@dataclass(frozen=True, eq=False)
class Shuffled(Matrix):
    order: NDArray[np.int64] | None = None
    what: str = ""  # names it


@dataclass(frozen=True, eq=False)
class Emulated(Ieee):
    """One engine that could be; made by `emulated`."""

    format: Format
    seed: int
    draw: int
    fused: bool
    flash: bool
    wide_residual: bool
    wide_logits: bool
    frequency_errors: NDArray[np.float64]  # [MOST_FREQUENCIES] relative, of the rotary angles
    inputs: Inputs
    kept: Kept | None  # None: as all activations

    @property
    def weights_key(self) -> tuple[Any, ...]:
        """Engines with the same one share their weights."""
        return self.seed, self.keep, self.format.levels, self.draw if self.format.levels else None

    def prepare_matrix(self, weight: Weights, what: str) -> Matrix:
        if self.format.levels and kind_of(what) != "gate":
            values = quantised(weight, self.format, partial(generator, self.seed, self.draw, what))
            return Shuffled(values, None, np.arange(weight.shape[1]), what)
        shared = np.random.Generator(np.random.Philox(key=[self.seed, number_of(what)]))
        order = shared.permutation(weight.shape[1])
        return Shuffled(np.take(self.prepared_rows(weight), order, axis=1, mode="clip"), None, order, what)

    def embed(self, rows: Weights) -> Array:
        return rows.astype(np.float32, copy=False) if self.wide_residual else super().embed(rows)

    def linear(self, x: Array, matrix: Matrix, bias: Float32 | None = None) -> Array:
        assert isinstance(matrix, Shuffled) and matrix.order is not None and isinstance(matrix.values, np.ndarray)
        outputs, cuts = [], cuts_of(self.seed, self.draw, matrix.what, matrix.inputs)
        for rows, rounded in parts_of(self.inputs, matrix.what, len(matrix.values)):
            added = None if bias is None else bias[rows]
            outputs.append(self.product(rounded(x)[:, matrix.order], matrix.values[rows], cuts, added))
        total = outputs[0] if len(outputs) == 1 else np.concatenate(outputs, axis=1)
        kind = kind_of(matrix.what)
        wide = (self.wide_logits and kind in ("embed_tokens", "lm_head")) or (self.fused and kind == "gate")
        return total if wide else self.keep(total)

    def product(self, x: Array, values: Array, cuts: Sequence[int], bias: Float32 | None) -> Array:
        """In pieces that are added one after another."""
        total = None if bias is None else np.tile(self.parameter(bias), (len(x), 1))
        for start, stop in pairwise(sorted({0, *cuts, x.shape[1]})):
            piece = product(x[:, start:stop], values[:, start:stop])
            total = piece if total is None else np.add(total, piece, out=total)
        assert total is not None
        return total

    def add(self, x: Array, y: Array) -> Array:
        return x + y if self.wide_residual else self.keep(x + y)

    def rms_norm(self, x: Array, weight: Float32, eps: float) -> Array:
        squares = x[..., order_of(self.seed, self.draw, "norm", x.shape[-1])]
        squares *= squares
        mean = squares.sum(-1, keepdims=True, dtype=np.float32) / np.float32(x.shape[-1])
        normalised = x * (1 / np.sqrt(mean + np.float32(eps)))
        normalised = normalised if self.fused else self.keep(normalised)
        normalised *= self.parameter(weight)
        return self.keep(normalised)

    def swiglu(self, gate: Array, up: Array) -> Array:
        with np.errstate(over="ignore", under="ignore"):
            silu = np.exp(-gate)
        silu += 1
        np.divide(gate, silu, out=silu)
        silu = silu if self.fused else self.keep(silu)
        silu *= up
        return self.keep(silu)

    def sigmoid(self, x: Array) -> Array:
        with np.errstate(over="ignore", under="ignore"):
            scores = 1 / (1 + np.exp(-x))
        return scores if self.fused else self.keep(scores)

    def routing_weights(self, scores: Array, normalised: bool, factor: float) -> Array:
        if not self.fused:
            return super().routing_weights(scores, normalised, factor)
        return np.asarray((scores / (scores.sum(-1, keepdims=True) + LEAST_SUM) if normalised else scores) * factor)

    def combine_experts(self, outputs: Array, weights: Array) -> Array:
        """Experts in a drawn order, as engines go by preference, by id, or by whatever block is done first."""
        total = np.zeros_like(outputs[:, 0])
        for place in order_of(self.seed, self.draw, "experts", outputs.shape[1]):
            part = outputs[:, place] * weights[:, place, None]
            total = total + (part if self.fused else self.keep(part))
            total = total if self.flash else self.keep(total)
        return self.keep(total)

    def rotary_table(
        self, positions: NDArray[np.int64], head_dim: int, turned_by: rope.Rope
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Of angles that are a little off, as the engine's frequencies are: see rope.rotary_table."""
        angles = rope.angles(positions, head_dim, turned_by) * (1.0 + np.resize(self.frequency_errors, head_dim // 2))
        return np.cos(angles), np.sin(angles)

    def rotate(
        self, x: Array, cos: NDArray[np.float64], sin: NDArray[np.float64], float32_table: bool = False
    ) -> Array:
        return super().rotate(x, cos, sin, self.fused or float32_table)

    def attend_ragged(
        self, queries: Array, rows: Sequence[slice], cached: Sequence[Parts], scale: AttentionScale
    ) -> Array:
        mixed = np.zeros_like(queries)
        for segment, parts in zip(rows, cached, strict=True):
            mixed[segment] = self.attend_one(queries[segment], parts, scale.window)
        return mixed

    def attend_one(self, queries: Array, cached: Parts, window: int | None) -> Array:
        """Scores and shares in the format or not; positions added in a drawn order."""
        keys, values = (np.concatenate(parts) for parts in zip(*cached, strict=True))
        keep = unchanged if self.flash else self.keep
        shares, in_turn = self.keep, False
        if self.kept is not None:
            keys, values = self.in_cache(keys, self.kept.keep), self.in_cache(values, self.kept.keep)
            queries, shares = self.in_cache(queries, self.kept.queries), self.kept.shares
            in_turn = self.kept.adds_in_float16
        tokens, heads, head_dim = queries.shape
        context, groups = keys.shape[:2]
        order = position_order(self.seed, self.draw, context)
        grouped = queries.reshape(tokens, groups, heads // groups, head_dim).transpose(1, 2, 0, 3)  # [G, H/G, t, E]
        keys = np.ascontiguousarray(keys[order].transpose(1, 2, 0))  # [G, E, C]
        rows = np.ascontiguousarray(grouped).reshape(groups, -1, head_dim)
        scores = keep((rows @ keys).reshape(*grouped.shape[:3], context))
        scores *= np.float32(1 / math.sqrt(head_dim))
        scores = keep(scores)
        positions = np.arange(context - tokens, context)[:, None]
        hidden = (order > positions) | (order <= positions - (window or context))
        np.copyto(scores, np.float32(-np.inf), where=hidden)
        scores -= scores.max(-1, keepdims=True)
        weights = np.exp(scores, out=scores)
        total = weights.sum(-1, keepdims=True)
        if in_turn:
            mixed = added_in_float16(weights, values, order) / total
        elif self.flash:  # weights in the format, divided by their sum at the end
            mixed = weighted(shares(weights), values[order]) / total
        else:
            mixed = weighted(shares(weights / total), values[order])
        return self.keep(mixed.transpose(2, 0, 1, 3).reshape(tokens, heads, head_dim))

    def in_cache(self, heads: Array, rounded: Rounding) -> Array:
        """Keys, values or queries [C, heads, E], rounded, turned for that or not; blocks are of all of a position."""
        turns = self.kept is not None and self.kept.may_turn and self.fused and heads.shape[-1] % TURNED == 0
        stored = rounded((turned(heads) if turns else heads).reshape(len(heads), -1)).reshape(heads.shape)
        return turned(stored) if turns else stored


def generator(seed: int, draw: int, what: str, number: int) -> np.random.Generator:
    """For one choice of an engine; the same whenever it is made."""
    return np.random.Generator(np.random.SFC64([seed, draw, number_of(what), number]))


@lru_cache(maxsize=2**12)  # engines times matrices
def cuts_of(seed: int, draw: int, what: str, inputs: int) -> tuple[int, ...]:
    """One or two, where an engine cuts the sum over a matrix's inputs into pieces."""
    random = generator(seed, draw, what, inputs)
    return tuple(map(int, random.integers(0, inputs, random.integers(1, MOST_CUTS + 1))))


@lru_cache(maxsize=2**8)  # engines times widths
def order_of(seed: int, draw: int, what: str, count: int) -> NDArray[np.int64]:
    return generator(seed, draw, what, count).permutation(count)


@lru_cache(maxsize=2**10)  # engines times contexts
def position_order(seed: int, draw: int, context: int) -> NDArray[np.int64]:
    """Of so many positions: of the same ones always the same."""
    return np.argsort(generator(seed, draw, "positions", 0).random(context))


def weighted(shares: Array, values: Array) -> Array:
    """Shares [G, H/G, t, C] of values [C, G, E]: [G, H/G, t, E]; one product a group."""
    mixed = shares.reshape(len(shares), -1, shares.shape[-1]) @ np.ascontiguousarray(values.transpose(1, 0, 2))
    return np.asarray(mixed.reshape(*shares.shape[:3], -1))


def parts_of(inputs: Inputs, what: str, rows: int) -> tuple[tuple[slice, Rounding], ...]:
    """The rows of a Matrix by what their inputs are rounded to; tensors that share it are one part."""
    parts: list[tuple[slice, Rounding]] = []
    for name in what.split(" + ") if inputs else ():
        tensor, first = inputs[name], parts[-1][0].stop if parts else 0
        stop = first + tensor.rows
        if parts and parts[-1][1] is tensor.rounded:
            first = parts.pop()[0].start
        parts.append((slice(first, stop), tensor.rounded))
    return tuple(parts) or ((slice(0, rows), unchanged),)


def added_in_float16(weights: Array, values: Array, order: NDArray[np.int64]) -> Array:
    """Weights [G, H/G, t, C] times values [C, G, E], position after position, each sum a float16: [G, H/G, t, E].

    Weight number i is that of position order[i]: engines that could be differ by it, as all of them would else err
    alike and say nothing of an engine that adds otherwise.
    Source: ggml_compute_forward_flash_attn_ext_f16_one_chunk, which adds from the first position on, relative to the
    largest weight so far, and scales the sum when a larger one comes; here all are relative to the largest.
    """
    total = np.zeros((*weights.shape[:3], values.shape[-1]), np.float32)
    for index, position in enumerate(order):
        first = max(0, weights.shape[2] - weights.shape[3] + int(position))  # queries before it don't see it
        seen = total[:, :, first:]
        seen += weights[:, :, first:, index, None] * values[position][:, None, None]
        seen[...] = rounded_to(11, seen)
    return total


def quantised(weight: Weights, form: Format, random: Callable[[int], np.random.Generator]) -> Float32:
    """Weights in whole steps of their group's largest, to one of the two nearest, by their distance, at random.

    random  of each block of rows by itself, so that it does not matter which core computes it
    """
    inputs = weight.shape[1]
    steps = np.empty(weight.shape, np.float32)
    size = max(1, BLOCK // inputs)

    def compute(blocks: slice) -> None:
        for block in range(blocks.start, blocks.stop):
            rows = slice(block * size, (block + 1) * size)
            groups = in_blocks(weight[rows], form.group)
            step = np.abs(groups).max(-1, keepdims=True) / np.float32(form.levels)
            step[step == 0.0] = 1.0
            groups = groups / step
            drawn = random(block).integers(0, 2**16, groups.shape, np.uint16).astype(np.float32)
            drawn *= np.float32(2.0**-16)
            groups += drawn
            np.floor(groups, out=groups)
            groups *= step
            steps[rows] = out_of_blocks(groups, steps[rows])

    over_pieces(compute, -(-len(weight) // size), size * inputs)
    return steps


def kind_of(what: str) -> str:
    """Of the tensor, or the last of several: "in_proj"."""
    return what.split(".")[-2]


def number_of(what: str) -> int:
    return zlib.crc32(what.encode())


def emulated(name: str, seed: int, draw: int, inputs: Inputs = MappingProxyType({})) -> Emulated:
    """Draw number `draw` of the engines of a format; the same for the same arguments.

    inputs  what those of each product are rounded to: see formats.inputs_of
    """
    form = format_named(name)
    # Not at random: among any eight in a row each choice is made both ways, in all combinations of three; the first and
    # the last of eight differ in each.
    fused, flash, wide_residual = (bool(draw >> bit & 1) for bit in range(3))
    random = np.random.Generator(np.random.Philox(key=[seed, draw]))
    return Emulated(
        name=form.name,
        dtype=np.float32,
        weight_bytes=4,
        keep=form.keep,
        format=form,
        seed=seed,
        draw=draw,
        fused=fused,
        flash=flash,
        wide_residual=wide_residual,
        wide_logits=fused ^ flash ^ wide_residual,
        frequency_errors=random.uniform(-ROTARY_UNITS, ROTARY_UNITS, MOST_FREQUENCIES) * 2.0**-24,
        inputs=inputs,
        kept=KEPT[form.kv] if form.kv else None,
    )
