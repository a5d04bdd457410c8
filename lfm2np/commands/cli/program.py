"""The command line: `lfm2np generate | serve | score | check | compare | record | locate | vectors | ...`."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import lfm2np
from lfm2np.commands.cli.shared.parser import EXIT_CODES, Commands, Help, OneLineParser, discard_output, fail, one_line
from lfm2np.errors import Lfm2npError
from lfm2np.oracle.engines.target import TargetError

COMMANDS = {  # the module of each, in the order of the help; its function add_COMMAND puts it into the program
    "generate": "lfm2np.commands.cli.generate",
    "serve": "lfm2np.commands.cli.serve",
    "draw": "lfm2np.commands.cli.draw",
    "lab": "lfm2np.commands.cli.lab",
    "check": "lfm2np.commands.cli.check",
    "compare": "lfm2np.commands.cli.compare",
    "vet": "lfm2np.commands.cli.vet",
    "rollouts": "lfm2np.commands.cli.rollouts",
    "fuzz": "lfm2np.commands.cli.fuzz",
    "record": "lfm2np.commands.cli.locate",
    "locate": "lfm2np.commands.cli.locate",
    "vectors": "lfm2np.commands.cli.vectors",
    "simulate": "lfm2np.commands.cli.simulate",
    "score": "lfm2np.commands.cli.score",
    "info": "lfm2np.commands.cli.info",
}


START = """check an engine     lfm2np check http://127.0.0.1:8000 --model DIR
test a scheduler    pytest --pyargs lfm2np.suite --scheduler package.module:factory
learn               lfm2np lab
all commands        lfm2np --help"""


def build_parser(named: str | None = None) -> argparse.ArgumentParser:
    """Of the command that is named, since the modules of all take longer to load than many commands take; of all where
    none of that name is known."""
    parser = OneLineParser(
        prog="lfm2np",
        description="The right answer for LFM2 models: a NumPy-only reference in exact arithmetic.",
        epilog=EXIT_CODES,
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"lfm2np {lfm2np.__version__}")
    parser.usage_exit_code = TargetError.exit_code  # 2 would be a verdict, of the command that may have been meant
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", prog="lfm2np")
    for name in (named,) if named in COMMANDS else COMMANDS:
        add: Callable[[Commands], None] = getattr(importlib.import_module(COMMANDS[name]), f"add_{name}")
        add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Errors become one line on stderr."""
    if sys.stderr is None:  # closed by the caller: errors must not go where the answer goes
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows only ASCII gets "?", not a crash
    lfm2np.keep_freed_memory()
    words = sys.argv[1:] if argv is None else argv
    if not words:
        print(START)
        return 0
    arguments = build_parser(words[0]).parse_args(words)
    could_not_run = TargetError.exit_code if arguments.is_verdict else 1  # 1 would be a verdict
    if sys.stdout is None:
        return fail("standard output is closed", could_not_run)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = warnings_shown_once()
            arguments.run(arguments)
        sys.stdout.flush()
    except Lfm2npError as error:
        return fail(f"{type(error).__name__}: {error}", error.exit_code)
    except MemoryError as error:
        return fail(f"out of memory {error}", could_not_run)
    except BrokenPipeError:
        discard_output()  # the reader has gone: say nothing more
        return could_not_run if arguments.is_verdict else 0  # no verdict was shown
    except OSError as error:
        discard_output()
        return fail(f"the output can't be written: {error}", could_not_run)
    return 0


def warnings_shown_once() -> Callable[..., None]:
    """Shows each text once, however many places of a command meet it."""
    shown: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in shown:
            shown.add(str(message))
            print(f"lfm2np: warning: {one_line(str(message))}", file=sys.stderr)

    return show
