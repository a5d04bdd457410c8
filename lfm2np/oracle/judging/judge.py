"""From an engine's answers to judged positions: scored in exact arithmetic, within the noise of its format.

Two of eight emulated engines decide most positions. Each square of a scale is a sum of mean squares over engines
(noise.py); a mean over two of them is at most four times that over all, so their scale is at most twice that of all
eight. What is beyond the limit under all eight is therefore beyond half of it under two, and only answers with such
positions are judged again, by all. What all positions say together: see check.judged.

In a mixture of experts without reported routes near ties are tried as an explanation of a wrong answer, in formats in
which they are rare; in coarser ones a second noise covers other routes (position.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle.engines.records import Pair
from lfm2np.oracle.judging.formats import Format, format_named
from lfm2np.oracle.judging.noise import DRAWS, FIRST, loosened, noise_of
from lfm2np.oracle.judging.position import is_wrong, judged
from lfm2np.oracle.judging.routes import OWN, RouteDifference, as_key, swapped
from lfm2np.oracle.judging.scored import (
    Known,
    Scored,
    add_noises,
    judged_tokens,
    spoken,
    truths_of,
    usable,
)
from lfm2np.oracle.judging.truth import Spoken, Truth, spoken_truths
from lfm2np.oracle.judging.verdict import LIMIT, Position, Verdict
from lfm2np.values import Progress

MOST_REROUTED = 16  # answers for which near ties are tried
FAR = 5.0  # errors beyond LIMIT * FAR count as wrong in a wrong engine: two emulated ones may underestimate the scale


def judge(
    model: LoadedModel,
    format_name: str,
    pairs: Sequence[Pair],
    progress: Progress | None = None,
    known: Known | None = None,
    draws: Sequence[int] | None = None,
) -> list[Position]:
    """All positions that the answers allow to judge, in the order of the requests.

    By the FIRST emulated engines where these decide, else by all DRAWS; or by `draws` alone. Errors beyond LIMIT * FAR
    count as wrong without more engines, once all engines found one such answer wrong.
    """
    known = Known() if known is None else known
    pairs = usable(pairs)
    truths = truths_of(model, pairs, known, progress)
    of_answers = [truths[spoken(request, answer)] for request, answer in pairs]
    form, layers = format_named(format_name), model.config.sparse_layers
    without_routes = [truth for truth in of_answers if layers and not truth.spoken.routes and not form.is_fine]
    if without_routes:
        return judged_by_share(model, form, pairs, of_answers, without_routes, known, progress)

    def scored_by(truth: Truth) -> Scored:
        return Scored(truth, known.noises[format_name, truth.spoken])

    def judge_by(draws: Sequence[int], indices: Sequence[int]) -> list[list[Position]]:
        add_noises(model, format_name, [of_answers[index] for index in indices], known, draws, progress)
        return [judged(*pairs[index], scored_by(of_answers[index]), form.bits, layers) for index in indices]

    far = math.inf if layers else LIMIT * FAR
    by_answer = judge_by(draws, range(len(pairs))) if draws else by_enough_engines(len(pairs), judge_by, far)
    left = MOST_REROUTED
    for index, (pair, truth) in enumerate(zip(pairs, of_answers, strict=True)):
        if layers and pair[1].routes is None and left and is_wrong(by_answer[index]):
            left -= 1
            by_answer[index] = rerouted(model, format_name, pair, scored_by(truth), by_answer[index], known)
    return [position for positions in by_answer for position in positions]


def by_enough_engines(
    count: int, judge_by: Callable[[Sequence[int], Sequence[int]], list[list[Position]]], far: float
) -> list[list[Position]]:
    """The positions of `count` answers: by the FIRST engines where these decide, else by all; judge_by(draws, indices).

    far  units of the noise: larger errors count as wrong, once one such answer is wrong by all engines
    """
    by_answer = judge_by(FIRST, range(count))
    sizes = list(map(worst_of, by_answer))
    doubtful = [index for index, size in enumerate(sizes) if LIMIT / 2.0 < size <= far]
    others = sorted((index for index, size in enumerate(sizes) if size > far), key=lambda index: sizes[index])
    for index, positions in zip(doubtful, judge_by(DRAWS, doubtful), strict=True):
        by_answer[index] = positions
    while others and not any(is_wrong(by_answer[index]) for index in doubtful):
        doubtful = [others.pop()]
        (by_answer[doubtful[0]],) = judge_by(DRAWS, doubtful)
    return by_answer


def judged_by_share(
    model: LoadedModel,
    form: Format,
    pairs: Sequence[Pair],
    of_answers: Sequence[Truth],
    without_routes: Sequence[Truth],
    known: Known,
    progress: Progress | None,
) -> list[Position]:
    """For a mixture of experts in a format where near ties are everywhere, if routes are not reported: the share of
    engines with other routes counts, so all are emulated, once with the truth's routes and once with their own.
    """
    add_noises(model, form.name, of_answers, known, DRAWS, progress)
    distinct = list(dict.fromkeys(without_routes))
    add_noises(model, form.name, distinct, known, DRAWS, progress, own_routes=True)
    loose = dict(zip(distinct, loosened([known.loose[form.name, truth.spoken] for truth in distinct]), strict=True))
    positions = []
    for (request, answer), truth in zip(pairs, of_answers, strict=True):
        scored = Scored(truth, known.noises[form.name, truth.spoken], loose.get(truth))
        positions += judged(request, answer, scored, form.bits, model.config.sparse_layers)
    count, rate = len(DRAWS), math.fsum(position.route_chance for position in positions) / max(1, len(positions))
    # Few engines were drawn: each chance as if one more engine had the average chance of all positions.
    return [replace(at, route_chance=(count * at.route_chance + rate) / (count + 1)) for at in positions]


def worst_of(positions: Sequence[Position]) -> float:
    """The largest difference in an answer, in units of the noise: of a log-probability, a token or a route."""
    errors = [abs(position.error_ratio or 0.0) for position in positions]
    gaps = [position.gap_ratio for position in positions if position.is_new and position.token_id != position.best]
    routes = [position.route.ratio for position in positions if position.route is not None]
    return max((*errors, *gaps, *routes), default=0.0)


MOST_CHANGES, MOST_TRIES = 4, 8  # routes of one answer, and near ties tried for each


def rerouted(
    model: LoadedModel, format_name: str, pair: Pair, scored: Scored, positions: list[Position], known: Known
) -> list[Position]:
    """The positions if one near-tied route changed, or a few one after another, explains the answer; else as they were.

    A change is of one token at one layer: its last expert becomes the first that was not chosen. It explains an error
    if the exact network with it, including all that later tokens inherit, agrees with the engine up to there and
    beyond. At most MOST_CHANGES, of MOST_TRIES near ties each.
    """
    (request, answer), ids = pair, spoken(*pair).token_ids
    layers, bits = model.config.sparse_layers, format_named(format_name).bits
    rows = {row: sorted(tokens) for row, tokens in judged_tokens(request, answer, is_mixture=True).items()}
    judged_positions, changes = positions, dict[int, RouteDifference]()
    for _ in range(MOST_CHANGES):
        first = min(position.row for position in judged_positions if position.is_wrong)
        gaps = scored.margins
        assert gaps is not None
        for row, index in near_ties(gaps, first, max(changes, default=0))[:MOST_TRIES]:
            route, routes = change(scored.truth, row, index, layers[index], float(gaps[row, index]))
            sequence = Spoken(ids, as_key(routes, len(ids) - 1))
            (truth,) = spoken_truths(model, {sequence: rows}, known.place)
            (noise,) = noise_of(model, [truth], format_name, place=known.place)
            other = Scored(truth, noise)
            again = judged(request, answer, other, bits, layers)
            if first < min((position.row for position in again if position.is_wrong), default=len(truth.best)):
                scored, judged_positions = other, again
                changes[first] = route
                break
        else:
            return positions
        if not is_wrong(judged_positions):
            return [
                replace(position, route=changes[position.row], is_rerouted=True, verdict=Verdict.ROUTE)
                if position.row in changes
                else position
                for position in judged_positions
            ]
    return positions


def near_ties(gaps: NDArray[np.float64], last: int, first: int = 0) -> list[tuple[int, int]]:
    """Rows and sparse layers whose route a right engine may have chosen otherwise, by its margin [T, L]; the nearest
    tie first.
    """
    window = gaps[first : last + 1]
    near = np.argwhere(window <= LIMIT)
    return [(first + int(row), int(layer)) for row, layer in near[np.argsort(window[tuple(near.T)], kind="stable")]]


def change(truth: Truth, row: int, index: int, layer: int, gap: float) -> tuple[RouteDifference, NDArray[np.int64]]:
    """That one route changed, and the routes to force: earlier ones unchanged, later ones chosen anew."""
    assert truth.routes is not None and truth.preferred is not None
    route, scores = truth.routes[row, index], truth.preferred[row, index]
    routes = np.full_like(truth.routes, OWN)
    routes[:row] = truth.routes[:row]
    routes[row, :index] = truth.routes[row, :index]
    routes[row, index] = swapped(scores, route)
    (left,), (taken,) = np.setdiff1d(route, routes[row, index]), np.setdiff1d(routes[row, index], route)
    return RouteDifference(layer, int(taken), int(left), gap), routes
