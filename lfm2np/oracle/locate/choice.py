"""Chosen experts against what they are preferred by, and whose numbers are wrong.

A choice is `Measured` as places [T, N]: 0 for an expert that a token does not go to, else from 1 on, best first; its
spread is 1 where a near tie leaves that open, else 0. Two experts nearly tie if their preferences (score plus bias)
differ by no more than LIMIT times the noise of that difference, the root of the sum of both squared spreads; anything
else is wrong. What depends on an open choice has the difference to the farthest possible expert as its spread, so that
bounds hold for several at once. A dumped choice is not open.

T tokens, t rows of a dump, N experts, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.routing import top_k
from lfm2np.oracle.locate.patterns import described
from lfm2np.oracle.locate.spread import LIMIT, Measured

Array = NDArray[Any]
NOBODY = -1


def places(preferred: Measured, count: int, by_place: bool) -> Measured:
    """The experts [T, N] that preferred [T, N] chooses; by_place: places among the chosen may be in doubt, too."""
    order = top_k(preferred.values, count)  # [T, K]
    chosen_places = as_places(order, preferred.values.shape[1])
    values, noise = (
        np.take_along_axis(array, order, axis=-1)[..., None] for array in (preferred.values, preferred.spread)
    )
    apart = np.abs(values - preferred.values[:, None]) - LIMIT * np.hypot(noise, preferred.spread[:, None])
    near = apart <= 0.0  # [T, K, N]: a chosen expert and any
    if by_place:
        np.put_along_axis(near, order[..., None], False, axis=-1)  # itself
    else:
        near &= (chosen_places == 0.0)[:, None]
    doubt = near.any(axis=1)
    is_doubted = np.take_along_axis(doubt, order, axis=-1) | near.any(axis=-1)
    np.put_along_axis(doubt, order, is_doubted, axis=-1)
    return Measured(chosen_places, doubt.astype(np.float64))


def as_places(ids: Array, experts: int) -> Array:
    """[t, K] -> [t, N]"""
    places_of_experts = np.zeros((len(ids), experts))
    np.put_along_axis(places_of_experts, ids.astype(np.int64), np.arange(1.0, 1.0 + ids.shape[1])[None], axis=-1)
    return places_of_experts


def chosen_ids(chosen: Measured, count: int) -> NDArray[np.int64]:
    """Places [T, N] -> [T, K], in the order of the places."""
    return top_k(np.where(chosen.values > 0.0, -chosen.values, -np.inf), count)


def says_nothing(chosen: Measured, most: float) -> bool:
    """Whether for most experts it is open if they are chosen."""
    return bool(chosen.spread.mean() > most)


def is_expert(dumped: Array, experts: int) -> NDArray[np.bool_]:
    """Which ids [t, K] are valid experts that do not occur earlier in their row."""
    known = (dumped >= 0) & (dumped < experts)
    earlier = dumped[:, :, None] == dumped[:, None, :]
    return np.asarray(known & ~np.tril(earlier, -1).any(axis=-1))


def as_read(dumped: Array, expected: Measured) -> Measured:
    """Dumped ids as places, those of the last rows; a row with an invalid or repeated id becomes the expected one."""
    first = len(expected.values) - len(dumped)
    values, spread = expected.values.copy(), expected.spread.copy()
    rows = np.flatnonzero(is_expert(dumped, values.shape[1]).all(axis=1))
    values[first + rows], spread[first + rows] = as_places(dumped[rows], values.shape[1]), 0.0
    return Measured(values, spread)


@dataclass(frozen=True, eq=False)
class Judged:
    """Dumped ids [t, K]: each error relative to its bound (infinite for an invalid id), and the expert it replaces."""

    errors: Array
    instead: NDArray[np.int64]  # NOBODY where it is right
    apart: Array  # how far both are apart,
    noise: Array  # and the noise of that


def judged(dumped: Array, preferred: Measured) -> Judged:
    """`preferred` [T, N]; `dumped` may be the last rows only. A wrong expert is compared with the missing one that
    gives the largest error.
    """
    experts, count = preferred.values.shape[1], dumped.shape[1]
    rows_preferred = preferred[len(preferred.values) - len(dumped) :]
    valid = is_expert(dumped, experts)
    given = np.where(valid, dumped, 0).astype(np.int64)
    right = as_places(top_k(rows_preferred.values, count), experts) > 0.0  # [t, N]
    chosen = np.zeros_like(right)
    rows, columns = np.nonzero(valid)
    chosen[rows, given[rows, columns]] = True
    missing = (right & ~chosen)[:, None]  # [t, 1, N]
    values, spread = (
        np.take_along_axis(array, given, axis=-1)[..., None] for array in (rows_preferred.values, rows_preferred.spread)
    )
    noise = np.hypot(spread, rows_preferred.spread[:, None])
    apart = rows_preferred.values[:, None] - values
    errors = np.where(missing, np.nan_to_num(np.abs(apart) / (LIMIT * noise), nan=0.0), -1.0)  # [t, K, N]
    worst = errors.argmax(axis=-1)[..., None]
    wrong = valid & ~np.take_along_axis(right, given, axis=-1)
    error, off, unsure = (np.take_along_axis(array, worst, axis=-1)[..., 0] for array in (errors, apart, noise))
    return Judged(
        errors=np.where(valid, np.where(wrong, np.maximum(error, 0.0), 0.0), np.inf),
        instead=np.where(wrong & (error >= 0.0), worst[..., 0], NOBODY),
        apart=off,
        noise=unsure,
    )


def in_words(dumped: Array, judged_ids: Judged, row: int, place: int, experts: int) -> str:
    given = dumped[row, place]
    if not 0 <= given < experts:
        return f"routed to expert {given:g}, expected one of 0 to {experts - 1}"
    if np.isinf(judged_ids.errors[row, place]):
        return f"routed to expert {given:g} twice"
    times = judged_ids.apart[row, place] / judged_ids.noise[row, place]
    return (
        f"routed to expert {given:g} instead of {judged_ids.instead[row, place]}, although their scores are "
        f"{times:.3g} times the noise apart"
    )


def describe_choices(dumped: Array, judged_ids: Judged, experts: int) -> str:
    wrong = judged_ids.errors > 1.0
    valid = wrong & (judged_ids.instead != NOBODY)
    texts = []
    for words, numbers in (("chosen wrongly", dumped[valid]), ("left out", judged_ids.instead[valid])):
        if numbers.size:
            is_listed = np.isin(np.arange(experts), numbers)
            texts.append(f"{words}: {described(is_listed, 'expert')}")
    strange = int((wrong & (judged_ids.instead == NOBODY)).sum())
    return "; ".join([*texts, *([f"no expert, or one twice: {strange} times"] if strange else [])])


def describe_whose(wrong: NDArray[np.bool_], chosen: Measured, by_place: bool) -> str:
    """Which experts' numbers [t, K * n] are wrong, or whose part of their sum [t, D], in words; places [t, N]."""
    ids = chosen_ids(chosen, int((chosen.values[0] > 0.0).sum()))
    if by_place:
        return describe_experts(np.asarray(wrong.reshape(*ids.shape, -1).any(axis=-1)), ids, chosen.values.shape[1])
    return describe_common(np.asarray(wrong.any(axis=1)), ids)


