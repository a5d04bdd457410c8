"""What separates wrong positions from right ones: some levels of up to three factors.

A region is a cut of one factor or the intersection of cuts of two or three: "decode", "prefill, alone or first of a
batch". Of all regions the one is taken that says most of whether a position is wrong (mutual information, each request
with the same weight); of nearly equal ones the one with the fewest factors. If the region is wrong, one bug needs all
of its cuts; if it is right, each cut excludes something that is wrong by itself.

There are many regions, so one may separate by chance: it counts only if requests inside and outside would hardly ever
differ so much by accident (Fisher's exact test), and if the right side has at least half of the right positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.causes.scales import MIXED, POSITIONS, SCALES, Choice, Mask, either, joined, levels_cut, numbers_cut
from lfm2np.oracle.factors import group_of
from lfm2np.oracle.judging.verdict import Position

MOST_CHANCE = 1e-6  # of a region that separates by accident; some ten thousand are tried,
MOST_CHANCE_OF_ONE = 1e-4  # and a hundred or two of a single cut
LEAST_SHARE = 0.5  # of the right positions on the right side
NEARLY = 0.9  # of the best gain: a region of fewer factors is as good
ALIKE = 0.98  # with the same number of factors: the one whose factors come first
LONELY = "token"  # this factor and later ones are not combined: with so many levels they would fit anything
LUCKY = 0.1  # the weight of a right position after a wrong one
MOST_FIRST = 2  # rows in which attention and rotation can hardly be wrong
MOST_CUTS = 3
MOST_PARTS = 3
WHOLE = 1.25  # how much better it is if nothing is wrong on the right side
MOST_TRIED = 100  # regions, before none is named
BEAM = 40  # pairs of cuts to which a third is tried
Place = tuple[str, int]  # a position: its ask's id, and its row
Scored = tuple[tuple[int, ...], float]  # cuts by their numbers, and their gain


@dataclass(frozen=True)
class Part:
    """Something that is wrong by itself, and what that points to."""

    words: str
    where: str
    suspect: str
    size: float  # requests' worth of wrong positions


@dataclass(frozen=True)
class Description:
    """What is right, and what is wrong by itself, the largest first.

    right      levels that all have to be met; empty: all that is not in the part
    inside     the positions there, without those that are wrong
    explained  the share of the entropy of right and wrong positions that this removes
    chance     of such a difference between requests inside and outside by accident
    """

    right: tuple[Choice, ...]
    inside: frozenset[Place]
    of: int  # positions
    parts: tuple[Part, ...]
    explained: float
    chance: float
    wrong_outside: int  # wrong requests of which something in the right region is wrong
    purity: float  # of the requests with something outside the right region, the share that is wrong there

    @property
    def right_where(self) -> str:
        """What follows "right" in a line."""
        return ", ".join(choice.where for choice in self.right) or "elsewhere"

    def as_json(self) -> dict[str, Any]:
        return {
            "right": [choice.words for choice in self.right],
            "positions": len(self.inside),
            "of": self.of,
            "wrong": [{"words": part.words, "suspect": part.suspect} for part in self.parts],
            "explained": self.explained,
            "chance": self.chance,
        }


class Positions:
    """Positions prepared for the search: which are wrong, their weights, and all cuts of all factors."""

    def __init__(self, positions: Sequence[Position]) -> None:
        self.positions = positions = sorted(positions, key=lambda position: position.row)
        self.wrong: Mask = np.array([position.is_wrong for position in positions], bool)
        numbers = {
            name: index
            for index, name in enumerate(dict.fromkeys(position.request.request_id for position in positions))
        }
        self.request = np.array([numbers[position.request.request_id] for position in positions], np.int64)
        self.weights = weights_of(positions, self.request)
        tokens = tokens_of(positions)
        self.prefix = prefixes(positions, tokens)
        last = {position.request.request_id: index for index, position in enumerate(positions)}
        self.prefix[list(last.values())] = -1 - np.arange(len(last))  # a whole request is like no other
        self.choices: list[Choice] = []
        masks: set[bytes] = set()
        for name, scale in SCALES.items():
            levels = [scale.level(position, tokens[position.request.request_id]) for position in positions]
            for choice in numbers_cut(name, levels, self.wrong) if scale.edges else levels_cut(name, levels):
                content = np.packbits(choice.mask).tobytes()
                if choice.mask.any() and not choice.mask.all() and content not in masks:
                    masks.add(content)
                    self.choices.append(choice)

    def at(self, mask: Mask) -> list[Position]:
        return [self.positions[index] for index in np.flatnonzero(mask).tolist()]

    def wrong_requests(self, mask: Mask) -> tuple[int, int]:
        """Of the requests with positions there, how many are wrong there, and how many there are.

        Requests of which only a beginning is there count once if it is the same: a BOS that is right before everything
        goes wrong is one computation, however many begin with it.
        """
        last = np.full(int(self.request.max(initial=-1)) + 1, -1)
        last[self.request[mask]] = np.flatnonzero(mask)  # positions of a request are in the order of their rows
        is_wrong = np.zeros(len(last), bool)
        is_wrong[self.request[mask & self.wrong]] = True
        return len(np.unique(self.prefix[last[is_wrong]])), len(np.unique(self.prefix[last[last >= 0]]))


def weights_of(positions: Sequence[Position], request: NDArray[np.int64]) -> NDArray[np.float64]:
    """Per request 1, and little for a right position after a wrong one of its request: it is right by luck, as state,
    keys and values continue from what is wrong.
    """
    if not positions:
        return np.zeros(0)
    first: dict[str, int] = {}
    for position in positions:
        if position.is_wrong:
            first[position.request.request_id] = min(position.row, first.get(position.request.request_id, position.row))
    lucky = [not at.is_wrong and at.row > first.get(at.request.request_id, at.row) for at in positions]
    weights = np.where(lucky, LUCKY, 1.0)
    return np.asarray(weights / np.bincount(request, weights)[request])


def tokens_of(positions: Sequence[Position]) -> dict[str, list[int]]:
    """By ask, the tokens of its sequence as far as they are known."""
    tokens_by_request: dict[str, list[int]] = {}
    for position in positions:
        tokens = tokens_by_request.setdefault(position.request.request_id, list(position.request.prompt_token_ids))
        if position.row + 1 == len(tokens):
            tokens.append(position.token_id)
    return tokens_by_request


def prefixes(positions: Sequence[Position], tokens: Mapping[str, Sequence[int]]) -> NDArray[np.int64]:
    """[positions] a number for the tokens up to each: the same where those are the same."""
    numbers: dict[tuple[int, int], int] = {}  # of a shorter prefix, and its next token
    by_request: dict[str, list[int]] = {}
    for name, ids in tokens.items():
        number, by_request[name] = 0, []
        for token in ids:
            number = numbers.setdefault((number, token), len(numbers) + 1)
            by_request[name].append(number)
    return np.array([by_request[position.request.request_id][position.row] for position in positions], np.int64)


# --- the search


@dataclass(frozen=True, eq=False)
class Region:
    """An intersection of cuts, and its information gain in nats per request."""

    choices: tuple[Choice, ...]
    gain: float

    @property
    def mask(self) -> Mask:
        return np.asarray(np.logical_and.reduce([choice.mask for choice in self.choices]))


def entropy(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of a coin, nats."""
    kept = np.clip(share, 1e-12, 1.0 - 1e-12)
    return np.asarray(-kept * np.log(kept) - (1.0 - kept) * np.log1p(-kept))


