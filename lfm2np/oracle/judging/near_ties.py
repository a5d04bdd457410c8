"""Whether near-tied routes explain a wrong answer of a mixture of experts that reports none.

A change is of one token at one layer: its last expert becomes the first that was not chosen. Some changes, one after
another, explain an answer if the exact network with them, including all that later tokens inherit, agrees with the
engine everywhere. An answer's error says at which row to look: no route behind it can be its reason.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle.engines.records import Pair
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.noise import at_least, noise_of
from lfm2np.oracle.judging.position import is_wrong, judged
from lfm2np.oracle.judging.routes import OWN, RouteDifference, as_key, swapped
from lfm2np.oracle.judging.scored import Known, Scored, judged_tokens, spoken
from lfm2np.oracle.judging.truth import Spoken, Truth, spoken_truths
from lfm2np.oracle.judging.verdict import LIMIT, Position, Verdict

MOST_REROUTED = 16  # sequences for which near ties are tried
MOST_CHANGES, MOST_TRIES = 4, 32  # rows of an answer that are explained, and near ties tried for it


@dataclass(frozen=True, eq=False)
class Explanation:
    """A sequence under changed routes: by each row that is wrong without it, the last change that is tried for it."""

    scored: Scored
    changes: Mapping[int, RouteDifference] = field(default_factory=dict)


def explained(
    model: LoadedModel,
    format_name: str,
    pairs: Sequence[Pair],
    by_answer: Sequence[list[Position]],
    scored: Sequence[Scored],
    known: Known,
    least: float | None = None,
) -> list[list[Position]]:
    """The positions of each answer; of wrong ones without reported routes, as some near ties explain them.

    Where more than MOST_REROUTED sequences are wrong, or one is that they don't explain, the engine is, and no others
    are tried. `least` is of the spread of the noise under changed routes, where other routes may differ too; see
    noise.rerouted_spread.
    """
    layers, bits = model.config.sparse_layers, format_named(format_name).bits
    results = list(by_answer)
    wrong: dict[Spoken, list[int]] = {}  # copies of a request are answered alike
    for index, (pair, positions) in enumerate(zip(pairs, by_answer, strict=True)):
        if pair[1].routes is None and is_wrong(positions):
            wrong.setdefault(spoken(*pair), []).append(index)
    for indices in wrong.values() if len(wrong) <= MOST_REROUTED else ():
        first = indices[0]
        found = explanation(model, format_name, pairs[first], scored[first], by_answer[first], known, least)
        if found is None:
            break
        for index in indices:
            again = judged(*pairs[index], found.scored, bits, layers)
            results[index] = results[index] if is_wrong(again) else with_changes(again, found.changes)
    return results


def with_changes(positions: Sequence[Position], changes: Mapping[int, RouteDifference]) -> list[Position]:
    return [
        replace(position, route=changes[position.row], is_rerouted=True, verdict=Verdict.ROUTE)
        if position.row in changes
        else position
        for position in positions
    ]


def explanation(
    model: LoadedModel,
    format_name: str,
    pair: Pair,
    scored: Scored,
    positions: Sequence[Position],
    known: Known,
    least: float | None = None,
) -> Explanation | None:
    """None if there is none among MOST_TRIES.

    Best first: the next changes are made to the sequence whose first wrong row is the latest or, of several, has the
    smallest error. Behind a change other layers choose anew, perhaps at another near tie.
    """
    (request, answer), ids = pair, spoken(*pair).token_ids
    layers, bits = model.config.sparse_layers, format_named(format_name).bits
    rows = {row: sorted(tokens) for row, tokens in judged_tokens(request, answer, is_mixture=True).items()}
    seen: set[Spoken] = set()
    tried = [(first_wrong(positions), 0, 0, Explanation(scored))]
    while tried and len(seen) < MOST_TRIES:
        (before, _), _, since, found = heapq.heappop(tried)
        gaps = found.scored.margins
        assert gaps is not None, "of a mixture of experts"
        for row, index in near_ties(gaps, -before, since)[: MOST_TRIES // MOST_CHANGES]:
            route, routes = change(found.scored.truth, row, index, layers[index], float(gaps[row, index]))
            sequence = Spoken(ids, as_key(routes, len(ids) - 1))
            if sequence in seen:
                continue
            seen.add(sequence)
            (truth,) = spoken_truths(model, {sequence: rows}, known.place)
            (noise,) = noise_of(model, [truth], format_name, place=known.place)
            other = Scored(truth, noise, None if least is None else at_least(noise, least))
            again, changes = judged(request, answer, other, bits, layers), {**found.changes, -before: route}
            if not is_wrong(again):
                return Explanation(other, changes)
            if len(changes) < MOST_CHANGES:
                heapq.heappush(tried, (first_wrong(again), len(seen), row, Explanation(other, changes)))
    return None


def first_wrong(positions: Sequence[Position]) -> tuple[int, float]:
    """Its row, negative, and the size of its error, in units of the noise, the lead of a token included: the smaller,
    the nearer to an explanation.
    """
    first = min((position for position in positions if position.is_wrong), key=lambda position: position.row)
    return -first.row, max(abs(first.error_ratio or 0.0), first.gap_ratio if first.is_new else 0.0)


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
