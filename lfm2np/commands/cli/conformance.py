"""`lfm2np conformance list`: what is in the property suite."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from lfm2np.commands.cli.shared.parser import Commands, add, add_command
from lfm2np.commands.cli.shared.terminal import print_result
from lfm2np.errors import RequestError


def run_conformance(arguments: argparse.Namespace) -> None:
    require_hypothesis()
    if arguments.scheduler:
        print_demands(arguments)
        return
    from lfm2np.suite.catalogue import ALL

    rows = [
        {"id": prop.id, "sentence": prop.sentence, "law": prop.law, "needs": prop.needs, "bugs": prop.bugs}
        for prop in ALL
    ]
    entries = []
    for prop in ALL:
        bugs = f"\n     would have caught {', '.join(prop.bugs)}" if prop.bugs else ""
        entries.append((f"{prop.id}  (law {prop.law}; needs {', '.join(prop.needs)})", prop.sentence + bugs))
    print_entries(arguments, {"properties": rows}, entries)


def print_demands(arguments: argparse.Namespace) -> None:
    """What every scheduler must do, then what one may promise."""
    from lfm2np.suite.schedulers.demands import DEMANDS
    from scheduler.protocol import POLICIES

    promised = {f"{name} (promised)": text for name, text in POLICIES.items()}
    print_entries(arguments, {"demands": DEMANDS, "policies": POLICIES}, {**DEMANDS, **promised}.items())


def print_entries(arguments: argparse.Namespace, fields: dict[str, Any], entries: Iterable[tuple[str, str]]) -> None:
    """A catalogue: each name, and below it what it says."""
    print_result(arguments, fields, "\n".join(f"{name}\n     {text}" for name, text in entries))


def require_hypothesis() -> None:
    """RequestError without the library that draws the examples."""
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        raise RequestError('the suite needs Hypothesis: pip install "lfm2np[conformance]"') from None


def add_conformance(commands: Commands) -> None:
    text = "print the properties of the suite, which pytest runs on any engine"
    example = "lfm2np conformance list\n  pytest --pyargs lfm2np.suite --engine package.module:factory"
    parser = add_command(commands, "conformance", run_conformance, text, example, model=False)
    parser.add_argument("what", choices=["list"], help="list: id, sentence, law, needs and real bugs of each")
    add(parser, "--scheduler", "instead what is demanded of a scheduler, for pytest ... --scheduler")
