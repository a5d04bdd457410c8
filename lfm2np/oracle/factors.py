"""Format or bug? The size of an error does not tell them apart; what it depends on does.

A number format errs everywhere alike. A bug depends on something: the first row or later ones, alone or beside others,
cold or warm, prompt or generated, before or after a border. So the judged positions are grouped by each such factor,
and the report says in which groups the errors are what the format explains and in which they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lfm2np.oracle.verdict import LIMIT, Position, Verdict, root_mean_square
from lfm2np.oracle.workloads import BORDERS, CASES

FINE = 3.0  # root mean square, in units of the noise: right engines stay below 2 in any group of some size
OFF = 5.0
LEAST = 4  # positions that a group needs to be called fine
ROWS = (0, 1, 2, 3, 8, 16, 32, 64, 128, 256, 512)  # bins of positions


@dataclass(frozen=True)
class Group:
    """The positions at one level of one factor."""

    count: int
    told: int  # of them with a log-probability
    rms: float  # of the errors, in units of the noise
    worst: float
    bugs: int

    @property
    def is_fine(self) -> bool:
        return self.count >= LEAST and not self.bugs and self.rms <= FINE and self.worst <= LIMIT

    @property
    def is_off(self) -> bool:
        return self.bugs > 0 or self.rms > OFF or self.worst > LIMIT


Groups = Mapping[str, Group]  # by level


def row_bin(position: Position) -> str:
    start = max(edge for edge in ROWS if edge <= position.row)
    following = next((edge for edge in ROWS if edge > start), None)
    if following is None:
        return f"{start}+"
    return str(start) if following == start + 1 else f"{start}-{following - 1}"


FACTORS: dict[str, Callable[[Position], str]] = {
    "case": lambda one: one.ask.case,
    "row": row_bin,
    "prompt length": lambda one: str(min(one.ask.factors["length"], 4)) + "+" * (one.ask.factors["length"] > 3),
    "company": lambda one: "beside others" if one.ask.factors.get("beside") else "alone",
    "prefix": lambda one: str(one.ask.factors.get("prefix", "cold")),
    "phase": lambda one: "decode" if one.is_new and one.row >= one.ask.factors["length"] else "prefill",
}


def grouped(positions: Iterable[Position], factor: str) -> dict[str, Group]:
    levels: dict[str, list[Position]] = {}
    for one in positions:
        levels.setdefault(FACTORS[factor](one), []).append(one)
    return {level: group_of(levels[level]) for level in sorted(levels, key=level_order)}


def level_order(level: str) -> tuple[int, str]:
    digits = "".join(c for c in level.split("-")[0] if c.isdigit())
    return (int(digits) if digits and level[0].isdigit() else -1, level)


def group_of(positions: Sequence[Position]) -> Group:
    told = [one for one in positions if one.error_size is not None]
    return Group(
        count=len(positions),
        told=len(told),
        rms=root_mean_square([one.error_size or 0.0 for one in told]),
        worst=max((abs(one.error_ratio or 0.0) for one in told), default=0.0),
        bugs=sum(one.verdict is Verdict.BUG for one in positions),
    )


def is_uniform(positions: Sequence[Position]) -> bool:
    """Whether the errors are those of the format that these positions were judged under: everywhere, no less."""
    if any(one.verdict in (Verdict.BUG, Verdict.DRIFT) for one in positions):
        return False
    for factor in FACTORS:
        for group in grouped(positions, factor).values():
            if group.told >= 4 * LEAST and not 0.15 <= group.rms <= FINE:
                return False
    return True


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
    found += border_findings(positions)
    found += growth_findings(rows)
    found += case_findings(groups["case"])
    if not found:
        found.append("wrong everywhere, and no format errs like this: a wrong operator, weight or constant")
    return found


def border_findings(positions: Sequence[Position]) -> list[str]:
    """A border before which all is right and behind which something is wrong."""
    wrong = [one.row for one in positions if one.verdict in (Verdict.BUG, Verdict.DRIFT)]
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
