"""`lfm2np replay`: a trace's schedule once more, without the model."""

from __future__ import annotations

import argparse
import dataclasses
import json

from lfm2np.cli.shared.parser import AddCommand
from lfm2np.cli.shared.terminal import read_file
from lfm2np.errors import ProofError
from scheduler import TraceError, replay


def run_replay(arguments: argparse.Namespace) -> None:
    try:
        result = replay(read_file(arguments.trace).splitlines())
    except TraceError as error:
        raise ProofError(f"{arguments.trace}: {error}") from None
    if arguments.json:
        print(json.dumps(dataclasses.asdict(result)))
        return
    print(
        f"replayed {result.steps} steps, {result.requests} requests, {result.scheduled_tokens} scheduled and "
        f"{result.tokens} sampled tokens, {result.preemptions} preemptions: every plan, token and ending as recorded"
    )


def add_replay(command: AddCommand) -> None:
    sub = command(
        "replay",
        run_replay,
        "re-execute a trace's schedule without the model, and confirm plans, tokens and endings",
        "lfm2np replay trace.jsonl",
        model=False,
    )
    sub.add_argument("trace", metavar="TRACE", help="a file written by generate --trace")
