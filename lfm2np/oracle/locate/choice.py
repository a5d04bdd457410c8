"""Chosen experts against what they are preferred by, and whose numbers are wrong.

A choice is `Measured` as ids [T, K], best first. Two experts nearly tie if their preferences (score plus bias) differ
by no more than LIMIT times the noise of that difference, the root of the sum of both squared spreads; anything else is
wrong. Where a near tie leaves a token's experts or their order open, its spread is UNKNOWN, and so is that of all that
depends on it: nothing there is judged. A dumped choice is not open.

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


def best(preferred: Measured, count: int) -> Measured:
    """The experts [T, K] that preferred [T, N] chooses."""
    order = top_k(preferred.values, count)
    apart, noise = against(preferred, order)
    np.put_along_axis(apart, order[..., None], np.inf, axis=-1)  # itself
    is_open = np.asarray((np.abs(apart) <= LIMIT * noise).any(axis=(1, 2)))
    return Measured(order.astype(np.float64), np.where(is_open[:, None], UNKNOWN, np.zeros(order.shape)))


def share_open(preferred: Measured, count: int) -> float:
    """How many of all experts nearly tie with the last that is chosen; 0 if all are."""
    apart, noise = against(preferred, top_k(preferred.values, count)[:, -1:])
    return float((np.abs(apart) <= LIMIT * noise).mean()) if count < apart.shape[-1] else 0.0


def against(preferred: Measured, ids: NDArray[np.int64]) -> tuple[Array, Array]:
    """How far all N experts are above these [t, K], and the noise of that: [t, K, N] each."""
    values, spread = (np.take_along_axis(x, ids, axis=-1)[..., None] for x in (preferred.values, preferred.spread))
    return preferred.values[:, None] - values, np.hypot(spread, preferred.spread[:, None])


def is_expert(dumped: Array, experts: int) -> NDArray[np.bool_]:
    """Which ids [t, K] are valid experts that do not occur earlier in their row."""
    earlier = np.tril(dumped[:, :, None] == dumped[:, None, :], -1).any(axis=-1)
    return np.asarray((dumped >= 0) & (dumped < experts) & ~earlier)


def as_read(dumped: Array, expected: Measured, experts: int) -> Measured:
    """Dumped ids, those of the last rows; a row with an invalid or repeated id becomes the expected one."""
    values, spread, first = expected.values.copy(), expected.spread.copy(), len(expected) - len(dumped)
    rows = np.flatnonzero(is_expert(dumped, experts).all(axis=1))
    values[first + rows], spread[first + rows] = dumped[rows], 0.0
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
    of_rows, everyone = preferred[len(preferred) - len(dumped) :], np.arange(experts)
    valid = is_expert(dumped, experts)
    given = np.where(valid, dumped, 0).astype(np.int64)
    right = (top_k(of_rows.values, count)[..., None] == everyone).any(axis=1)  # [t, N]
    chosen = ((given[..., None] == everyone) & valid[..., None]).any(axis=1)
    apart, noise = against(of_rows, given)
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


def describe_whose(wrong: NDArray[np.bool_], ids: Array, experts: int, by_place: bool) -> str:
    """Whose numbers [t, K * n] are wrong, or whose part of their sum [t, D], in words; empty if all, or none alone.

    ids  [t, K]. Of a sum it is the expert that all wrong rows and the fewest right ones chose.
    """
    rows = wrong.any(axis=1)
    took = {int(expert): (ids == expert).any(axis=1) for expert in np.unique(ids)}
    if by_place:
        whose = [int(expert) for expert in np.unique(ids[wrong.reshape(*ids.shape, -1).any(axis=-1)])]
    else:
        common = [expert for expert, its in took.items() if its[rows].all() and not its.all()]
        whose = sorted(common, key=lambda expert: took[expert].sum())[:1]
    if len(whose) == 1:
        count, total = int((rows & took[whose[0]]).sum()), int(took[whose[0]].sum())
        share = "the only row" if total == 1 else f"{f'all {total}' if count == total else f'{count} of {total}'} rows"
        return f"expert {whose[0]}: {share} that chose it"
    return "" if len(whose) in (0, len(took)) else described(np.isin(np.arange(experts), whose), "expert")
