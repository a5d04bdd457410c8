"""The time of a verdict: on a right engine the whole check, on a wrong one until the first wrong response."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lfm2np.commands.bench.measure import Turns
from lfm2np.commands.bench.sides.side_process import SideProcess
from lfm2np.commands.bench.table import columns
from lfm2np.values import Progress

FORMATS = ("float32", "bfloat16")  # that an engine of ours computes in
ENGINES = {  # what is measured: the engine, and whether the check ends with its first wrong answer
    "right": ("lfm2np.suite.adapters:own_{}", False),
    "wrong, --first": ("lfm2np.oracle.wrong_engine:factory", True),  # float32, and wrong in any format
}
SECONDS = ("asking", "judging", "scoring", "to_verdict")


@dataclass(frozen=True)
class CheckTime:
    """Of each of ENGINES what each round said: see sides/check_side.py."""

    format: str  # that answers are judged as
    load_seconds: float
    engines: dict[str, list[dict[str, Any]]]


def measure_check(directory: Path, format_name: str, rounds: int, threads: int, show: Progress) -> CheckTime:
    turns = Turns(1 + rounds * len(ENGINES), show)
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in ENGINES}
    with SideProcess(f"check-{format_name}", directory, threads) as side:
        loaded = side.ask("load")["load_seconds"]
        turns.next()
        for _ in range(rounds):
            for name, (engine, first) in ENGINES.items():
                measured[name].append(side.ask("check", engine=engine.format(format_name), first=first))
                turns.next()
    return CheckTime(format_name, loaded, measured)


def as_json(measured: CheckTime) -> dict[str, Any]:
    return asdict(measured)


def as_text(measured: CheckTime) -> str:
    """Medians; judging beside scoring as a ratio of the same round."""
    rows = [["engine", "verdict", "tokens", "asking", "judging", "scoring", "judging / scoring", "to verdict"]]
    for name, rounds in measured.engines.items():
        known = {what: [times[what] for times in rounds if what in times] for what in SECONDS}
        medians = {what: f"{statistics.median(values):.1f}" if values else "" for what, values in known.items()}
        ratios = [times["judging"] / times["scoring"] for times in rounds if "scoring" in times]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else ""
        verdict, tokens = rounds[0]["verdict"], str(rounds[0]["tokens"])
        rows.append([name, verdict, tokens, *(medians[what] for what in SECONDS[:3]), ratio, medians["to_verdict"]])
    title = f"seconds of a check in {measured.format} (the oracle loads in {measured.load_seconds:.1f}), medians"
    return f"{title}\n{columns(rows)}"