def gains(
    inside: NDArray[np.float64], wrong: NDArray[np.float64], all_of: float, all_wrong: float
) -> NDArray[np.float64]:
    """Information gains of regions, from the weight of their positions and of their wrong ones; WHOLE times that where
    nothing is wrong on the right side; -1 where that side is a sliver.
    """
    outside = np.maximum(all_of - inside, 0.0)
    within = wrong / np.maximum(inside, 1e-12)
    without = (all_wrong - wrong) / np.maximum(outside, 1e-12)
    known = (inside * entropy(within) + outside * entropy(without)) / all_of
    right = np.where(within < without, inside - wrong, outside - (all_wrong - wrong))
    is_sliver = right < LEAST_SHARE * (all_of - all_wrong) - 1e-9
    is_whole = np.where(within < without, wrong, all_wrong - wrong) < 1e-9
    gain = (entropy(np.array(all_wrong / all_of)) - known) * np.where(is_whole, WHOLE, 1.0)
    return np.where(is_sliver, -1.0, gain.round(9))  # so that no BLAS decides between equals


def regions(judged: Positions, most_cuts: int) -> list[Region]:
    """The most informative of one cut, of two and of three; see `preferred`."""
    choices = judged.choices
    if not choices or not judged.wrong.any() or judged.wrong.all():
        return []
    masks = np.array([choice.mask for choice in choices], np.float64)  # [C, positions]
    weights, wrong = judged.weights, judged.weights * judged.wrong
    totals = float(weights.sum()), float(wrong.sum())
    order = {name: index for index, name in enumerate(SCALES)}
    factor = np.array([order[choice.factor] for choice in choices])
    single = gains(masks @ weights, masks @ wrong, *totals)
    pairs = gains((masks * weights) @ masks.T, (masks * wrong) @ masks.T, *totals)
    pairs[(factor[:, None] >= factor[None]) | (factor >= order[LONELY])[:, None] | (factor >= order[LONELY])] = -1.0
    best = np.argsort(-pairs, axis=None, kind="stable")[: BEAM * 4]
    some = [(int(index) // len(choices), int(index) % len(choices)) for index in best]
    triples: list[Scored] = []
    for pair in some[:BEAM]:
        both = masks[pair[0]] * masks[pair[1]]
        third = gains(masks @ (weights * both), masks @ (wrong * both), *totals)
        third[np.isin(factor, [*factor[list(pair)], *range(order[LONELY], len(SCALES))])] = -1.0
        triples += [((*pair, index), float(third[index])) for index in np.argsort(-third, kind="stable")[:4].tolist()]
    sets: list[list[Scored]] = [
        [((index,), gain) for index, gain in enumerate(single.tolist())],
        [(pair, float(pairs[pair])) for pair in some],
        triples,
    ]
    return [
        Region(tuple(choices[index] for index in sorted(chosen, key=lambda index: factor[index])), gain)
        for chosen, gain in preferred(sets[:most_cuts], factor)
    ]


def preferred(sets: Sequence[Sequence[Scored]], factor: NDArray[np.int64]) -> list[Scored]:
    """The best of each number of cuts, the preferred one first, then the others in order."""
    best = []
    for of_size in sets:
        top = max((gain for _, gain in of_size), default=0.0)
        if top > 0.0:
            alike = [
                (sorted(factor[list(cuts)].tolist()), -gain, cuts) for cuts, gain in of_size if gain >= ALIKE * top
            ]
            _, gain, cuts = min(alike)
            best.append((cuts, -gain))
    most = max((gain for _, gain in best), default=0.0)
    first = sorted(best, key=lambda scored: (scored[1] < NEARLY * most, len(scored[0])))
    rest = sorted((-gain, cuts) for of_size in sets for cuts, gain in of_size if gain > 0.0)
    return [*first, *((cuts, -gain) for gain, cuts in rest[:MOST_TRIED])]


def described(positions: Sequence[Position]) -> Description | None:
    """None if nothing is wrong, or nothing separates wrong from right by more than chance."""
    whole = with_rest(positions)
    wrong = {position.place for position in positions if position.is_wrong}
    return None if whole is None else replace(whole, inside=whole.inside - wrong)


def with_rest(positions: Sequence[Position], most_cuts: int = MOST_CUTS) -> Description | None:
    """Wrong positions in the right region are described by themselves: a bug may be too rare to be seen beside another.
    By one cut less: what takes three may be a later effect of the first bug.
    """
    judged = Positions(positions)
    first = next(filter(None, (description(judged, region) for region in regions(judged, most_cuts))), None)
    if first is None or not first.wrong_outside or len(first.parts) >= MOST_PARTS:
        return first
    rest = with_rest([position for position in positions if position.place in first.inside], MOST_CUTS - 1)
    if rest is None:
        return first
    right = (*first.right, *rest.right) if first.right else ()
    return replace(first, right=right, inside=rest.inside, parts=(*first.parts, *rest.parts))


def description(judged: Positions, region: Region) -> Description | None:
    """None for a region that may separate by chance."""
    mask = region.mask
    within, without = judged.wrong_requests(mask), judged.wrong_requests(~mask)
    is_right = within[0] * without[1] < without[0] * within[1]  # the region; else what it leaves out
    right, inside, outside = (mask, within, without) if is_right else (~mask, without, within)
    chance = so_unlike(*outside, *inside)
    if chance > (MOST_CHANCE_OF_ONE if len(region.choices) == 1 else MOST_CHANCE):
        return None
    parts = wrong_parts(judged, region.choices) if is_right else [whole_part(judged, region.choices)]
    # What a single cut excludes is a choice; several exclude all else.
    rest = tuple(joined(choice.rest, (choice,)) for choice in region.choices) if len(region.choices) == 1 else ()
    return Description(
        right=region.choices if is_right else rest,
        inside=frozenset(position.place for position in judged.at(right)),
        of=len(judged.positions),
        parts=tuple(sorted(parts, key=lambda part: -part.size)),
        explained=explained(judged, mask),
        chance=chance,
        wrong_outside=inside[0],
        purity=outside[0] / outside[1],
    )


def explained(judged: Positions, mask: Mask) -> float:
    """The share of the entropy of right and wrong that is removed by knowing whether a position is inside."""
    wrong = judged.weights * judged.wrong

    def left(some: Mask) -> float:
        weight = float(judged.weights[some].sum())
        return weight * float(entropy(np.array(wrong[some].sum() / weight))) if weight else 0.0

    return 1.0 - (left(mask) + left(~mask)) / left(np.ones(len(mask), bool))


def so_unlike(wrong: int, of: int, others_wrong: int, others: int) -> float:
    """The chance that at least so many of all wrong requests are among these (Fisher's exact test, one-sided).

    A request's positions inside count once, and so do those outside: they are wrong together.
    """
    most = wrong + others_wrong
    ways = sum(math.comb(of, count) * math.comb(others, most - count) for count in range(wrong, min(of, most) + 1))
    return ways / math.comb(of + others, most)


def whole_part(judged: Positions, choices: Sequence[Choice]) -> Part:
    """A region that is wrong: one bug, which needs all of it. The suspect is the most informative cut's."""
    mask = np.logical_and.reduce([choice.mask for choice in choices])
    weights, wrong = judged.weights, judged.weights * judged.wrong
    totals = float(weights.sum()), float(wrong.sum())

    def gain(choice: Choice) -> float:
        return float(gains(choice.mask @ weights, choice.mask @ wrong, *totals))

    telling = max(choices, key=gain)
    words = ", ".join(choice.words for choice in choices)
    where = ", ".join(choice.where for choice in choices)
    return Part(words, where, suspect_of(choices, telling), float(wrong[mask].sum()))


def suspect_of(choices: Sequence[Choice], telling: Choice) -> str:
    """Of some cuts together; usually the most informative one's."""
    first = [choice for choice in choices if choice.factor == "row" and choice.is_above and choice.edge <= MOST_FIRST]
    if first and len(choices) == 1:
        return POSITIONS
    if first and all(choice.factor in ("row", "length", "phase") for choice in choices):
        return MIXED
    return telling.suspect


def wrong_parts(judged: Positions, region: Sequence[Choice]) -> list[Part]:
    """Each level that a right region excludes and that is off where all else is as in the region; of one factor, those
    under the same circumstances together.
    """
    parts = []
    for choice in region:
        others = np.logical_and.reduce(
            [other.mask for other in region if other is not choice] or [np.ones(len(judged.wrong), bool)]
        )
        alike: dict[tuple[str, str], list[Choice]] = {}
        for level in choice.rest:
            mask = others & level.mask
            if group_of(judged.at(mask)).is_off:
                suspect = suspect_of([level], level) if len(choice.rest) == 1 else level.suspect
                alike.setdefault((suspect, narrowing(judged, mask)), []).append(level)
        for (suspect, more), levels in alike.items():
            mask = others & np.logical_or.reduce([level.mask for level in levels])
            words = either(levels) + (more and f", {more}")
            where = SCALES[choice.factor].preposition + words
            parts.append(Part(words, where, suspect, float(judged.weights[mask & judged.wrong].sum())))
    return parts


def narrowing(judged: Positions, part: Mask) -> str:
    """The level of one more factor that is needed, too; empty if most of the part is wrong."""
    sizes = [
        (int((part & choice.mask).sum()), choice)
        for choice in judged.choices
        if (part & choice.mask).any() and not (part & choice.mask & judged.wrong).any()
    ]
    fine = [(size, choice) for size, choice in sizes if group_of(judged.at(part & choice.mask)).is_fine]
    size, best = max(fine, key=lambda pair: pair[0], default=(0, None))
    if best is None or 2 * size < int(part.sum()):
        return ""
    return either([choice for choice in best.rest if (choice.mask & part).any()])
