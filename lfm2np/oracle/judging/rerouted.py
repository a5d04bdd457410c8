"""A wrong answer of a mixture of experts without reported routes: near ties are tried as an explanation.

For formats in which near ties are rare; in coarser ones a second noise covers other routes: see answer.py.
Explained tokens are counted, and verdict.route_probability says whether a right engine would send that many elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle.judging.answer import is_wrong, judged
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.noise import noise_of
from lfm2np.oracle.judging.routes import OWN, RouteDifference, as_key, swapped
from lfm2np.oracle.judging.scored import Known, Pair, Scored, scored_as
from lfm2np.oracle.judging.truth import Spoken, Truth, spoken_truths
from lfm2np.oracle.judging.verdict import LIMIT, Position, Verdict

MOST_CHANGES, MOST_TRIES = 4, 8  # routes of one answer, and near ties tried for each


def rerouted(
    model: LoadedModel,
    format_name: str,
    pair: Pair,
    scored: Scored,
    positions: list[Position],
    known: Known,
    draws: Sequence[int],
) -> list[Position]:
    """The positions if one near-tied route changed, or a few one after another, explains the answer; else as they were.

    A change is of one token at one layer: its last expert becomes the first that was not chosen. It explains an error
    if the exact network with it, including all that later tokens inherit, agrees with the engine up to there and
    beyond. At most MOST_CHANGES, of MOST_TRIES near ties each.
    """
    ask, answer = pair
    layers, bits = model.config.sparse_layers, format_named(format_name).bits
    judged_positions, changes = positions, dict[int, RouteDifference]()
    for _ in range(MOST_CHANGES):
        first = min(position.row for position in judged_positions if position.is_wrong)
        for row, index in near_ties(scored, first, max(changes, default=0))[:MOST_TRIES]:
            route, key = change(scored, row, index, layers[index])
            truth = spoken_truth(model, Spoken(scored.truth.token_ids, key), pair, known)
            (noise,) = noise_of(model, [truth], format_name, draws, place=known.place)
            other = scored_as(model, truth, noise)
            again = judged(ask, answer, other, bits, layers)
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


def near_ties(scored: Scored, last: int, first: int = 0) -> list[tuple[int, int]]:
    """Rows and sparse layers whose route a right engine may have chosen otherwise, the nearest tie first."""
    assert scored.margins is not None
    window = scored.margins[first : last + 1]
    near = np.argwhere(window <= LIMIT)
    return [(first + int(row), int(layer)) for row, layer in near[np.argsort(window[tuple(near.T)], kind="stable")]]


def change(scored: Scored, row: int, index: int, layer: int) -> tuple[RouteDifference, bytes]:
    """That one route changed, and the routes to force: earlier ones unchanged, later ones chosen anew."""
    truth, near = scored.truth, scored.margins
    assert truth.routes is not None and truth.preferred is not None and near is not None
    route, scores = truth.routes[row, index], truth.preferred[row, index]
    routes = np.full_like(truth.routes, OWN)
    routes[:row] = truth.routes[:row]
    routes[row, :index] = truth.routes[row, :index]
    routes[row, index] = swapped(scores, route)
    (left,), (taken,) = np.setdiff1d(route, routes[row, index]), np.setdiff1d(routes[row, index], route)
    difference = RouteDifference(layer, int(taken), int(left), float(near[row, index]))
    return difference, as_key(routes, len(routes))


def spoken_truth(model: LoadedModel, spoken: Spoken, pair: Pair, known: Known) -> Truth:
    ask, answer = pair
    start = len(ask.prompt_token_ids) - 1
    wanted = {row: {token} for row, token in enumerate(spoken.token_ids[1:])}
    for index, top in enumerate(answer.top_logprobs or ()):
        wanted[start + index].update(top)
    rows = {row: sorted(tokens) for row, tokens in wanted.items()}
    return spoken_truths(model, {spoken: rows}, known.place)[0]
