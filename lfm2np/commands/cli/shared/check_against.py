"""`lfm2np check TARGET --against itself | TARGET2`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from lfm2np.commands.cli.shared import against
from lfm2np.commands.cli.shared.terminal import command_line, progress_bar, show_report
from lfm2np.errors import RequestError
from lfm2np.oracle import chats
from lfm2np.oracle.report.report import Report
from lfm2np.oracle.workloads import CASES
from lfm2np.suite.itself.asked import Asking, Held
from lfm2np.suite.itself.invariance_report import report_of
from lfm2np.suite.itself.relations import NAMES, RELATIONS, Relation


def run(arguments: argparse.Namespace) -> None:
    """Prints the relations that hold and those that are broken, and writes the pages.

    ProofError (1) for a broken relation, InconclusiveError (2) if that can't be said; after an interrupt, what was
    found before.
    """
    require(arguments)
    show_report(arguments, *compared(arguments))


def require(arguments: argparse.Namespace) -> None:
    against.require(arguments)
    chosen(arguments)
    if arguments.report:
        from lfm2np.suite.fuzz.hand_over import require_place

        require_place(place_of(arguments))


def place_of(arguments: argparse.Namespace) -> Path:
    """The folder of what is broken: beside the first report."""
    first: Path = arguments.report[0]
    return first.with_name(f"{first.stem}-findings")


def chosen(arguments: argparse.Namespace) -> Sequence[Relation]:
    names = names_of(arguments)
    return [relation for relation in RELATIONS if names is None or relation.name in names]


def names_of(arguments: argparse.Namespace) -> list[str] | None:
    """Those of --cases, if given: of relations with --against, else of cases. RequestError for any other."""
    known, others, why, alone = tuple(CASES), NAMES, against.WITHOUT, f", or {chats.CASE} alone"
    if arguments.against is not None:
        known, others, why, alone = NAMES, (*CASES, chats.CASE), against.WITH, ""
    names = None if arguments.cases is None else str(arguments.cases).split(",")
    for name in names or ():
        if name not in known:
            reason = f"{why}; " if name in others else ""
            raise RequestError(f"--cases {name!r}: {reason}expected some of {', '.join(known)}{alone}")
    return names


def compared(arguments: argparse.Namespace) -> tuple[Report, bool]:
    """And whether it was interrupted."""
    with contextlib.ExitStack() as stack:
        asking = against.asking(arguments, stack)
        with progress_bar("relations") as asking.report:
            asking.run(chosen(arguments))
        broken = asking.broken if arguments.report and not asking.is_interrupted else []  # each is played again
        folders = {held.relation.name: written(arguments, asking, held) for held in broken}
    return report_of(asking, folders, [] if asking.abilities.takes_cold else [NO_COLD]), asking.is_interrupted


NO_COLD = "the engine takes no request without cached prefixes: `alone` is the first time that a prompt is sent"


def written(arguments: argparse.Namespace, asking: Asking, held: Held) -> str:
    """The folder with the trace that breaks a relation, played once more; or why there is none."""
    from lfm2np.suite.fuzz.campaign import Failure
    from lfm2np.suite.fuzz.hand_over import Context, hand_over
    from lfm2np.suite.itself.by_itself import ByItself

    trace = held.broken.trace if held.broken is not None else None
    if trace is None or held.relation.player or held.relation.samples:
        return "no script: it needs more than requests to one server"
    player = asking.players[""]
    judge = ByItself(player, asking.spread, asking.is_bitwise)
    played = player.play(trace)
    finding = judge.finding(trace, played)
    if finding is None:
        return "no script: not seen again when its requests were compared with themselves alone"
    failure = Failure(trace, played, finding, held.rounds, trace, asking.traces, asking.seconds, 0.0)
    context = Context(arguments.target, asking.abilities.engine, asking.format_name, "", "none", command_line())
    return str(hand_over(place_of(arguments), failure, judge, player, context))
