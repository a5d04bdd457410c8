"""The verdict on one position, and on all of them.

An engine is judged by teacher forcing: its own tokens are scored by the oracle, so one flip does not poison what
follows. With s the scale of the declared format's noise there (noise.py), and u one unit in the last place of the
largest logit in that format, a difference x is beyond it if x > u + LIMIT * s.

EXACT         the oracle's greedy token; its log-probability, if reported, is off by no more than the format allows
TIE           another token, whose logit is behind by no more than the format allows
ROUTE         in a mixture of experts: an error that only another expert explains, whose score is behind by no more than
              the format allows; a right engine may send the token there too
DRIFT         log-probabilities further off than the format explains
BUG           a token that is further behind than the format explains
INCONCLUSIVE  nothing was reported
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from lfm2np.oracle.engines.records import Request
from lfm2np.oracle.judging.routes import RouteDifference

LIMIT = 10.0  # of right engines the largest seen is about 6: see the tables under docs/engine
FLIPS_LIMIT = 1e-9  # probability below which so many flips are not rounding
DOUBT = 0.01  # a probability below which it is computed again with the best estimate of the noise
SPREAD = 2.0  # how much a right engine's errors may exceed the scale, on the average of many positions


class Verdict(StrEnum):
    EXACT = "EXACT"
    TIE = "TIE"
    ROUTE = "ROUTE"
    INCONCLUSIVE = "INCONCLUSIVE"
    DRIFT = "DRIFT"
    BUG = "BUG"


WRONG = (Verdict.DRIFT, Verdict.BUG)


@dataclass(frozen=True)
class Position:
    """One token of an engine against the oracle. Log-probabilities in nats; ratios in units of the format's noise."""

    request: Request
    row: int  # the position of the token before it: the logits' row
    is_new: bool  # generated, so it should be the greedy one; else a token of the prompt, or drawn
    token_id: int
    best: int  # the oracle's greedy token
    gap: float  # log-probability of `best` minus that of the token; 0 where they are the same
    gap_ratio: float
    margin_ratio: float  # gap to the runner-up of `best`: how far from a tie the oracle is
    error: float | None  # engine's log-probability minus the oracle's, of this token; None: not reported
    error_ratio: float | None  # beyond a unit of the logits; the largest of this token and its alternatives
    error_size: float | None  # that error in units of the noise and of the logits' unit together: for averages
    verdict: Verdict
    route: RouteDifference | None = None  # from the oracle's, if routes are reported or revealed
    is_rerouted: bool = False  # its token went to another expert, as far as that is known
    route_chance: float = 0.0  # that a right engine's does, as far as it would be noticed
    scale: float = 0.0  # nats: what the format does to its log-probability, the rounding of the logits included
    flip_chance: float | None = None  # that a right engine's token is another than `best`; None: by margin_ratio
    context: int | None = None  # a hash of the tokens up to the row; None: no other position has the same

    @property
    def place(self) -> tuple[str, int]:
        return self.request.request_id, self.row

    @property
    def is_wrong(self) -> bool:
        return self.verdict in WRONG

    @property
    def is_flip(self) -> bool:
        """Tokens that rerouting explains are counted apart."""
        return self.is_new and self.token_id != self.best and self.verdict is not Verdict.ROUTE


def position_verdict(
    is_new: bool,
    token_id: int,
    best: int,
    gap_ratio: float,
    error_ratio: float | None,
    reports_routes: bool = False,
    route: RouteDifference | None = None,
) -> Verdict:
    """See the module's docstring; a token of the prompt was not chosen by the engine, so it is no flip."""
    flip = is_new and token_id != best
    if (flip and gap_ratio > LIMIT) or (route is not None and route.ratio > LIMIT):
        return Verdict.BUG
    if error_ratio is not None and abs(error_ratio) > LIMIT:
        return Verdict.DRIFT
    if flip:
        return Verdict.TIE
    if route is not None:
        return Verdict.ROUTE
    return Verdict.EXACT if is_new or error_ratio is not None or reports_routes else Verdict.INCONCLUSIVE


