"""`lfm2np faults`: does the suite bite."""

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
    faults = [{**about(one), **results[one.name]} for one in chosen if isinstance(one, Fault)]
    benign = [{**about(one), **results[one.name]} for one in chosen if isinstance(one, Variant)]
    if arguments.json:
        print(json.dumps({"profile": arguments.profile, "faults": faults, "benign": benign}))
    else:
        print_table(faults, benign, arguments.show)
    wrong = [one["name"] for one in faults if not one["caught"]] + [one["name"] for one in benign if one["caught"]]
    if wrong:
        raise ProofError(f"faults that survive, or variants that are flagged: {', '.join(wrong)}")


def tried(chosen: Sequence[Fault | Variant], profile: str, jobs: int) -> Iterator[dict[str, Any]]:
    """Each in a process of its own, as they end."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(try_one, one, profile) for one in chosen]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def try_one(one: Fault | Variant, profile: str) -> dict[str, Any]:
    extra = dict(one.environment) if isinstance(one, Variant) else {}
    command = [sys.executable, "-m", "lfm2np.conformance.fault_trial", one.name, profile]
    ended = subprocess.run(command, env={**os.environ, **extra}, capture_output=True, text=True, check=False)
    if ended.returncode:  # no verdict: wrong for a fault and for a variant
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        problem = f"no verdict: its process ended with code {ended.returncode}: {last}"
        return {"name": one.name, "caught": isinstance(one, Variant), "by": problem, "message": ended.stderr}
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def about(one: Fault | Variant) -> dict[str, Any]:
    if isinstance(one, Variant):
        return {"name": one.name, "sentence": one.sentence}
    return {"name": one.name, "section": one.section, "sentence": one.sentence, "seen_in": list(one.seen_in)}


def print_table(faults: Sequence[dict[str, Any]], benign: Sequence[dict[str, Any]], show: bool) -> None:
    """Markdown, as it stands in docs/why/fault-table.md."""
    if faults:
        print("| | fault | seen in | caught by | examples | size |")
        print("|---|---|---|---|---|---|")
    for one in faults:
        survives = f"**survives** {one.get('by', '')}".rstrip()
        how = [one["by"], str(one["examples"]), str(one["size"] or "")] if one["caught"] else [survives, "", ""]
        print(f"| {one['section']} | {one['name']} | {', '.join(one['seen_in'])} | {' | '.join(how)} |")
        if show and one["caught"]:
            print(f"\n{one['message']}\n")
    caught = [one for one in faults if one["caught"]]
    if caught:
        median = statistics.median(one["examples"] for one in caught)
        quick = sum(one["profile"] == "quick" for one in caught)
        counts = f"{len(caught)} of {len(faults)} faults caught, {quick} of them under quick"
        print(f"\n{counts}; examples to the first failure: median {median:g}")
    if benign:
        print("\n| benign variant | what it changes | flagged |")
        print("|---|---|---|")
    for one in benign:
        print(f"| {one['name']} | {one['sentence']} | {'**by ' + one['by'] + '**' if one['caught'] else 'no'} |")
        if show and one["caught"]:
            print(f"\n{one['message']}\n")


def print_catalogue(chosen: Sequence[Fault | Variant], as_object: bool) -> None:
    if as_object:
        faults = [about(one) for one in chosen if isinstance(one, Fault)]
        print(json.dumps({"faults": faults, "benign": [about(one) for one in chosen if isinstance(one, Variant)]}))
        return
    for one in chosen:
        seen = f" ({', '.join(one.seen_in)})" if isinstance(one, Fault) and one.seen_in else ""
        print(f"{one.section if isinstance(one, Fault) else '-'}  {one.name}\n     {one.sentence}{seen}")


def add_faults(commands: Commands) -> None:
    parser = add_command(
        commands,
        "faults",
        run_faults,
        "put real engines' bugs into this one, and see the property suite catch them",
        "lfm2np faults request-seed-ignored slot-index-wraps-modulo-2 --show",
        model=False,
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="faults or variants (default: all of both)")
    parser.add_argument("--profile", choices=PROFILES, default="ci", help="examples of each property (ci)")
    parser.add_argument("--jobs", metavar="N", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--list", action="store_true", help="print what each is, and run nothing")
    parser.add_argument("--show", action="store_true", help="print also how each was caught: example and script")