def describe_experts(wrong: NDArray[np.bool_], chosen: Array, experts: int) -> str:
    """The experts with wrong numbers: mask and ids, both [t, K]. Empty if all are wrong."""
    wrong_experts = [int(expert) for expert in np.unique(chosen[wrong])]
    if len(wrong_experts) == 1:
        return f"expert {wrong_experts[0]}: {share_of(int(wrong.sum()), int((chosen == wrong_experts[0]).sum()))}"
    if len(wrong_experts) == len(np.unique(chosen)):
        return ""
    return described(np.isin(np.arange(experts), wrong_experts), "expert")


def describe_common(wrong: NDArray[np.bool_], chosen: Array) -> str:
    """The expert that all wrong rows (a mask [t]) and the fewest right ones chose, if there is one; chosen [t, K]."""
    counts = {}
    for expert in np.unique(chosen):
        its = (chosen == expert).any(axis=1)
        if its[wrong].all() and not its.all():
            counts[int(expert)] = int(its.sum())
    if not counts:
        return ""
    least = min(counts, key=lambda expert: counts[expert])
    return f"expert {least}: {share_of(int(wrong.sum()), counts[least])}"


def share_of(count: int, total: int) -> str:
    if total == 1:
        return "the only row that chose it"
    return f"{f'all {total}' if count == total else f'{count} of {total}'} rows that chose it"
