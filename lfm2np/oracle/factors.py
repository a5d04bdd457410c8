"""Format or bug? The size of an error does not decide; what it depends on does.

A number format errs alike everywhere. A bug depends on something: the row, other requests in a batch, a cached prefix,
prefill or decode, a border of blocks. So the judged positions are grouped by each such factor; causes/findings.py says
in which groups the format explains the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lfm2np.oracle.judging.verdict import LIMIT, Position, Verdict, largest_error, root_mean_square

FINE = 3.0  # root mean square, in units of the noise: right engines stay below 2 in any group of some size
OFF = 5.0
LEAST_NOISE = 0.15
LEAST = 4  # positions that a group needs to be called fine
ROWS = (0, 1, 2, 3, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)  # bins of positions


@dataclass(frozen=True)
class Group:
    """The positions at one level of one factor."""

    count: int
    told: int  # of them with a reported log-probability; the name is that of the JSON field
    rms: float  # of the errors, in units of the noise
    worst: float
    bugs: int

    @property
    def is_fine(self) -> bool:
        return self.count >= LEAST and not self.bugs and self.rms <= FINE and self.worst <= LIMIT

    @property
    def is_off(self) -> bool:
        return self.bugs > 0 or self.rms > OFF or self.worst > LIMIT

    @property
    def is_below_a_format(self) -> bool:
        """Errors far smaller than the declared format's."""
        return self.told >= 4 * LEAST and self.rms < LEAST_NOISE


Groups = Mapping[str, Group]  # by level


def row_bin(position: Position) -> str:
    start = max(edge for edge in ROWS if edge <= position.row)
    following = next((edge for edge in ROWS if edge > start), None)
    if following is None:
        return f"{start}+"
    return str(start) if following == start + 1 else f"{start}-{following - 1}"


def phase_of(position: Position) -> str:
    return "decode" if position.row >= len(position.request.prompt_token_ids) else "prefill"


def place_of(position: Position) -> str:
    """Its request's place in the round; see workloads.noted."""
    if not position.request.tags.get("beside"):
        return "alone"
    return "later" if position.request.tags.get("place") else "first"


def abort_of(position: Position) -> str:
    return str(position.request.tags.get("abort", "none"))


def length_bin(length: int) -> str:
    return str(min(length, 4)) + "+" * (length > 3)


FACTORS: dict[str, Callable[[Position], str]] = {
    "case": lambda position: position.request.case,
    "row": row_bin,
    "prompt length": lambda position: length_bin(len(position.request.prompt_token_ids)),
    "company": lambda position: "beside others" if position.request.tags.get("beside") else "alone",
    "prefix": lambda position: str(position.request.tags.get("prefix", "cold")),
    "phase": phase_of,
    "place": place_of,
    "abort": abort_of,
}


def grouped(positions: Iterable[Position], factor: str) -> dict[str, Group]:
    levels: dict[str, list[Position]] = {}
    for position in positions:
        levels.setdefault(FACTORS[factor](position), []).append(position)
    return {level: group_of(levels[level]) for level in sorted(levels, key=level_order)}


def level_order(level: str) -> tuple[int, str]:
    digits = "".join(c for c in level.split("-")[0] if c.isdigit())
    return (int(digits) if digits and level[0].isdigit() else -1, level)


def group_of(positions: Sequence[Position]) -> Group:
    reported = [position for position in positions if position.error_size is not None]
    return Group(
        count=len(positions),
        told=len(reported),
        rms=root_mean_square([position.error_size or 0.0 for position in reported]),
        worst=largest_error(reported),
        bugs=sum(position.verdict is Verdict.BUG for position in positions),
    )


def is_uniform(positions: Sequence[Position]) -> bool:
    """Whether the errors are the size that this format has, everywhere, and not smaller."""
    if any(position.is_wrong for position in positions):
        return False
    for factor in FACTORS:
        for group in grouped(positions, factor).values():
            if group.is_below_a_format or (group.told >= 4 * LEAST and group.rms > FINE):
                return False
    return True
