"""Alternatives that an engine lists beside a token: whether they are the likeliest, as they claim to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle.engines.records import Pair
from lfm2np.oracle.judging.allowed import Allowed
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.noise import allowed_by
from lfm2np.oracle.judging.scored import Known, spoken, truths_of, usable
from lfm2np.oracle.judging.verdict import LIMIT, Position


def not_the_likeliest(
    model: LoadedModel, format_name: str, pairs: Sequence[Pair], positions: Sequence[Position], known: Known
) -> dict[str, str]:
    """By id, answers whose top_logprobs lack a token that is likelier than one they have, by more than rounding.

    Only where what they say is right: of wrong values a list in another order says nothing more. In a mixture of
    experts only with reported routes, as others may exchange tokens.
    """
    has_routes = bool(model.config.sparse_layers)
    listing = [
        pair for pair in usable(pairs) if pair[1].top_logprobs and (pair[1].routes is not None or not has_routes)
    ]
    wrong = {(position.request.request_id, position.row) for position in positions if position.is_wrong}
    truths, bits = truths_of(model, listing, known), format_named(format_name).bits
    faults: dict[str, str] = {}
    for request, answer in listing:
        truth, start = truths[spoken(request, answer)], len(request.prompt_token_ids) - 1
        rows = slice(start, start + len(answer.ids))
        allowed = allowed_by(truth, known.noises[format_name, truth.spoken], bits, rows)
        for row, (token, top) in enumerate(zip(answer.ids, answer.top_logprobs or (), strict=True), start):
            if (request.request_id, row) not in wrong and (words := lacking(allowed[row], token, top)):
                faults.setdefault(request.request_id, f"top_logprobs of new token {row - start + 1} {words}")
    return faults


def lacking(allowed: Allowed, token: int, top: Mapping[int, float]) -> str:
    """What a list lacks; "" where it may be right. The token itself may stand in it without being likely."""
    others = [allowed.at(each) for each in top if each != token]
    if not others:
        return ""
    last = min(others, key=lambda column: allowed.logprobs[column])
    rest = np.where(np.isin(allowed.tokens, [*top, token]), -np.inf, allowed.logprobs)
    missing = int(np.argmax(rest))
    lead = float(rest[missing] - allowed.logprobs[last])
    if lead <= allowed.unit + LIMIT * float(allowed.scales[missing] + allowed.scales[last]):
        return ""
    return f"have token {allowed.tokens[last]}, and lack {allowed.tokens[missing]}, which is likelier by {lead:.3g} nat"
