"""Each token of an answer within the noise: how far its log-probability and the greedy token's lead are from the exact.

Under the reported routes, or under possible ones where none are reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.pieces import pieces
from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.oracle.judging.noise import ALL, Noise
from lfm2np.oracle.judging.routes import OWN, difference
from lfm2np.oracle.judging.scored import Scored
from lfm2np.oracle.judging.truth import Truth
from lfm2np.oracle.judging.verdict import LIMIT, WRONG, Position, Verdict, position_verdict, tie_chance

FLOAT32_UNITS = 4  # mlx-lm, right in all else, is off by up to 3 where a token is all but certain
FARTHEST = 80.0  # of a rival, in units of the noise: tie_chance is 0 beyond


@dataclass(frozen=True, eq=False)
class Margins:
    """What a noise allows at each row of a Truth's arrays; ratios in units of the noise, beyond one of the logits."""

    truth: Truth
    units: NDArray[np.float64]  # [T] see resolution
    best: NDArray[np.int64]  # [T] the greedy token's column
    scales: NDArray[np.float64]  # [T, J] of log-probabilities
    gap_ratios: NDArray[np.float64]  # [T, J] how far each token is behind the greedy one; 0 of that itself
    runner_up: NDArray[np.float64]  # [T] the ratio of the next

    def flip_chance(self, row: int) -> float:
        """The probability that any rival overtakes the greedy token: at most the sum of their chances.

        The runner-up's alone would be at most a half; an undecided model has hundreds of rivals within the noise of
        bfloat16.
        """
        ratios, best = self.gap_ratios[row], self.best[row]
        rivals = np.flatnonzero(ratios < FARTHEST)
        return min(1.0, math.fsum(tie_chance(float(ratios[rival])) for rival in rivals if rival != best))


def margins(truth: Truth, noise: Noise, bits: int, wanted: slice = ALL) -> Margins:
    """Of a format with so many bits, at these rows; other rows, and those that the Truth lacks, have no meaning."""
    first, stop, _ = (index - truth.first for index in wanted.indices(truth.first + len(truth.best)))
    first = max(0, first)
    units = resolution(truth.largest, bits)
    best = np.argmax(truth.columns == truth.best[:, None], axis=1)
    scales, gap_ratios = np.empty(truth.logprobs.shape), np.empty(truth.logprobs.shape)
    runner_up = np.full(len(best), np.inf)  # where there is no other token
    for part in pieces(max(0, stop - first), len(noise.errors) * noise.errors.shape[2]):
        rows = slice(first + part.start, first + part.stop)
        best_columns = np.arange(len(best[rows])), best[rows]
        logprobs = truth.logprobs[rows].copy()
        gaps = logprobs[best_columns][:, None] - logprobs
        scales[rows] = noise.scales(truth, rows)
        gap_ratios[rows] = np.maximum(0.0, gaps - units[rows, None]) / noise.gap_scales(best[rows], rows)
        logprobs[best_columns] = -np.inf
        if logprobs.shape[1] > 1:
            runner_up[rows] = gap_ratios[rows][best_columns[0], np.argmax(logprobs, axis=1)]
    return Margins(truth, units, best, scales, gap_ratios, runner_up)


class Token(NamedTuple):
    """One token of an answer or its prompt, and what the engine reported there."""

    request: Request
    row: int
    token_id: int
    is_new: bool
    logprob: float | None
    tops: Mapping[int, float] = MappingProxyType({})  # log-probabilities of alternatives, by token


def position(token: Token, allowed: Margins) -> Position:
    """One token within one noise.

    Its own log-probability may be reported twice, by itself and among the alternatives: both are judged.
    """
    request, row, token_id, is_new, logprob, tops = token
    truth = allowed.truth
    index = row - truth.first
    unit, best = float(allowed.units[index]), int(truth.best[index])
    logprobs, scale = truth.logprobs[index], allowed.scales[index]
    token_column = truth.at(row, token_id)
    reported = [*tops.items(), *([] if logprob is None else [(token_id, logprob)])]
    columns = [truth.at(row, reported_id) for reported_id, _ in reported]
    raw = [value - float(logprobs[column]) for column, (_, value) in zip(columns, reported, strict=True)]
    scales = [float(scale[column]) for column in columns]
    errors = without_normaliser(raw, scales, unit, truth.vocab_size)
    gap_ratio = float(allowed.gap_ratios[index, token_column])
    ratio = max(
        (beyond(error, unit) / scale for error, scale in zip(errors, scales, strict=True)), key=abs, default=None
    )
    whole_scales = [math.hypot(scale, unit / 2.0) for scale in scales]
    return Position(
        request=request,
        row=row,
        is_new=is_new,
        token_id=token_id,
        best=best,
        gap=float(logprobs[allowed.best[index]] - logprobs[token_column]),
        gap_ratio=gap_ratio,
        margin_ratio=float(allowed.runner_up[index]),
        error=None if logprob is None else logprob - float(logprobs[token_column]),
        error_ratio=ratio,
        error_size=max(map(size_without, raw, errors, whole_scales), default=None),
        verdict=position_verdict(is_new, token_id, best, gap_ratio, ratio),
        scale=math.hypot(float(scale[token_column]), unit / 2.0),
        flip_chance=allowed.flip_chance(index) if is_new else None,
    )