def flip_probability(positions: Sequence[Position]) -> tuple[int, float]:
    """How many flips there are, and the probability that a right engine of this format has that many or more.

    Each position flips with the probability that noise of its scale, times SPREAD, exceeds the oracle's margin to any
    of its rivals; the distribution of the sum is computed exactly (Poisson binomial).
    """
    new = [position for position in positions if position.is_new]
    flips = sum(position.is_flip for position in new)
    chances = [
        tie_chance(position.margin_ratio) if position.flip_chance is None else position.flip_chance for position in new
    ]
    return flips, so_many_or_more(flips, chances, contexts_of(new))


def route_probability(positions: Sequence[Position]) -> tuple[int, float]:
    """How many tokens went to other experts, and the probability of that many or more in a right engine."""
    rerouted = sum(position.is_rerouted for position in positions)
    chances = [min(1.0, SPREAD * position.route_chance) for position in positions]
    return rerouted, so_many_or_more(rerouted, chances, contexts_of(positions))


def contexts_of(positions: Sequence[Position]) -> list[Hashable]:
    return [(index,) if position.context is None else position.context for index, position in enumerate(positions)]


def chance_together(positions: Sequence[Position]) -> float:
    """The smaller of the two probabilities: that of their flips, and that of their routes."""
    return min(flip_probability(positions)[1], route_probability(positions)[1])


def tie_chance(margin_ratio: float) -> float:
    """The probability that noise, times SPREAD, exceeds a margin in units of the noise."""
    return 0.5 * math.erfc(margin_ratio / (SPREAD * math.sqrt(2.0)))


def so_many_or_more(count: int, chances: Sequence[float], alike: Sequence[Hashable] | None = None) -> float:
    """The probability that at least `count` of independent events with these chances happen: the tail of the Poisson
    binomial distribution, exactly. Assumption: given the positions, rounding decides each by itself.

    alike  events with the same value happen together or not at all, with the largest of their chances: answers to
           copies of a request are rounded alike, and a tie in a hundred of them is not a hundred coins. None: each by
           itself

    Source: Hong 2013, On computing the distribution function for the Poisson binomial distribution, section 2.3.
    """
    below = np.zeros(count + 1)  # below[k]: exactly k so far, k < count; the last: so many or more
    below[0] = 1.0
    groups: dict[Hashable, list[float]] = {}
    for key, chance in zip(range(len(chances)) if alike is None else alike, chances, strict=True):
        groups.setdefault(key, []).append(chance)
    for group in groups.values() if count else ():
        moved = below[:-1] * max(group)
        below[:-1] -= moved
        kept = max(0, count - len(group))
        below[count - kept : count] += moved[:kept]
        below[count] += moved[kept:].sum()  # never 1 minus the others, which can't tell 0 from 1e-17
    return min(1.0, float(below[count]))


def probability_words(chance: float) -> str:
    """Two digits; below what float64 can distinguish from 0, that bound."""
    return f"{chance:.2g}" if chance >= 1e-300 else "less than 1e-300"


def largest_error(positions: Sequence[Position]) -> float:
    """In units of the noise: beyond one unit of the logits or, where that is smaller, the whole error, up to LIMIT.

    So it is below the root mean square only if that is beyond LIMIT, and beyond LIMIT only if a position is wrong.
    """
    sizes = [max(abs(position.error_ratio or 0.0), min(position.error_size or 0.0, LIMIT)) for position in positions]
    return max(sizes, default=0.0)


def size_of(positions: Sequence[Position]) -> float:
    """Root mean square of the reported errors, in units of the noise; 0.0 without any."""
    return root_mean_square([position.error_size for position in positions if position.error_size is not None])


def root_mean_square(ratios: Sequence[float]) -> float:
    return math.sqrt(math.fsum(ratio * ratio for ratio in ratios) / len(ratios)) if ratios else 0.0
