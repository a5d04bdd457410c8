"""Each token of an answer within the noise: how far its log-probability and the greedy token's lead are from the exact.

Under the reported routes, or under possible ones where none are reported.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.oracle.judging.allowed import Allowed
from lfm2np.oracle.judging.noise import allowed_by
from lfm2np.oracle.judging.routes import OWN, difference
from lfm2np.oracle.judging.scored import Scored, spoken
from lfm2np.oracle.judging.verdict import LIMIT, WRONG, Position, Verdict, position_verdict, tie_chance


class Token(NamedTuple):
    """One token of an answer or its prompt, and what the engine reported there."""

    request: Request
    row: int
    token_id: int
    is_new: bool
    logprob: float | None
    tops: Mapping[int, float] = MappingProxyType({})  # log-probabilities of alternatives, by token
    context: int | None = None  # see Position


def position(token: Token, allowed: Allowed) -> Position:
    """One token within one noise.

    Its own log-probability may be reported twice, by itself and among the alternatives: both are judged.
    """
    request, row, token_id, is_new, logprob, tops, context = token
    column = allowed.at(token_id)
    exact, scale, lead = (float(of[column]) for of in (allowed.logprobs, allowed.scales, allowed.leads))
    errors = allowed.errors([*tops.items(), *([] if logprob is None else [(token_id, logprob)])])
    return Position(
        request=request,
        row=row,
        is_new=is_new,
        token_id=token_id,
        best=allowed.best,
        gap=float(allowed.logprobs[allowed.at(allowed.best)]) - exact,
        gap_ratio=lead,
        margin_ratio=allowed.runner_up,
        error=None if logprob is None else logprob - exact,
        error_ratio=errors.ratio,
        error_size=errors.size,
        verdict=position_verdict(is_new, token_id, allowed.best, lead, errors.ratio),
        scale=math.hypot(scale, allowed.unit / 2.0),
        flip_chance=allowed.flip_chance if is_new else None,
        context=context,
    )


def judged(request: Request, answer: Answer, scored: Scored, bits: int, layers: Sequence[int] = ()) -> list[Position]:
    """Positions of one answer's tokens, and of its prompt's if their log-probabilities or routes are reported.

    layers  the numbers of the sparse layers
    """
    start, ids = len(request.prompt_token_ids), spoken(request, answer).token_ids
    contexts = list(itertools.accumulate(ids, lambda before, token: hash((before, token)), initial=0))[1:]
    routes = None if answer.routes is None else np.asarray(answer.routes[: len(scored.truth.best)], np.int64)
    prompt = answer.prompt_logprobs or ([None] * (start - 1) if routes is not None else [])
    rows = slice(0 if prompt else start - 1, start - 1 + len(answer.token_ids or ()))
    strict = allowed_by(scored.truth, scored.noise, bits, rows)
    loose = {} if scored.loose is None else allowed_by(scored.truth, scored.loose, bits, rows)
    tokens = [
        Token(request, row, ids[row + 1], False, logprob, context=contexts[row]) for row, logprob in enumerate(prompt)
    ]
    is_new = request.is_greedy
    for index, token_id in enumerate(answer.token_ids or ()):
        row, logprob = start - 1 + index, None if answer.logprobs is None else answer.logprobs[index]
        tops = {} if answer.top_logprobs is None else answer.top_logprobs[index]
        tokens.append(Token(request, row, token_id, is_new, logprob, tops, contexts[row]))
    return [
        with_route(judged_token(token, scored, strict[token.row], loose.get(token.row)), scored, routes, layers)
        for token in tokens
    ]


def judged_token(token: Token, scored: Scored, strict: Allowed, loose: Allowed | None) -> Position:
    """With the oracle's routes; if it is then wrong, and routes may differ, with the noise of other routes."""
    strictly = position(token, strict)
    if loose is None:
        return strictly
    columns = [strict.at(token_id) for token_id in {*token.tops, token.token_id}]
    chance = chance_beyond(scored, token.row, columns, strict)
    other = position(token, loose)
    if strictly.verdict not in WRONG:
        return replace(strictly, error_size=other.error_size, scale=other.scale, route_chance=chance)
    if other.verdict in WRONG:
        return replace(other, route_chance=chance)
    return replace(other, verdict=Verdict.ROUTE, is_rerouted=True, route_chance=chance)


def chance_beyond(scored: Scored, row: int, columns: Sequence[int], strict: Allowed) -> float:
    """That a right engine's routes, if they are its own, reveal themselves at these columns: by the share of emulated
    engines of which they do. Those are few: as if one more had any near tie of the row to its other side.
    """
    assert scored.loose is not None
    limits = strict.unit + LIMIT * strict.scales[columns]
    errors = scored.loose.errors[:, row - scored.truth.first, columns]
    revealed = np.any(np.abs(errors) > limits, axis=1)
    return (float(np.sum(revealed)) + tie_at(scored, row)) / (len(revealed) + 1)


def tie_at(scored: Scored, row: int) -> float:
    """The chance that a right engine sends a row's token to another expert in any layer."""
    assert scored.margins is not None
    return 1.0 - math.prod(1.0 - tie_chance(margin) for margin in scored.margins[row])


def with_route(position: Position, scored: Scored, routes: NDArray[np.int64] | None, layers: Sequence[int]) -> Position:
    """The position with what its reported routes [L, K] show, and the chance that they differ from the oracle's."""
    if scored.margins is None or scored.loose is not None:
        return position
    chance = tie_at(scored, position.row)
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
