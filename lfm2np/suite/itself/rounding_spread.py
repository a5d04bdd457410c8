"""What rounding alone does to an engine's answers, measured on the engine; and which differences are beyond it.

The order of sums changes with the batch, so a right engine's log-probabilities move a little. How much is measured
from pairs that nothing but the batch sets apart. A state that leaks moves few answers by much or one relation's by more
than all others; so the measure is a quartile over groups of positions, which a broken minority can't raise, and it is
bounded by what the declared format can explain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lfm2np.oracle.judging.formats import FORMATS
from lfm2np.oracle.judging.verdict import so_many_or_more
from lfm2np.suite.itself.pairs import Compared

LEAST_GROUPS = 6  # with any difference, for a measure
LEAST_ROUNDINGS = 8  # of a logit of size 1: the smallest spread
TOGETHER = 100  # log-probabilities, at least, that are judged by RATIO
RATIO = 8.0  # times the spread: root mean square of all positions but OUTLIERS
OUTLIERS = 0.1  # share of the positions, those that moved most
LIMIT = 30.0  # times the spread: one position, in formats of few bits
# By significant bits, at least: the largest spread that a format explains, nats, more than ten times that of any right
# engine in docs/engine/17-itself.md; and times the spread that one position may be off. Some positions amplify every
# rounding, in float32 up to 200 times the spread (llama.cpp, a random Gemma 3), while a state that is wrong is wrong by
# 1e-3 and more. In bfloat16 what is amplified saturates, and near ties of experts move a position by up to 0.65 nat.
LIMITS = ((20, 2e-4, 300.0), (11, 5e-2, 60.0), (8, 4e-1, LIMIT), (0, 1.0, LIMIT))
SEED_ERROR = 1e-6  # probability that a right engine is called broken for how often it gives other tokens
DOUBT = 1e-2  # probability that it is not judged for that


class Outcome(StrEnum):
    EQUAL = "equal bits"
    WITHIN = "within spread"
    TOKENS = "same tokens"  # no log-probability was reported
    BROKEN = "BROKEN"
    ONCE = "seen once"  # beyond the spread, but not with other tokens: near ties of experts do that
    UNKNOWN = "not judged"
    NOT_ASKED = "not asked"


@dataclass(frozen=True)
class Spread:
    """Root mean square of one logit's difference between two runs that only the batch sets apart.

    nats         what relations are judged by
    is_measured  else no batch changed enough: `nats` is then such that the format's bound decides
    times        the spread: what one position may be off
    moved        what was measured, before any bound: by the batch, and by another order of sums for another reason
    """

    nats: float
    is_measured: bool
    times: float = LIMIT
    moved: tuple[float | None, float | None] = (None, None)

    @property
    def limit(self) -> float:
        return self.times * self.nats


@dataclass(frozen=True)
class Score:
    """Of one relation. KL as SGLang's tests of hybrid models estimate it: mean of exp(d) - 1 - d, d the difference of a
    token's log-probability."""

    positions: int = 0
    equal: int = 0  # that report log-probabilities, of the same bits
    flips: int = 0
    largest: float | None = None  # nats; None: no log-probability was reported
    kl: float | None = None
    noise: float | None = None  # what is judged, the largest: nats of one logit
    noise_rms: float | None = None  # without outliers


def limits_of(format_name: str) -> tuple[float, float, float]:
    """Of a format of FORMATS, nats: the largest spread that it explains, the smallest that is assumed; and times the
    spread, of one position."""
    bits = FORMATS[format_name].bits
    most, limit = next((most, limit) for least, most, limit in LIMITS if bits >= least)
    return most, LEAST_ROUNDINGS * 2.0**-bits, limit


def least_limit(format_name: str) -> float:
    """Nats by which a position may be off in a format at least, whatever the spread."""
    _, least, limit = limits_of(format_name)
    return limit * least


def rms(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values) / len(values)) if values else 0.0


def usual(noise: Sequence[float]) -> float:
    """Root mean square without the outliers, of which there is at least one."""
    return rms(sorted(noise)[: int((1.0 - OUTLIERS) * len(noise))])


