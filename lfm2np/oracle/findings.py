"""What the errors of a check depend on, in words: what one factor tells, then what only several tell together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lfm2np.oracle.factors import FACTORS, LEAST, Groups, grouped
from lfm2np.oracle.judging.verdict import WRONG, Position
from lfm2np.oracle.regions import described
from lfm2np.oracle.workloads import BORDERS, CASES

MOST_NAMES = 3  # of requests, in one line


def findings(positions: Sequence[Position]) -> list[str]:
    """What the errors depend on, in words, the most telling first; none if they are what the format explains."""
    found = []
    groups = {factor: grouped(positions, factor) for factor in FACTORS}
    if not any(group.is_off for group in groups["case"].values()):
        return []
    rows = groups["row"]
    if "0" in rows and rows["0"].is_fine and all(group.is_off for group in list(rows.values())[1:3]):
        found.append("right for the first row, wrong from the second row on: rows of a step are mixed up, or state")
    for factor, good, bad, words in (
        ("company", "alone", "beside others", "requests of a batch get at each other's rows, blocks or slots"),
        ("prefix", "cold", "warm", "a prefix hit without the state that belongs to it, or blocks that changed"),
        ("prefix", "cold", "shared", "shared blocks are written, or a hit takes another's"),
        ("phase", "prefill", "decode", "what prefill leaves behind is not what decode expects"),
        ("phase", "decode", "prefill", "only prompts are wrong"),
    ):
        pair = groups[factor].get(good), groups[factor].get(bad)
        if pair[0] and pair[1] and pair[0].is_fine and pair[1].is_off:
            found.append(f"right {good}, wrong {bad}: {words}")
    regions = described(positions)
    if regions is not None and not (found and regions.is_of_one_factor):
        found += regions.lines()
    found += border_findings(positions)
    found += growth_findings(rows)
    found += case_findings(groups["case"])
    return found or [undescribed(positions)]


def undescribed(positions: Sequence[Position]) -> str:
    """Where no factor and no combination of them tells right from wrong."""
    asked = {one.ask.id: None for one in positions}
    wrong = {one.ask.id: None for one in positions if one.verdict in WRONG}
    right = [name for name in asked if name not in wrong]
    if not wrong or not right:
        return "wrong everywhere, and no format errs like this: a wrong operator, weight or constant"
    word, fewer = ("right", right) if len(right) < len(wrong) else ("wrong", list(wrong))
    names = ", ".join(fewer[:MOST_NAMES]) + ", ..." * (len(fewer) > MOST_NAMES)
    return f"wrong in {len(wrong)} of {len(asked)} requests, which nothing that was asked sets apart; {word}: {names}"


def border_findings(positions: Sequence[Position]) -> list[str]:
    """A border before which all is right and behind which something is wrong."""
    wrong = [one.row for one in positions if one.verdict in WRONG]
    if not wrong:
        return []
    first = min(wrong)
    border = max((edge for edge in BORDERS if edge <= first + 1), default=None)
    if border is None or first > border + 1:
        return []
    return [f"right before position {first}, wrong from it on: the border of a block or chunk of {border}?"]


def growth_findings(rows: Groups) -> list[str]:
    """Error that grows with the position, in bins: something is added up, or the positions are off."""
    sizes = [group.rms for group in rows.values() if group.told >= LEAST]
    rising = sum(later > earlier for earlier, later in pairwise(sizes))
    if len(sizes) >= 4 and rising >= len(sizes) - 2 and sizes[-1] > 8.0 * max(sizes[0], 1.0):
        return [f"errors grow with the position, from {sizes[0]:.1f} to {sizes[-1]:.1f} times the noise"]
    return []


def case_findings(cases: Groups) -> list[str]:
    """The cases that are wrong, if others are right, the simplest first."""
    if not any(group.is_fine for group in cases.values()):
        return []
    return [
        f"wrong in {name}: {CASES[name].suspect}" for name, group in cases.items() if group.is_off and name in CASES
    ]
