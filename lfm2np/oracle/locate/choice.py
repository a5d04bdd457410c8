"""Chosen experts against what they are preferred by, and whose numbers are wrong.

A choice is `Measured` as places [T, N]: 0 for an expert that a token does not go to, else from 1 on, best first. Two
experts nearly tie if their preferences (score plus bias) differ by no more than LIMIT times the noise of that
difference, the root of the sum of both squared spreads; anything else is wrong. Where a near tie leaves a token's
experts or their order open, its spread is UNKNOWN, and so is that of all that depends on it: nothing there is judged.
A dumped choice is not open.

T tokens, t rows of a dump, N experts, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.routing import top_k
from lfm2np.oracle.locate.patterns import described
from lfm2np.oracle.locate.spread import LIMIT, Array, Measured

NOBODY = -1
UNKNOWN = 1e30  # finite, so that nothing that is computed from it is NaN


def places(preferred: Measured, count: int) -> Measured:
    """The experts [T, N] that preferred [T, N] chooses."""
    order = top_k(preferred.values, count)  # [T, K]
    values, noise = at_ids(preferred, order)
    apart = np.abs(values - preferred.values[:, None]) - LIMIT * np.hypot(noise, preferred.spread[:, None])
    np.put_along_axis(apart, order[..., None], np.inf, axis=-1)  # [T, K, N]: of a chosen expert and another
    is_open = (apart <= 0.0).any(axis=(1, 2))
    chosen = as_places(order, preferred.values.shape[1])
    return Measured(chosen, np.where(is_open[:, None], UNKNOWN, np.zeros_like(chosen)))


def at_ids(preferred: Measured, ids: NDArray[np.int64]) -> tuple[Array, Array]:
    """Values and spreads [t, N] of these experts [t, K]: [t, K, 1] each."""
    values, spread = (np.take_along_axis(x, ids, axis=-1)[..., None] for x in (preferred.values, preferred.spread))
    return values, spread


def as_places(ids: Array, experts: int) -> Array:
    """[t, K] -> [t, N]"""
    places_of_experts = np.zeros((len(ids), experts))
    np.put_along_axis(places_of_experts, ids.astype(np.int64), np.arange(1.0, 1.0 + ids.shape[1])[None], axis=-1)
    return places_of_experts


def chosen_ids(chosen: Measured, count: int) -> NDArray[np.int64]:
    """Places [T, N] -> [T, K], in the order of the places."""
    return top_k(np.where(chosen.values > 0.0, -chosen.values, -np.inf), count)


def is_expert(dumped: Array, experts: int) -> NDArray[np.bool_]:
    """Which ids [t, K] are valid experts that do not occur earlier in their row."""
    earlier = np.tril(dumped[:, :, None] == dumped[:, None, :], -1).any(axis=-1)
    return np.asarray((dumped >= 0) & (dumped < experts) & ~earlier)


def as_read(dumped: Array, expected: Measured) -> Measured:
    """Dumped ids as places, those of the last rows; a row with an invalid or repeated id becomes the expected one."""
    first = len(expected) - len(dumped)
    values, spread = expected.values.copy(), expected.spread.copy()
    rows = np.flatnonzero(is_expert(dumped, values.shape[1]).all(axis=1))
    values[first + rows], spread[first + rows] = as_places(dumped[rows], values.shape[1]), 0.0
    return Measured(values, spread)


@dataclass(frozen=True, eq=False)
class Judged:
    """Dumped ids [t, K]: each error relative to its bound (infinite for an invalid id), and the expert it replaces."""

    ids: Array
    errors: Array
    instead: NDArray[np.int64]  # NOBODY where it is right
    apart: Array  # how far both are apart,
    noise: Array  # and the noise of that
    experts: int

    def in_words(self, row: int, place: int) -> str:
        given = self.ids[row, place]
        if not 0 <= given < self.experts:
            return f"routed to expert {given:g}, expected one of 0 to {self.experts - 1}"
        if np.isinf(self.errors[row, place]):
            return f"routed to expert {given:g} twice"
        times = self.apart[row, place] / self.noise[row, place]
        instead = f"instead of {self.instead[row, place]}, although their scores are {times:.3g} times the noise apart"
        return f"routed to expert {given:g} {instead}"

    def described(self) -> str:
        """All that are wrong."""
        wrong = self.errors > 1.0
        valid = wrong & (self.instead != NOBODY)
        texts = [
            f"{words}: {described(np.isin(np.arange(self.experts), numbers), 'expert')}"
            for words, numbers in (("chosen wrongly", self.ids[valid]), ("left out", self.instead[valid]))
            if numbers.size
        ]
        strange = int((wrong & (self.instead == NOBODY)).sum())
        return "; ".join([*texts, *([f"no expert, or one twice: {strange} times"] if strange else [])])


def judged(dumped: Array, preferred: Measured) -> Judged:
    """`preferred` [T, N]; `dumped` may be the last rows only. A wrong expert is compared with the missing one that
    gives the largest error.
    """
    experts, count = preferred.values.shape[1], dumped.shape[1]
    of_rows = preferred[len(preferred) - len(dumped) :]
    valid = is_expert(dumped, experts)
    given = np.where(valid, dumped, 0).astype(np.int64)
    right = as_places(top_k(of_rows.values, count), experts) > 0.0  # [t, N]
    chosen = np.zeros_like(right)
    rows, columns = np.nonzero(valid)
    chosen[rows, given[rows, columns]] = True
    values, spread = at_ids(of_rows, given)
    noise, apart = np.hypot(spread, of_rows.spread[:, None]), of_rows.values[:, None] - values  # [t, K, N]
    errors = np.nan_to_num(np.abs(apart) / (LIMIT * noise), nan=0.0)
    errors = np.where((right & ~chosen)[:, None], errors, -1.0)  # of those that are missing
    worst = errors.argmax(axis=-1)[..., None]
    wrong = valid & ~np.take_along_axis(right, given, axis=-1)
    error, off, unsure = (np.take_along_axis(array, worst, axis=-1)[..., 0] for array in (errors, apart, noise))
    return Judged(
        ids=dumped,
        errors=np.where(valid, np.where(wrong, np.maximum(error, 0.0), 0.0), np.inf),
        instead=np.where(wrong & (error >= 0.0), worst[..., 0], NOBODY),
        apart=off,
        noise=unsure,
        experts=experts,
    )


def describe_whose(wrong: NDArray[np.bool_], chosen: Measured, by_place: bool) -> str:
    """Whose numbers [t, K * n] are wrong, or whose part of their sum [t, D], in words; empty if all, or none alone.

    chosen  places [t, N]. Of a sum it is the expert that all wrong rows and the fewest right ones chose.
    """
    ids, rows = chosen_ids(chosen, int((chosen.values[0] > 0.0).sum())), wrong.any(axis=1)
    took = {int(expert): (ids == expert).any(axis=1) for expert in np.unique(ids)}
    if by_place:
        whose = np.unique(ids[wrong.reshape(*ids.shape, -1).any(axis=-1)]).tolist()
    else:
        common = [expert for expert, its in took.items() if its[rows].all() and not its.all()]
        whose = sorted(common, key=lambda expert: took[expert].sum())[:1]
    if len(whose) == 1:
        count, total = int((rows & took[whose[0]]).sum()), int(took[whose[0]].sum())
        share = "the only row" if total == 1 else f"{f'all {total}' if count == total else f'{count} of {total}'} rows"
        return f"expert {whose[0]}: {share} that chose it"
    return (
        "" if len(whose) in (0, len(took)) else described(np.isin(np.arange(chosen.values.shape[1]), whose), "expert")
    )
