"""One answer's tokens, each judged under the reported routes, or under possible ones where none are reported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.judging.position import Margins, margins, position
from lfm2np.oracle.judging.routes import OWN, difference
from lfm2np.oracle.judging.scored import Scored
from lfm2np.oracle.judging.verdict import LIMIT, WRONG, Position, Verdict, position_verdict, tie_chance
from lfm2np.oracle.targets.records import SAMPLED, Answer, Ask


def judged(ask: Ask, answer: Answer, scored: Scored, bits: int, layers: Sequence[int] = ()) -> list[Position]:
    """Positions of one answer's tokens, and of its prompt's if their log-probabilities or routes are reported.

    layers  the numbers of the sparse layers
    """
    start = len(ask.prompt_token_ids)
    routes = None if answer.routes is None else np.asarray(answer.routes[: len(scored.truth.best)], np.int64)
    prompt = answer.prompt_logprobs or ([None] * (start - 1) if routes is not None else [])
    rows = slice(0 if prompt else start - 1, start - 1 + len(answer.token_ids or ()))
    strict = margins(scored.truth, scored.noise, bits, rows)
    loose = None if scored.loose is None else margins(scored.truth, scored.loose, bits, rows)
    positions = []
    for row, logprob in enumerate(prompt):
        token_id = ask.prompt_token_ids[row + 1]
        positions.append(judged_token(ask, row, token_id, False, {}, logprob, scored, strict, loose))
    is_greedy = not ask.factors.get(SAMPLED)
    for index, token_id in enumerate(answer.token_ids or ()):
        row, logprob = start - 1 + index, None if answer.logprobs is None else answer.logprobs[index]
        tops = {} if answer.top_logprobs is None else answer.top_logprobs[index]
        positions.append(judged_token(ask, row, token_id, is_greedy, tops, logprob, scored, strict, loose))
    return [with_route(position, scored, routes, layers) for position in positions]


def judged_token(
    ask: Ask,
    row: int,
    token_id: int,
    is_new: bool,
    tops: Mapping[int, float],
    logprob: float | None,
    scored: Scored,
    strict: Margins,
    loose: Margins | None,
) -> Position:
    """With the oracle's routes; if it is then wrong, and routes may differ, with the noise of other routes."""
    reported = [*tops.items(), *([] if logprob is None else [(token_id, logprob)])]
    strictly = position(ask, row, token_id, is_new, reported, logprob, strict)
    if loose is None:
        return strictly
    columns = [scored.truth.at(row, token) for token in {*tops, token_id}]
    chance = share_beyond(scored, row, columns, strict)
    other = position(ask, row, token_id, is_new, reported, logprob, loose)
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
