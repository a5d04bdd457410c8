"""Where a side is wrong: in which sequences, at which positions most, and what all wrong positions have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.report.report import number, plural
from lfm2np.oracle.rollouts.exact import Fit, Scores, by_rollout

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
MOST_POSITIONS, MOST_NAMED = 10, 3
LEAST_ALIKE = 4  # wrong positions, for what they have in common to be no accident
PERIODS = (64, 32, 16, 8, 4)
LEAST_PERIODS = 8  # wrong positions, likewise


def wrong_sequences(scores: Sequence[Scores], fit: Fit) -> list[dict[str, Any]]:
    """Of each with wrong positions its id, its tokens, how many are wrong, the first of them in the answer, and the
    largest error, in units of the format's.
    """
    cut = zip(scores, by_rollout(fit.wrong, scores), by_rollout(np.abs(fit.ratios), scores), strict=True)
    return [
        {
            "id": each.rollout.id,
            "tokens": each.size,
            "wrong": int(np.count_nonzero(wrong)),
            "first": int(np.argmax(wrong)),
            "worst": float(np.nanmax(ratios)),
        }
        for each, wrong, ratios in cut
        if wrong.any()
    ]


def worst_positions(scores: Sequence[Scores], fit: Fit, reported: Float64, exact: Float64) -> list[dict[str, Any]]:
    """Of the wrong ones, the largest errors first: sequence, position in the answer, token, nats, error in units."""
    ids, positions, tokens = (np.concatenate(parts) for parts in zip(*map(places_of, scores), strict=True))
    order = sorted(np.flatnonzero(fit.wrong).tolist(), key=lambda index: -abs(fit.ratios[index]))
    return [
        {
            "id": str(ids[index]),
            "position": int(positions[index]),
            "token_id": int(tokens[index]),
            "reported": float(reported[index]),
            "exact": float(exact[index]),
            "error": float(fit.ratios[index]),
        }
        for index in order[:MOST_POSITIONS]
    ]


def places_of(scores: Scores) -> tuple[NDArray[Any], Int64, Int64]:
    """[R] of each answer token the id of its sequence, its position in the answer, and the token."""
    ids = np.full(scores.size, scores.rollout.id, object)
    return ids, np.arange(scores.size), np.array(scores.rollout.token_ids, np.int64)


def in_words(scores: Sequence[Scores], fit: Fit, reported: Float64) -> str:
    """ "" if nothing is wrong, or nothing tells wrong positions from right ones."""
    return "; ".join(alike(scores, fit, reported)) if fit.num_wrong else ""


def alike(scores: Sequence[Scores], fit: Fit, reported: Float64) -> Iterator[str]:
    wrong, right = fit.wrong, fit.reported & ~fit.wrong
    sequences = wrong_sequences(scores, fit)
    if len(sequences) < len(scores):
        names = ", ".join(each["id"] for each in sequences[:MOST_NAMED])
        more = ", ..." if len(sequences) > MOST_NAMED else ""
        yield f"wrong in {len(sequences)} of {plural(len(scores), 'sequence')}: {names}{more}"
    if fit.num_wrong < LEAST_ALIKE:
        return
    _, positions, tokens = (np.concatenate(parts) for parts in zip(*map(places_of, scores), strict=True))
    for words, values in (("where the token is {}", tokens), ("where {} is reported", reported)):
        value = values[wrong][0]
        if (values[wrong] == value).all() and not (values[right] == value).all():
            yield "wrong only " + words.format(number(float(value)) if values is reported else int(value))
    if (positions[wrong] == 0).all():
        yield "wrong only at the first token of an answer"
    elif fit.num_wrong >= LEAST_PERIODS:
        for period in PERIODS:
            rest = positions[wrong] % period
            if (rest == rest[0]).all():
                yield f"wrong only at every {period}th token of an answer, from its token {rest[0]} on, counted from 0"
                break
