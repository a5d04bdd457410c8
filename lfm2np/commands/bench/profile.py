"""Where the time of a step goes, by operation, beside the floor's products; what of it more cores could not help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lfm2np.commands.bench import table
from lfm2np.commands.bench.measure import FLOORS, CellTimes, Measured
from lfm2np.commands.bench.sides import cells
from lfm2np.commands.bench.sides.cells import PREFILL
from lfm2np.commands.bench.sides.profile_side import BY_REQUEST, PARTS, PIECES, PRODUCTS, REST, ROUTING, SERIAL, SPREAD
from lfm2np.commands.bench.table import RATIOS

SHARES = {ratio.side: ratio for ratio in RATIOS if ratio.other in FLOORS}
CORES = (4, 16, 64)
CELLS = [cell for cell in cells.CELLS if all(share.target(cell) for share in SHARES.values())]


@dataclass(frozen=True)
class Profile:
    numerics: str
    threads: int
    measured: Measured


def sides(numerics: str) -> tuple[str, str]:
    return f"profile-{numerics}", SHARES[numerics].other


def as_json(profile: Profile) -> dict[str, Any]:
    side, threads = sides(profile.numerics)[0], profile.threads
    spread = [
        {
            "cell": times.cell.name,
            "serial_share": serial_share(times, side),
            "milliseconds_on_cores": {cores: projected(times, side, threads, cores) for cores in CORES},
        }
        for times in profile.measured.cells
    ]
    return {"numerics": profile.numerics, "threads": threads, "spread": spread, **table.as_json(profile.measured)}


def as_text(profile: Profile) -> str:
    """A row a part, a column a cell; in brackets what the bare products take of it."""
    measured = profile.measured.cells
    ours, floor = sides(profile.numerics)
    head = ["", *(times.cell.name for times in measured)]
    rows = [head, ["step", *(both(times.seconds[ours], times.seconds[floor]) for times in measured)]]
    for part in (name for name in (*PARTS, *ROUTING, REST) if name in measured[0].parts[ours]):
        rows.append([part, *(both(times.parts[ours][part], times.parts[floor].get(part)) for times in measured)])
    spread = [head]
    spread += [[part, *(both(times.parts[ours][part], None) for times in measured)] for part in SPREAD]
    spread.append(["serial, %", *(f"{100 * serial_share(times, ours):.1f}" for times in measured)])
    for cores in CORES:
        times_on = (projected(times, ours, profile.threads, cores) for times in measured)
        spread.append([f"on {cores} cores", *(f"{seconds:.1f}" for seconds in times_on)])
    title = f"{profile.numerics}: milliseconds of a step and its parts (in brackets: {floor}), medians"
    second = (
        f"the same by what computes it on {profile.threads} threads; on more cores, were all but the serial part to "
        "take as much less time, and no request's attention to be divided in a decode"
    )
    return "\n".join([title, table.columns(rows), "", second, table.columns(spread)])


def serial_share(times: CellTimes, side: str) -> float:
    """Of a step's time, what is neither in products nor in pieces that several threads share."""
    return median(times.parts[side][SERIAL]) / median(times.seconds[side])


def projected(times: CellTimes, side: str, threads: int, cores: int) -> float:
    """Milliseconds of a step on so many cores, from one on `threads`, if products and pieces gain by each core.

    Attention's work by request, too, but in a decode no core has less than one request.
    """
    parts = {part: median(seconds) for part, seconds in times.parts[side].items()}
    useful = cores if times.cell.kind == PREFILL else min(cores, times.cell.requests)
    shared, by_request = parts[PRODUCTS] + parts[PIECES], parts[BY_REQUEST]
    spread = shared * threads / cores + by_request * min(threads, useful) / useful
    return 1000 * (median(times.seconds[side]) - shared - by_request + spread)


def both(seconds: Sequence[float], floor: Sequence[float] | None) -> str:
    cell = f"{1000 * median(seconds):.1f}"
    return cell if floor is None else f"{cell} ({1000 * median(floor):.1f})"
