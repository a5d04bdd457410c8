"""Format or bug? The size of an error does not decide; what it depends on does.

A number format errs alike everywhere. A bug depends on something: the position, other requests in a batch, a cached
prefix, prefill or decode, a border of blocks. So the judged positions are grouped by the levels of some tags (tags.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lfm2np.oracle.causes.tags import TAGS, Tag
from lfm2np.oracle.judging.verdict import LIMIT, Position, Verdict, largest_error, size_of

FINE = 3.0  # root mean square, in units of the noise: right engines stay below 2 in any group of some size
OFF = 5.0
LEAST = 4  # positions that a group needs to be called fine
SHOWN = ("case", "row", "prompt length", "company", "prefix", "phase", "abort")  # tags of many positions


@dataclass(frozen=True)
class Group:
    """The positions at one level of one tag; the names are those of JSON fields."""

    count: int
    told: int  # of them with a reported log-probability
    rms: float  # of the errors, in units of the noise
    worst: float
    flips: int
    bugs: int

    @property
    def is_fine(self) -> bool:
        return self.count >= LEAST and not self.bugs and self.rms <= FINE and self.worst <= LIMIT

    @property
    def is_off(self) -> bool:
        return self.bugs > 0 or self.rms > OFF or self.worst > LIMIT


def grouped(positions: Iterable[Position], name: str) -> dict[str, Group]:
    """By the levels of one of TAGS; of a number by the ranges between its edges, the lowest first."""
    tag = TAGS[name]
    words_of = ranges(tag)
    levels: dict[str, list[Position]] = {words: [] for words in words_of}
    for position in positions:
        level = tag.level(position, position.request.prompt_token_ids)
        words = words_of[bisect_right(tag.edges, int(level))] if tag.edges else str(level)
        levels.setdefault(words, []).append(position)
    return {words: group_of(some) for words, some in levels.items() if some}


def ranges(tag: Tag) -> list[str]:
    """ "0", "1", "2-3", "4+"."""
    if not tag.edges:
        return []
    words = [str(low) if high == low + 1 else f"{low}-{high - 1}" for low, high in pairwise((0, *tag.edges))]
    return [*words, f"{tag.edges[-1]}+"]


def group_of(positions: Sequence[Position]) -> Group:
    return Group(
        count=len(positions),
        told=sum(position.error_size is not None for position in positions),
        rms=size_of(positions),
        worst=largest_error(positions),
        flips=sum(position.is_flip for position in positions),
        bugs=sum(position.verdict is Verdict.BUG for position in positions),
    )
