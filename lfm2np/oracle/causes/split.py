"""What separates wrong positions from right ones: one split by one tag.

A split cuts a number, or takes one level from the others. Of all splits the one is taken that says most of whether a
position is wrong (mutual information, each request with the same weight); of equal ones that of the first tag.
What is wrong on its right side is split again, as another bug: it is wrong by itself.

One of many splits may separate by chance, so it counts only if requests on both sides would hardly ever differ so much
by accident (`so_unlike`), and if the right side has at least half of the right positions. Where none counts, one under
which requests are wrong more often than others may still be named as that: `tendency_of`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.oracle.causes.tags import TAGS, Tag
from lfm2np.oracle.judging.verdict import Position, root_mean_square

MOST_CHANCE = 1e-4  # of a split that separates by accident: a hundred or two are tried
TENDENCY_CHANCE = 1e-2  # of what is only more often wrong, times its tag's splits: at edges chosen before
LEAST_SHARE = 0.5  # of the right positions on the right side
SENT, LESS = ("order", "case"), 0.9  # tags that say when it was sent and why, and what their gain counts for
WHOLE = 1.25  # how much better a split is if nothing is wrong on its right side
LUCKY = 0.1  # the weight of a right position after a wrong one
MOST_SPLITS = 3
STEADY, LEAST_AGAIN = 0.5, 8  # of errors of the same tokens: how much of them may differ; how many are to be compared
Mask = NDArray[np.bool_]  # [positions]


@dataclass(frozen=True, eq=False)
class Split:
    """What is wrong, in words; what that points to; what is right, in words; and which positions those are."""

    wrong: str
    suspect: str
    right: str
    is_right: Mask


@dataclass(frozen=True)
class Description:
    """What is wrong by itself, the most telling first.

    inside     the positions that no split calls wrong, without those that are
    explained  the share of the entropy of right and wrong positions that this removes
    chance     of such a difference between requests inside and outside by accident
    """

    splits: tuple[Split, ...]
    inside: frozenset[tuple[str, int]]
    explained: float
    chance: float
    wrong_inside: int  # wrong requests of which something inside is wrong
    purity: float  # of the requests with something outside, the share that is wrong there

    @property
    def right(self) -> str:
        """What follows "right" in a line."""
        return ", ".join(dict.fromkeys(split.right for split in self.splits))


class Positions:
    """Positions prepared for the search: which are wrong, and their weights."""

    def __init__(self, positions: Sequence[Position]) -> None:
        self.positions = sorted(positions, key=lambda position: position.row)
        self.wrong: Mask = np.array([position.is_wrong for position in self.positions], bool)
        self.everywhere: Mask = np.ones(len(self.positions), bool)
        self.requests = [position.request.request_id for position in self.positions]
        self.last = {name: index for index, name in enumerate(self.requests)}
        self.tokens: dict[str, list[int]] = {}  # of a request's sequence, as far as they are known
        for position, name in zip(self.positions, self.requests, strict=True):
            ids = self.tokens.setdefault(name, list(position.request.prompt_token_ids))
            if position.row + 1 == len(ids):
                ids.append(position.token_id)

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """Of a request 1 together; little for a right position after a wrong one of its request: it is right by luck,
        as state, keys and values continue from what is wrong.
        """
        weights, wrong, totals = np.ones(len(self.positions)), set[str](), dict[str, float]()
        for index, name in enumerate(self.requests):
            wrong |= {name} if self.wrong[index] else set()
            weights[index] = LUCKY if name in wrong and not self.wrong[index] else 1.0
            totals[name] = totals.get(name, 0.0) + weights[index]
        return np.asarray(weights / np.array([totals[name] for name in self.requests]))

    @cached_property
    def levels(self) -> dict[str, NDArray[Any]]:
        """By the names of TAGS, the level of each position."""
        pairs = [(each, self.tokens[name]) for each, name in zip(self.positions, self.requests, strict=True)]
        return {name: np.array([tag.level(*pair) for pair in pairs]) for name, tag in TAGS.items()}

    def wrong_requests(self, some: Mask) -> tuple[int, int]:
        """Of the requests with positions there, how many are wrong there, and how many there are.

        Requests of which only a beginning is there count once if it is the same: a BOS that is right before everything
        goes wrong is one computation, however many begin with it.
        """
        ends = {self.requests[index]: index for index in np.flatnonzero(some).tolist()}
        wrong = {self.requests[index] for index in np.flatnonzero(some & self.wrong).tolist()}
        beginnings = {
            name: name if index == self.last[name] else tuple(self.tokens[name][: self.positions[index].row + 1])
            for name, index in ends.items()
        }
        return len({beginnings[name] for name in wrong}), len(set(beginnings.values()))

    def uncertainty(self, some: Mask) -> float:
        """The entropy of right and wrong there, in nats, times the weight of these positions."""
        weight, wrong = float(self.weights[some].sum()), float(self.weights[some & self.wrong].sum())
        shares = [] if weight == 0.0 else [wrong / weight, 1.0 - wrong / weight]
        return -weight * math.fsum(share * math.log(share) for share in shares if share > 1e-12)

    def explained(self, side: Mask, of: Mask) -> float:
        """The share of the uncertainty of some positions that is removed by knowing which are on one side."""
        return 1.0 - (self.uncertainty(of & side) + self.uncertainty(of & ~side)) / self.uncertainty(of)

    def share_wrong(self, some: Mask) -> float:
        return float(self.weights[some & self.wrong].sum() / self.weights[some].sum())


# --- the search


def described(positions: Sequence[Position]) -> Description | None:
    """None if nothing is wrong, or nothing separates wrong from right by more than chance."""
    judged = Positions(positions)
    right, splits = judged.everywhere, list[Split]()
    while len(splits) < MOST_SPLITS and (split := best_split(judged, right)) is not None:
        splits.append(split)
        right = right & split.is_right
    if not splits:
        return None
    inside, outside = judged.wrong_requests(right), judged.wrong_requests(~right)
    return Description(
        splits=tuple(splits),
        inside=frozenset(judged.positions[index].place for index in np.flatnonzero(right & ~judged.wrong).tolist()),
        explained=judged.explained(right, judged.everywhere),
        chance=so_unlike(*outside, *inside),
        wrong_inside=inside[0],
        purity=outside[0] / outside[1],
    )


def best_split(judged: Positions, of: Mask) -> Split | None:
    """Of the best one of each tag, the best that is not by chance."""
    if not (judged.wrong & of).any() or judged.wrong[of].all():
        return None
    best: list[tuple[float, Split]] = []
    for name, tag in TAGS.items():
        gains = [(gain_of(judged, split, of), split) for split in splits_of(tag, judged.levels[name], judged, of)]
        gain, split = max(gains, key=lambda pair: pair[0], default=(0.0, None))
        if split is not None and gain > 0.0:
            best.append((gain * (LESS if name in SENT else 1.0), split))
    for _, split in sorted(best, key=lambda pair: -pair[0]):
        wrong_side, right_side = (judged.wrong_requests(of & side) for side in (~split.is_right, split.is_right))
        if so_unlike(*wrong_side, *right_side) <= MOST_CHANCE:
            return split
    return None


def tendency_of(positions: Sequence[Position]) -> tuple[str, str, float, float] | None:
    """Of all splits, also those with wrong positions or few right ones on the right side, the least of an accident:
    where requests are wrong more often, what that points to, the share that it explains, and the chance."""
    judged, tendencies = Positions(positions), list[tuple[str, str, float, float]]()
    for name, tag in TAGS.items() if judged.wrong.any() and not judged.wrong.all() else ():
        splits = list(splits_of(tag, judged.levels[name], judged, judged.everywhere, is_fitted=False))
        for split in splits:
            here, there = (judged.wrong_requests(side) for side in (~split.is_right, split.is_right))
            often = f"{'more often' if there[0] else 'only'} {split.wrong.removeprefix('only ')}"
            words = f"{often}: {here[0]} of {here[1]} against {there[0]} of {there[1]} {split.right}"
            explained = round(judged.explained(split.is_right, judged.everywhere), 9)
            tendencies.append((words, split.suspect, explained, so_unlike(*here, *there) * len(splits)))
    least = min(tendencies, key=lambda each: (each[3], -each[2]), default=None)
    return least if least is not None and least[3] <= TENDENCY_CHANCE else None


def is_unsteady(positions: Sequence[Position]) -> bool:
    """Whether most wrong errors differ by more than half of their size where the same tokens were sent again.

    Wrong weights, operators and constants err alike each time, up to rounding: at most 0.1 of their errors differ in a
    network whose weights are 4-bit steps and that computes in bfloat16; with a leaking state 0.7 and more.
    """
    judged = Positions(positions)
    beginnings = {
        name: list(accumulate(ids, lambda before, token: hash((before, token)), initial=0))
        for name, ids in judged.tokens.items()
    }
    same: dict[tuple[int, int], list[Position]] = {}
    for at, name in zip(judged.positions, judged.requests, strict=True):
        if at.error is not None:
            same.setdefault((beginnings[name][at.row + 1], at.token_id), []).append(at)
    wrong = [some for some in same.values() if len(some) > 1 and any(at.is_wrong for at in some)]
    errors = [[at.error or 0.0 for at in some] for some in wrong]
    again = [(float(np.std(some)), root_mean_square(some)) for some in errors]
    return len(again) >= LEAST_AGAIN and 2 * sum(apart > STEADY * size for apart, size in again) > len(again)


def gain_of(judged: Positions, split: Split, of: Mask) -> float:
    """0 where the right side is a sliver. Rounded, so that no order of summation decides between equals."""
    right = judged.weights[of & split.is_right & ~judged.wrong].sum()
    if right < LEAST_SHARE * judged.weights[of & ~judged.wrong].sum() - 1e-9:
        return 0.0
    is_whole = not (of & split.is_right & judged.wrong).any()
    return round(judged.explained(split.is_right, of) * (WHOLE if is_whole else 1.0), 9)


def so_unlike(wrong: int, of: int, others_wrong: int, others: int) -> float:
    """The probability that, of all wrong requests, at least so many are among these: Fisher's exact test, one-sided.

    Assumes that requests are wrong or right independently of each other: a request's positions on one side count once,
    as they are wrong together. Source: Fisher 1935, The Design of Experiments; hypergeometric tail.
    """
    most = wrong + others_wrong
    ways = sum(math.comb(of, count) * math.comb(others, most - count) for count in range(wrong, min(of, most) + 1))
    return ways / math.comb(of + others, most)


# --- the splits of one tag


def splits_of(tag: Tag, levels: NDArray[Any], judged: Positions, of: Mask, is_fitted: bool = True) -> Iterator[Split]:
    """A number at its edges and, if fitted, where wrong positions begin and end; each level that has words from all
    others."""
    if tag.edges:
        wrong = levels[of & judged.wrong]
        ends = [round_edge(levels[of], int(wrong.min())), int(wrong.max()) + 1] if is_fitted else []
        sides = [(levels >= edge, tag.sides(edge)) for edge in dict.fromkeys([*tag.edges, *ends])]
    else:
        sides = [(levels == level, tag.sides(level)) for level in tag.levels]
    for there, words in sides:
        if (of & there).any() and (of & ~there).any():
            if judged.share_wrong(of & there) > judged.share_wrong(of & ~there):
                split = Split(words.there, words.suspect, words.elsewhere, ~there)
            else:
                split = Split(words.elsewhere, words.suspect_elsewhere, words.there, there)
            if split.suspect:
                yield split


def round_edge(numbers: NDArray[Any], edge: int) -> int:
    """The roundest number that cuts as `edge` does: above the next lower number."""
    lower = numbers[numbers < edge]
    least = int(lower.max()) + 1 if len(lower) else edge
    return max(range(least, edge + 1), key=lambda number: ((number & -number), number)) if least > 0 else edge
