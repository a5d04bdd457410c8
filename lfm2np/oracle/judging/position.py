"""One token under one noise: how far its log-probability, and the greedy token's lead, are from the exact ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from lfm2np.oracle.judging.noise import Noise, flip_chance
from lfm2np.oracle.judging.truth import Truth
from lfm2np.oracle.judging.verdict import Position, position_verdict
from lfm2np.oracle.targets.records import Ask

FLOAT32_UNITS = 4  # mlx-lm, right in all else, is off by up to 3 where a token is all but certain


def position(
    ask: Ask,
    row: int,
    token_id: int,
    is_new: bool,
    values: Mapping[int, float],
    logprob: float | None,
    truth: Truth,
    noise: Noise,
    bits: int,
) -> Position:
    """One token under one noise. `values` are the log-probabilities told there, `logprob` its own."""
    unit = resolution(float(truth.largest[row]), bits)
    own, best = truth.at(row, token_id), truth.at(row, int(truth.best[row]))
    told = [(truth.at(row, one), value) for one, value in values.items()]
    raw = [value - float(truth.logprobs[row, column]) for column, value in told]
    scales = [noise.scale(truth, row, column) for column, _ in told]
    errors = without_normaliser(raw, scales, unit, truth.vocab_size)
    gap = float(truth.logprobs[row, best] - truth.logprobs[row, own])
    gap_ratio = max(0.0, gap - unit) / noise.gap_scale(row, own, best) if own != best else 0.0
    ratio = max((beyond(one, unit) / scale for one, scale in zip(errors, scales, strict=True)), key=abs, default=None)
    sizes = [abs(error) / math.hypot(scale, unit / 2.0) for error, scale in zip(raw, scales, strict=True)]
    return Position(
        ask=ask,
        row=row,
        is_new=is_new,
        token_id=token_id,
        best=int(truth.best[row]),
        gap=gap,
        gap_ratio=gap_ratio,
        margin_ratio=margin_ratio(truth, noise, row, best, unit),
        error=None if logprob is None else logprob - float(truth.logprobs[row, own]),
        error_ratio=ratio,
        error_size=max(sizes, default=None),
        verdict=position_verdict(is_new, token_id, int(truth.best[row]), gap_ratio, ratio),
        flip_chance=flip_chance(truth, noise, row, best, unit) if is_new else None,
    )


def resolution(largest: float, bits: int) -> float:
    """What rounding the logits themselves may do: one unit in the last place of the largest in the format, and a few of
    float32, in which log-probabilities are computed: they are the difference of a logit and a sum of exponentials."""
    exponent = math.frexp(largest)[1]
    return math.ldexp(1.0, exponent - bits) + FLOAT32_UNITS * math.ldexp(1.0, exponent - 24)


def without_normaliser(
    errors: Sequence[float], scales: Sequence[float], unit: float, vocab_size: int
) -> Sequence[float]:
    """The errors of one position without what a sum of exponentials in float32 may add to all of them.

    Added one after another, terms below 2**-25 of the sum are lost, at most vocab_size of them: log-probabilities of
    llama.cpp and mlx-lm are off by as much, all of a position by the same. So with several told one shift can't hide
    the others; of all shifts that large the one that leaves the least is taken off.
    """
    if not errors:
        return errors
    most = most_shift(vocab_size)

    def left(shift: float) -> float:
        return max(abs(beyond(one - shift, unit)) / scale for one, scale in zip(errors, scales, strict=True))

    shift = min((0.0, *(min(most, max(-most, one)) for one in errors)), key=left)
    return [one - shift for one in errors]


def most_shift(vocab_size: int) -> float:
    """Nats: see without_normaliser."""
    return math.ldexp(vocab_size, -25)


def beyond(error: float, unit: float) -> float:
    """What is left of an error, with its sign, behind one unit of the logits."""
    return math.copysign(max(0.0, abs(error) - unit), error)


def margin_ratio(truth: Truth, noise: Noise, row: int, best: int, unit: float) -> float:
    """How far the runner-up of the greedy token is behind, in units of the noise."""
    logprobs = truth.logprobs[row].copy()
    logprobs[best] = -np.inf
    runner_up = int(np.argmax(logprobs))
    gap = float(truth.logprobs[row, best] - logprobs[runner_up])
    return max(0.0, gap - unit) / noise.gap_scale(row, best, runner_up)
