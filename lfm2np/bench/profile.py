"""Where the time of a step goes, by operation, beside the floor's products."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lfm2np.bench import table
from lfm2np.bench.measure import FLOORS, Measured
from lfm2np.bench.ratios import RATIOS
from lfm2np.bench.sides import cells
from lfm2np.bench.sides.profile_side import PARTS, REST, ROUTING

SHARES = {one.side: one for one in RATIOS if one.other in FLOORS}
CELLS = [cell for cell in cells.CELLS if all(one.target(cell) for one in SHARES.values())]


@dataclass(frozen=True)
class Profile:
    """Of one arithmetic, the times of its side and of its floor."""

    numerics: str
    measured: Measured


def sides(numerics: str) -> tuple[str, str]:
    return f"profile-{numerics}", SHARES[numerics].other


def as_json(found: Profile) -> dict[str, Any]:
    return {"numerics": found.numerics, **table.as_json(found.measured)}


def as_text(found: Profile) -> str:
    """A row a part, a column a cell; in brackets what the bare products take of it."""
    measured = found.measured.cells
    ours, floor = sides(found.numerics)
    rows = [["", *(times.cell.name for times in measured)]]
    rows.append(["step", *(both(times.seconds[ours], times.seconds[floor]) for times in measured)])
    for part in (one for one in (*PARTS, *ROUTING, REST) if one in measured[0].parts[ours]):
        rows.append([part, *(both(times.parts[ours][part], times.parts[floor].get(part)) for times in measured)])
    title = f"{found.numerics}: milliseconds of a step and its parts (in brackets: {floor}), medians"
    return f"{title}\n{table.columns(rows)}"


def both(seconds: Sequence[float], floor: Sequence[float] | None) -> str:
    own = f"{1000 * statistics.median(seconds):.1f}"
    return own if floor is None else f"{own} ({1000 * statistics.median(floor):.1f})"
