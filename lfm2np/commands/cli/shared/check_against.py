"""`lfm2np check TARGET --against itself | TARGET2`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lfm2np.commands.cli.shared import against
from lfm2np.commands.cli.shared.terminal import command_line, progress_bar, show_report
from lfm2np.errors import RequestError
from lfm2np.oracle.report.report import Report
from lfm2np.suite.itself.asked import Asking, Held
from lfm2np.suite.itself.invariance_report import report_of
from lfm2np.suite.itself.relations import NAMES, RELATIONS, Relation

SHRINK_SECONDS = 60.0


def run(arguments: argparse.Namespace) -> None:
    """Prints the relations that hold and those that are broken, and writes the pages.

    ProofError (1) for a broken relation, InconclusiveError (2) if that can't be said.
    """
    require(arguments)
    show_report(arguments, compared(arguments))


def require(arguments: argparse.Namespace) -> None:
    against.require(arguments)
    chosen(arguments.relations)
    if arguments.out is not None:
        from lfm2np.suite.fuzz.hand_over import require_place

        require_place(Path(arguments.out))


def chosen(names: str | None) -> Sequence[Relation]:
    if names is None:
        return RELATIONS
    for name in names.split(","):
        if name not in NAMES:
            raise RequestError(f"--relations {name!r}: expected some of {', '.join(NAMES)}")
    return [relation for relation in RELATIONS if relation.name in names.split(",")]


def compared(arguments: argparse.Namespace) -> Report:
    with contextlib.ExitStack() as stack:
        asking = against.asking(arguments, stack)
        with progress_bar("relations") as asking.report:
            asking.run(chosen(arguments.relations))
        broken = asking.broken if arguments.out is not None else []
        folders = {
            f"{held.relation.name}, {how}": where for held in broken for how, where in written(arguments, asking, held)
        }
    return report_of(asking, folders, [] if asking.abilities.takes_cold else [NO_COLD])


NO_COLD = "the engine takes no request without cached prefixes: `alone` is the first time that a prompt is sent"


def written(arguments: argparse.Namespace, asking: Asking, held: Held) -> Iterator[tuple[str, str]]:
    """A broken relation, shrunk and as it was asked, each in a folder; or why not.

    A server that can't be started from here keeps what earlier requests left behind, and shrinking may end in a trace
    that needs that. The whole trace brings its own past.
    """
    from lfm2np.suite.fuzz.campaign import Campaign
    from lfm2np.suite.fuzz.draw_traces import Around
    from lfm2np.suite.fuzz.hand_over import Context, hand_over

    trace = held.broken.trace if held.broken is not None else None
    if trace is None or held.relation.player or held.relation.samples:
        yield "no script", "it needs more than requests to one server"
        return
    player, sizes = asking.players[""], asking.sizes
    judge = against.judge_of(asking)
    around = Around(sizes.block, sizes.chunk, sizes.slots, sizes.longest, tuple(range(sizes.vocab)))
    campaign = Campaign(judge, player, around, shrink_seconds=SHRINK_SECONDS)
    campaign.counts.traces += 1
    played, finding = campaign.play(trace)
    if finding is None:
        yield "no script", "not seen again when its requests were compared with themselves alone"
        return
    failure = campaign.minimize(trace, played, finding)
    campaign.raise_interrupt()
    context = Context(arguments.target, asking.abilities.engine, asking.format_name, "", "none", command_line())
    yield "shrunk", str(hand_over(Path(arguments.out), failure, judge, player, context))
    if failure.trace != trace and not failure.is_fresh:
        whole = replace(failure, trace=trace, played=played, finding=finding, rate=(1, 1))
        yield "as it was asked", str(hand_over(Path(arguments.out), whole, judge, player, context))