def resolution(largest: NDArray[np.float64], bits: int) -> NDArray[np.float64]:
    """What rounding the logits themselves may do, by the largest of each row: one unit in its last place in the format,
    and a few of float32, in which log-probabilities are computed as a logit minus a sum of exponentials.
    """
    exponent = np.frexp(largest)[1]
    return np.asarray(np.ldexp(1.0, exponent - bits) + FLOAT32_UNITS * np.ldexp(1.0, exponent - 24))


def without_normaliser(
    errors: Sequence[float], scales: Sequence[float], unit: float, vocab_size: int
) -> Sequence[float]:
    """The errors at one position without a common shift from summing exponentials in float32.

    Added one after another, terms below 2**-25 of the sum are lost, at most vocab_size of them: log-probabilities of
    llama.cpp and mlx-lm are off by as much, all of a position by the same. Of all shifts up to that size the one is
    removed that leaves the smallest errors; with several reported, one shift can't hide the others.
    """
    if not errors:
        return errors
    most = most_shift(vocab_size)

    def left(shift: float) -> float:
        return max(abs(beyond(error - shift, unit)) / scale for error, scale in zip(errors, scales, strict=True))

    shift = min((0.0, *(min(most, max(-most, error)) for error in errors)), key=left)
    return [error - shift for error in errors]


def size_without(error: float, left: float, scale: float) -> float:
    """An error in units of its scale, for averages: whole up to 1, beyond that what is left without a normaliser's
    shift. So a shift that is forgiven at each position is forgiven at all of them together, and right engines' errors
    keep the size of their format.
    """
    return min(abs(error), max(scale, abs(left))) / scale


def most_shift(vocab_size: int) -> float:
    return math.ldexp(vocab_size, -25)


def beyond(error: float, unit: float) -> float:
    """The part of an error, with its sign, that exceeds one unit of the logits."""
    return math.copysign(max(0.0, abs(error) - unit), error)


def judged(request: Request, answer: Answer, scored: Scored, bits: int, layers: Sequence[int] = ()) -> list[Position]:
    """Positions of one answer's tokens, and of its prompt's if their log-probabilities or routes are reported.

    layers  the numbers of the sparse layers
    """
    start = len(request.prompt_token_ids)
    routes = None if answer.routes is None else np.asarray(answer.routes[: len(scored.truth.best)], np.int64)
    prompt = answer.prompt_logprobs or ([None] * (start - 1) if routes is not None else [])
    rows = slice(0 if prompt else start - 1, start - 1 + len(answer.token_ids or ()))
    strict = margins(scored.truth, scored.noise, bits, rows)
    loose = None if scored.loose is None else margins(scored.truth, scored.loose, bits, rows)
    tokens = [
        Token(request, row, request.prompt_token_ids[row + 1], False, logprob) for row, logprob in enumerate(prompt)
    ]
    for index, token_id in enumerate(answer.token_ids or ()):
        row, logprob = start - 1 + index, None if answer.logprobs is None else answer.logprobs[index]
        tops = {} if answer.top_logprobs is None else answer.top_logprobs[index]
        tokens.append(Token(request, row, token_id, not request.is_sampled, logprob, tops))
    return [with_route(judged_token(token, scored, strict, loose), scored, routes, layers) for token in tokens]


def judged_token(token: Token, scored: Scored, strict: Margins, loose: Margins | None) -> Position:
    """With the oracle's routes; if it is then wrong, and routes may differ, with the noise of other routes."""
    strictly = position(token, strict)
    if loose is None:
        return strictly
    columns = [scored.truth.at(token.row, token_id) for token_id in {*token.tops, token.token_id}]
    chance = share_beyond(scored, token.row, columns, strict)
    other = position(token, loose)
    if strictly.verdict not in WRONG:
        return replace(strictly, error_size=other.error_size, scale=other.scale, route_chance=chance)
    if other.verdict in WRONG:
        return replace(other, route_chance=chance)
    return replace(other, verdict=Verdict.ROUTE, is_rerouted=True, route_chance=chance)


def share_beyond(scored: Scored, row: int, columns: Sequence[int], strict: Margins) -> float:
    """Of emulated engines with routes of their own, the share that these columns would reveal."""
    assert scored.loose is not None
    limits = strict.units[row] + LIMIT * strict.scales[row, columns]
    return float(np.mean(np.any(np.abs(scored.loose.errors[:, row, columns]) > limits, axis=1)))


def with_route(position: Position, scored: Scored, routes: NDArray[np.int64] | None, layers: Sequence[int]) -> Position:
    """The position with what its reported routes [L, K] show, and the chance that they differ from the oracle's."""
    if scored.margins is None or scored.loose is not None:
        return position
    chance = 1.0 - math.prod(1.0 - tie_chance(margin) for margin in scored.margins[position.row])
    if routes is None:
        return replace(position, route_chance=chance)
    assert scored.truth.preferred is not None and scored.noise.squares is not None
    known = [index for index in range(len(layers)) if routes[position.row, index, 0] != OWN]
    route = difference(
        scored.truth.preferred[position.row][known],
        routes[position.row][known],
        scored.noise.squares[position.row][known],
        [layers[index] for index in known],
    )
    verdict = position_verdict(
        position.is_new, position.token_id, position.best, position.gap_ratio, position.error_ratio, bool(known), route
    )
    return replace(position, route=route, is_rerouted=route is not None, route_chance=chance, verdict=verdict)


def is_wrong(positions: Sequence[Position]) -> bool:
    return any(position.is_wrong for position in positions)
