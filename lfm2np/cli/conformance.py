"""`lfm2np conformance list`: what is in the property suite."""

from __future__ import annotations

import argparse
import json

from lfm2np.cli.shared.parser import Commands, add_command
from lfm2np.errors import RequestError


def run_conformance(arguments: argparse.Namespace) -> None:
    """Prints all properties."""
    require_hypothesis()
    from lfm2np.conformance.catalogue import ALL

    if arguments.json:
        rows = [
            {"id": prop.id, "sentence": prop.sentence, "law": prop.law, "needs": prop.needs, "bugs": prop.bugs}
            for prop in ALL
        ]
        print(json.dumps({"properties": rows}))
        return
    for prop in ALL:
        print(f"{prop.id}  (law {prop.law}; needs {', '.join(prop.needs)})\n     {prop.sentence}")
        if prop.bugs:
            print(f"     would have caught {', '.join(prop.bugs)}")


def require_hypothesis() -> None:
    """RequestError without the library that draws the examples."""
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        raise RequestError('the suite needs Hypothesis: pip install "lfm2np[conformance]"') from None


def add_conformance(commands: Commands) -> None:
    text = "print the properties of the suite, which pytest runs on any engine"
    parser = add_command(
        commands,
        "conformance",
        run_conformance,
        text,
        "lfm2np conformance list\n  pytest --pyargs lfm2np.conformance --engine package.module:factory",
        model=False,
    )
    parser.add_argument("what", choices=["list"], help="list: id, sentence, law, needs and real bugs of each")
