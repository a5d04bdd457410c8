"""Format or bug? The size of an error does not decide; what it depends on does.

A number format errs alike everywhere. A bug depends on something: the position, other requests in a batch, a cached
prefix, prefill or decode, a border of blocks. So the judged positions are grouped by the levels of some tags (tags.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lfm2np.oracle.causes.tags import TAGS, Tag
from lfm2np.oracle.judging.verdict import LIMIT, Position, Verdict, largest_error, root_mean_square

FINE = 3.0  # root mean square, in units of the noise: right engines stay below 2 in any group of some size
OFF = 5.0
LEAST_NOISE = 0.15
LEAST = 4  # positions that a group needs to be called fine
SHOWN = ("case", "row", "prompt length", "company", "prefix", "phase", "abort")  # tags of many positions


@dataclass(frozen=True)
class Group:
    """The positions at one level of one tag."""

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


def level_of(tag: Tag, position: Position) -> str:
    """A number's level is the range between two edges."""
    level = tag.level(position, position.request.prompt_token_ids)
    if not tag.edges:
        return str(level)
    edges = (0, *tag.edges)
    index = sum(edge <= int(level) for edge in edges) - 1
    first, following = edges[index], edges[index + 1] if index + 1 < len(edges) else None
    if following is None:
        return f"{first}+"
    return str(first) if following == first + 1 else f"{first}-{following - 1}"


def grouped(positions: Iterable[Position], name: str) -> dict[str, Group]:
    """By the levels of one of TAGS, in their order."""
    levels: dict[str, list[Position]] = {}
    for position in positions:
        levels.setdefault(level_of(TAGS[name], position), []).append(position)
    return {level: group_of(levels[level]) for level in sorted(levels, key=level_order)}


def level_order(level: str) -> tuple[int, str]:
    digits = level.split("-")[0].rstrip("+")
    return (int(digits) if digits.isdigit() else -1, level)


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
    groups = [group for name in SHOWN for group in grouped(positions, name).values()]
    return not any(group.is_below_a_format or (group.told >= 4 * LEAST and group.rms > FINE) for group in groups)
