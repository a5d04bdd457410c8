"""`lfm2np faults`: does the suite catch bugs."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from lfm2np.cli.conformance import require_hypothesis
from lfm2np.cli.shared.parser import Commands, add_command
from lfm2np.cli.shared.terminal import progress_bar
from lfm2np.errors import ProofError, RequestError
from lfm2np.faults import FAULTS, VARIANTS, Fault, Variant, by_name

PROFILES = ("quick", "ci")


def run_faults(arguments: argparse.Namespace) -> None:
    """The suite against faults and variants. ProofError if a fault survives, or a variant is flagged."""
    chosen = [by_name(name) for name in arguments.names] or [*FAULTS, *VARIANTS]
    if arguments.jobs < 1:
        raise RequestError(f"--jobs {arguments.jobs}: expected at least 1")
    if arguments.list:
        print_catalogue(chosen, arguments.json)
        return
    require_hypothesis()
    results = {}
    with progress_bar("faults") as show:
        for done, result in enumerate(tried(chosen, arguments.profile, arguments.jobs), start=1):
            results[result["name"]] = result
            show(done, len(chosen))
    faults = [{**about(entry), **results[entry.name]} for entry in chosen if isinstance(entry, Fault)]
    benign = [{**about(entry), **results[entry.name]} for entry in chosen if isinstance(entry, Variant)]
    if arguments.json:
        print(json.dumps({"profile": arguments.profile, "faults": faults, "benign": benign}))
    else:
        print_table(faults, benign, arguments.show)
    wrong = [entry["name"] for entry in faults if not entry["caught"]] + [
        entry["name"] for entry in benign if entry["caught"]
    ]
    if wrong:
        raise ProofError(f"faults that survive, or variants that are flagged: {', '.join(wrong)}")


def tried(chosen: Sequence[Fault | Variant], profile: str, jobs: int) -> Iterator[dict[str, Any]]:
    """Each in a process of its own, as they end."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(try_one, entry, profile) for entry in chosen]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def try_one(entry: Fault | Variant, profile: str) -> dict[str, Any]:
    extra = dict(entry.environment) if isinstance(entry, Variant) else {}
    command = [sys.executable, "-m", "lfm2np.conformance.fault_trial", entry.name, profile]
    ended = subprocess.run(command, env={**os.environ, **extra}, capture_output=True, text=True, check=False)
    if ended.returncode:  # no verdict: wrong for a fault and for a variant
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        problem = f"no verdict: its process ended with code {ended.returncode}: {last}"
        return {"name": entry.name, "caught": isinstance(entry, Variant), "by": problem, "message": ended.stderr}
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def about(entry: Fault | Variant) -> dict[str, Any]:
    if isinstance(entry, Variant):
        return {"name": entry.name, "sentence": entry.sentence}
    return {"name": entry.name, "section": entry.section, "sentence": entry.sentence, "seen_in": list(entry.seen_in)}


def print_table(faults: Sequence[dict[str, Any]], benign: Sequence[dict[str, Any]], show: bool) -> None:
    """Markdown, as it stands in docs/why/fault-table.md."""
    if faults:
        print("| | fault | seen in | caught by | examples | size |")
        print("|---|---|---|---|---|---|")
    for entry in faults:
        survives = f"**survives** {entry.get('by', '')}".rstrip()
        how = [entry["by"], str(entry["examples"]), str(entry["size"] or "")] if entry["caught"] else [survives, "", ""]
        print(f"| {entry['section']} | {entry['name']} | {', '.join(entry['seen_in'])} | {' | '.join(how)} |")
        if show and entry["caught"]:
            print(f"\n{entry['message']}\n")
    caught = [entry for entry in faults if entry["caught"]]
    if caught:
        median = statistics.median(entry["examples"] for entry in caught)
        quick = sum(entry["profile"] == "quick" for entry in caught)
        counts = f"{len(caught)} of {len(faults)} faults caught, {quick} of them under quick"
        print(f"\n{counts}; examples to the first failure: median {median:g}")
    if benign:
        print("\n| benign variant | what it changes | flagged |")
        print("|---|---|---|")
    for entry in benign:
        print(
            f"| {entry['name']} | {entry['sentence']} | {'**by ' + entry['by'] + '**' if entry['caught'] else 'no'} |"
        )
        if show and entry["caught"]:
            print(f"\n{entry['message']}\n")


def print_catalogue(chosen: Sequence[Fault | Variant], as_object: bool) -> None:
    if as_object:
        faults = [about(entry) for entry in chosen if isinstance(entry, Fault)]
        print(
            json.dumps({"faults": faults, "benign": [about(entry) for entry in chosen if isinstance(entry, Variant)]})
        )
        return
    for entry in chosen:
        seen = f" ({', '.join(entry.seen_in)})" if isinstance(entry, Fault) and entry.seen_in else ""
        print(f"{entry.section if isinstance(entry, Fault) else '-'}  {entry.name}\n     {entry.sentence}{seen}")


def add_faults(commands: Commands) -> None:
    parser = add_command(
        commands,
        "faults",
        run_faults,
        "inject bugs of real engines into this entry, and check that the property suite catches them",
        "lfm2np faults request-seed-ignored slot-index-wraps-modulo-2 --show",
        model=False,
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="faults or variants (default: all)")
    parser.add_argument("--profile", choices=PROFILES, default="ci", help="how many examples of each property (ci)")
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        default=os.cpu_count() or 1,
        help="processes at a time (as many as there are cores)",
    )
    parser.add_argument("--list", action="store_true", help="describe each, and run nothing")
    parser.add_argument("--show", action="store_true", help="also print how each was caught: example and script")