def quartile(groups: Sequence[Sequence[float]]) -> float | None:
    """The lower quartile of the groups' root mean squares, among those with any difference; None for too few of them.

    Where most groups have equal bits, as in a small bfloat16 network, the few that moved did so by anything from a bit
    of the last logarithm to a unit of the format: their quartile measures nothing.
    """
    sizes = [rms(group) for group in groups]
    moved = sorted(size for size in sizes if size > 0.0)
    is_enough = len(moved) >= max(LEAST_GROUPS, len(sizes) / 2)
    return moved[len(moved) // 4] if is_enough else None


def spread_of(batch: Sequence[Sequence[float]], others: Sequence[Sequence[float]], format_name: str) -> Spread:
    """From groups of `noise`, one for each pair of answers.

    batch   of pairs that nothing but the batch sets apart
    others  of pairs in which sums are taken in another order for another reason: prefill against decode. A batch that
            moves answers by RATIO times as much does more than to round, as does one beyond the format.

    It is at least LEAST_ROUNDINGS roundings of a logit of size 1: in a small network a quartile may be of pairs in
    which hardly anything was rounded otherwise.
    """
    most, least, limit = limits_of(format_name)
    measured, other = quartile(batch), quartile(others)
    if measured is None and other is None:
        return Spread(max(most / limit, least), False, limit)
    bounds = [most]
    if measured is not None and len(others) >= LEAST_GROUPS:
        bounds.append(RATIO * max(least, other or 0.0))
    nats = measured if measured is not None else other
    return Spread(min(max(nats or 0.0, least), *bounds), True, limit, (measured, other))


def beyond(spread: Spread, positions: Sequence[Compared], is_bitwise: bool = False) -> tuple[str, int] | None:
    """Why the spread does not explain all positions, and the index of the one that shows it; None if it does."""
    unequal = [index for index, each in enumerate(positions) if not each.is_equal]
    if not unequal:
        return None
    if is_bitwise:
        return f"{len(unequal)} of {len(positions)} positions have other bits", unequal[0]
    worst = max(unequal, key=lambda index: max(positions[index].noise, default=0.0))
    size = max(positions[worst].noise, default=0.0)
    if size > spread.limit:
        least = "at least " if positions[worst].is_open else ""
        return f"{words_of(positions[worst])}: {least}{times(size, spread)}", worst
    flips = [index for index in unequal if positions[index].is_open]
    if (what := too_many_flips(len(flips), len(positions), spread)) is not None:
        return f"{words_of(positions[flips[0]])}: {what}", flips[0]
    noise = [value for each in positions for value in each.noise]
    size = usual(noise)
    if spread.is_measured and len(noise) >= TOGETHER and size > RATIO * spread.nats:
        return f"all positions together: {times(size, spread)}", worst
    return None


def words_of(position: Compared) -> str:
    first, second = position.tokens
    if position.is_flip:
        return f"output token {position.position} is {second} instead of {first}"
    return f"a log-probability at output token {position.position} ({first})"


def too_many_flips(flips: int, positions: int, spread: Spread, error: float = SEED_ERROR) -> str | None:
    """Of tokens drawn with the same seed: noise moves a probability by at most as much as a logit, so it changes a
    token at most so often. Of the likeliest ones, too, where the two best are seldom closer than by that."""
    chances = [min(1.0, 2.0 * spread.nats)] * positions
    if not flips or so_many_or_more(flips, chances) >= error:
        return None
    return f"{flips} of {positions} positions have other tokens, expected {math.fsum(chances):.2g}"


def times(size: float, spread: Spread) -> str:
    """A difference in words."""
    if spread.is_measured:
        return f"{size:.2g} nat of a logit, {size / spread.nats:.3g} times the spread of this engine"
    return f"{size:.2g} nat of a logit, where hardly any batch moves a bit and the format explains {spread.limit:.2g}"


def outcome(positions: Sequence[Compared], spread: Spread, is_drawn: bool = False) -> Outcome:
    """Of positions that the spread explains, or of which it can't be said."""
    flips = sum(each.is_open for each in positions)
    is_doubtful = not is_drawn and too_many_flips(flips, len(positions), spread, DOUBT) is not None
    is_unknown = any(each.is_flip and each.difference is None and not each.is_open for each in positions)
    if not positions or is_doubtful or is_unknown:
        return Outcome.UNKNOWN
    if all(each.is_equal for each in positions):
        return Outcome.EQUAL if any(each.noise for each in positions) else Outcome.TOKENS
    return Outcome.WITHIN


def score_of(pairs: Sequence[Sequence[Compared]]) -> Score:
    """pairs  positions of each request"""
    positions = [each for pair in pairs for each in pair]
    by_request = [
        [each.difference for each in pair if each.difference is not None and not each.is_flip] for pair in pairs
    ]
    sizes = [abs(difference) for request in by_request for difference in request]
    kls = [
        math.fsum(math.exp(min(d, 50.0)) - 1.0 - d for d in request) / len(request) for request in by_request if request
    ]
    noise = [value for each in positions for value in each.noise]
    return Score(
        len(positions),
        sum(each.is_equal and bool(each.noise) for each in positions),
        sum(each.is_flip for each in positions),
        max(sizes, default=None),
        math.fsum(kls) / len(kls) if kls else None,
        max(noise, default=None),
        usual(noise) if noise else None,
    )
