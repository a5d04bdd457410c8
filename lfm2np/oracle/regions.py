"""Several bugs in one engine: where is it right, and what is wrong by itself?

A region is some levels of up to three factors: "prefill, alone or first of a batch". The largest one in which all is
right is named, and of what it leaves out each level that is off though all else stays as in the right region. With one
bug that is what the bug depends on; with two it is both, unless one hides the other.

Regions are many, so one may be right by chance: a region counts only if the requests in it would hardly ever all be
right, did it not matter what is inside and what outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from lfm2np.oracle.factors import Group, abort_of, group_of, phase_of, place_of
from lfm2np.oracle.judging.verdict import WRONG, Position

MOST_FACTORS = 3
MOST_CHANCE = 1e-6  # that a region is right by accident; some thousand are tried
NEARLY = 0.8  # of the largest region: one of fewer factors is as good
EDGES = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512)  # rows and tokens are told as below one of these, or from it on
Place = tuple[str, int]  # a position: its ask's id, and its row


@dataclass(frozen=True)
class Scale:
    """The levels of a factor, the simplest first. It may be cut at any place, and a region has what is on one side.

    words, suspects  of each level, by its name; of a factor that is a number, of what is below an edge and from it on
    edges            where a number may be cut
    """

    level: Callable[[Position], str | int]
    words: Mapping[str, str]
    suspects: Mapping[str, str]
    edges: Sequence[int] = ()


LEAK = "requests of a batch get at each other's rows, blocks or slots"
FREED = "memory of a cancelled request that is freed too early"
START = "the start of a sequence: zeros before the first token, prompts below L"
SCALES: dict[str, Scale] = {
    "phase": Scale(
        phase_of,
        {"prefill": "prefill", "decode": "decode"},
        {"prefill": "only prompts are wrong", "decode": "what prefill leaves behind is not what decode expects"},
    ),
    "place": Scale(
        place_of,
        {"alone": "alone", "first": "first of a batch", "later": "later in a batch"},
        {"alone": "what a batch has and a request alone has not", "first": LEAK, "later": LEAK},
    ),
    "beginning": Scale(
        lambda one: int(one.ask.factors.get("seen", 0)),
        {"below": "prompts whose first {} tokens are new", "from": "prompts whose first {} tokens were asked before"},
        {
            "below": "what is not found in a cache",
            "from": "a prefix hit without the state that belongs to it, or blocks that changed",
        },
        EDGES[3:],
    ),
    "abort": Scale(
        abort_of,
        {"none": "no request cancelled", "beside": "beside cancelled requests", "after": "after cancelled requests"},
        {"none": "what no cancelled request has", "beside": FREED, "after": FREED},
    ),
    "length": Scale(
        lambda one: len(one.ask.prompt_token_ids),
        {"below": "prompts of fewer than {} tokens", "from": "prompts of {} tokens or more"},
        {"below": START, "from": "tokens of a prompt, its blocks or its chunks get at each other"},
        EDGES[1:],
    ),
    "row": Scale(
        lambda one: one.row,
        {"below": "before position {}", "from": "from position {} on"},
        {"below": START, "from": "state, positions, or the border of a block or chunk"},
        EDGES,
    ),
}


@dataclass(frozen=True, eq=False)
class Choice:
    """Levels of one factor, in words. `cells` has a bit for each cell that is at one of them."""

    factor: str
    words: str
    suspect: str
    cells: int
    edge: int = 0  # of a number: where it is cut
    is_above: bool = False  # and that it is what lies above
    rest: tuple[Choice, ...] = ()  # the factor's other levels, each by itself


@dataclass(frozen=True)
class Part:
    """What is wrong by itself, and what that points to."""

    words: str
    suspect: str
    is_narrowed: bool  # a level of one more factor belongs to it


@dataclass(frozen=True)
class Description:
    """The largest right region, and what is wrong by itself."""

    right: tuple[Choice, ...]
    inside: frozenset[Place]
    of: int  # positions
    parts: tuple[Part, ...]

    @property
    def is_of_one_factor(self) -> bool:
        """No combination is needed to say what is wrong."""
        return len(self.right) == 1 and not any(part.is_narrowed for part in self.parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "right": [one.words for one in self.right],
            "positions": len(self.inside),
            "of": self.of,
            "wrong": [{"words": part.words, "suspect": part.suspect} for part in self.parts],
        }

    def lines(self) -> list[str]:
        right = f"right: {', '.join(one.words for one in self.right)} ({len(self.inside)} of {self.of} positions)"
        return [right, *(f"wrong by itself: {part.words}: {part.suspect}" for part in self.parts)]


class Cells:
    """The positions by their levels of all factors. A region has a cell or has it not: it is a number of bits."""

    def __init__(self, positions: Sequence[Position]) -> None:
        members: dict[tuple[str | int, ...], list[Position]] = {}
        for one in positions:
            members.setdefault(tuple(level_of(factor, one) for factor in SCALES.values()), []).append(one)
        self.levels, self.members = list(members), list(members.values())
        self.counts = [len(cell) for cell in self.members]
        number = {name: index for index, name in enumerate(dict.fromkeys(one.ask.id for one in positions))}
        self.requests = [bits({number[one.ask.id] for one in cell}) for cell in self.members]
        self.wrong_requests = [
            bits({number[one.ask.id] for one in cell if one.verdict in WRONG}) for cell in self.members
        ]
        self.wrong = bits(index for index, requests in enumerate(self.wrong_requests) if requests)
        self.all = (1 << len(self.members)) - 1
        self.choices = {name: self.choices_of(name) for name in SCALES}

    def at(self, factor: str, wanted: Callable[[Any], bool]) -> int:
        """The cells whose level of this factor is wanted."""
        index = list(SCALES).index(factor)
        return bits(cell for cell, levels in enumerate(self.levels) if wanted(levels[index]))

    def choices_of(self, name: str) -> list[Choice]:
        """Both sides of each cut, where something is on both."""
        scale = SCALES[name]
        found = []
        for edge in scale.edges:
            sides = {"below": self.at(name, edge.__gt__), "from": self.at(name, edge.__le__)}
            below, above = (
                Choice(name, scale.words[side].format(edge), scale.suspects[side], cells, edge, side == "from")
                for side, cells in sides.items()
            )
            found += [replace(below, rest=(above,)), replace(above, rest=(below,))]
        if not scale.edges:
            levels = [(level, self.at(name, level.__eq__)) for level in scale.words]
            there = [Choice(name, scale.words[level], scale.suspects[level], cells) for level, cells in levels if cells]
            for cut in range(1, len(there)):
                found += [joined(there[:cut], there[cut:]), joined(there[cut:], there[:cut])]
        return [one for one in found if one.cells and one.cells != self.all]

    def count(self, cells: int, numbers: Sequence[int]) -> int:
        return sum(numbers[index] for index in indices(cells))

    def positions(self, cells: int) -> list[Position]:
        return [one for index in indices(cells) for one in self.members[index]]

    def group(self, cells: int) -> Group:
        return group_of(self.positions(cells))

    def is_right(self, cells: int) -> bool:
        """All of it, and not by chance."""
        return self.chance(cells) < MOST_CHANCE and self.group(cells).is_fine

    def chance(self, cells: int) -> float:
        """That all requests are right inside and so many wrong outside, if it did not matter (Fisher's exact test).

        What a request has inside counts once, and so does what it has outside: its positions are wrong together.
        """
        inside = self.requests_of(cells, self.requests)
        outside = self.requests_of(self.all & ~cells, self.requests)
        wrong = self.requests_of(self.all & ~cells, self.wrong_requests)
        return math.comb(outside, wrong) / math.comb(inside + outside, wrong)

    def requests_of(self, cells: int, masks: Sequence[int]) -> int:
        found = 0
        for index in indices(cells):
            found |= masks[index]
        return found.bit_count()


def level_of(scale: Scale, position: Position) -> str | int:
    """Of a number, the edge at or below it."""
    level = scale.level(position)
    return level if isinstance(level, str) else max((edge for edge in scale.edges if edge <= level), default=0)


def joined(some: Sequence[Choice], rest: Sequence[Choice]) -> Choice:
    words = " or ".join(one.words for one in some)
    cells = bits(index for one in some for index in indices(one.cells))
    return Choice(some[0].factor, words, "", cells, rest=tuple(rest))


def bits(places: Iterable[int]) -> int:
    number = 0
    for index in places:
        number |= 1 << index
    return number


def indices(cells: int) -> Iterator[int]:
    while cells:
        lowest = cells & -cells
        yield lowest.bit_length() - 1
        cells ^= lowest


def described(positions: Sequence[Position]) -> Description | None:
    """None if nothing is wrong, or no region is right."""
    cells = Cells(positions)
    region = right_region(cells) if cells.wrong else None
    if region is None:
        return None
    return Description(
        right=region,
        inside=frozenset((one.ask.id, one.row) for one in cells.positions(intersection(cells, region))),
        of=len(positions),
        parts=tuple(wrong_parts(cells, region)),
    )


def intersection(cells: Cells, region: Iterable[Choice]) -> int:
    found = cells.all
    for one in region:
        found &= one.cells
    return found


def right_region(cells: Cells) -> tuple[Choice, ...] | None:
    """The largest; of those nearly as large, the one of the fewest factors, the factors in their order."""
    best = [largest_right(cells, factors) for factors in range(1, MOST_FACTORS + 1)]
    most = max((count for count, _ in best), default=0)
    return next((region for count, region in best if region and count >= NEARLY * most), None)


def largest_right(cells: Cells, factors: int) -> tuple[int, tuple[Choice, ...]]:
    """The largest that has choices of so many factors, and its positions; 0 and none if none is right."""
    found: dict[int, tuple[Choice, ...]] = {}
    for some in combinations(SCALES, factors):
        for region in product(*(cells.choices[name] for name in some)):
            kept = intersection(cells, region)
            if kept and not kept & cells.wrong and not is_prefill_by_another_name(region):
                found.setdefault(kept, region)
    for kept in sorted(found, key=lambda one: -cells.count(one, cells.counts)):
        if cells.is_right(kept):
            return cells.count(kept, cells.counts), found[kept]
    return 0, ()


def is_prefill_by_another_name(region: Sequence[Choice]) -> bool:
    """The first N rows of prompts of N tokens or more: a cut of lengths that is not about lengths."""
    lengths = [one.edge for one in region if one.factor == "length" and one.is_above]
    rows = [one.edge for one in region if one.factor == "row" and not one.is_above]
    return any(row <= length for row, length in product(rows, lengths))


def wrong_parts(cells: Cells, region: Sequence[Choice]) -> list[Part]:
    """Each level that the region leaves out and that is off where all else is as in the region; of one factor, those
    that are so under the same circumstances together."""
    found = []
    for one in region:
        others = intersection(cells, [other for other in region if other is not one])
        alike: dict[tuple[str, str], list[str]] = {}
        for level in one.rest:
            if cells.group(others & level.cells).is_off:
                alike.setdefault((level.suspect, narrowing(cells, others & level.cells)), []).append(level.words)
        found += [
            Part(" or ".join(words) + (more and f", {more}"), suspect, bool(more))
            for (suspect, more), words in alike.items()
        ]
    return found


def narrowing(cells: Cells, part: int) -> str:
    """The level of one more factor that must come to it; none if the part is wrong by and large."""
    sizes = {
        one: cells.count(part & one.cells, cells.counts)
        for choices in cells.choices.values()
        for one in choices
        if not part & one.cells & cells.wrong and cells.group(part & one.cells).is_fine
    }
    best = max(sizes, key=sizes.__getitem__, default=None)
    if best is None or 2 * sizes[best] < cells.count(part, cells.counts):
        return ""
    return " or ".join(one.words for one in best.rest if one.cells & part)
