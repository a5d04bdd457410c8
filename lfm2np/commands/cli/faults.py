"""`lfm2np faults`: does the suite catch bugs; and `lfm2np conformance list`: what is in it."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from lfm2np.commands.cli.shared.parser import Commands, add, add_command, require_at_least
from lfm2np.commands.cli.shared.terminal import print_result, progress_bar
from lfm2np.errors import ProofError, RequestError
from lfm2np.suite.faults import FAULTS, VARIANTS, Fault, Variant, by_name

PROFILES = ("quick", "ci")


def run_faults(arguments: argparse.Namespace) -> None:
    """The suite against faults and variants. ProofError if a fault survives, or a variant is flagged."""
    if arguments.scheduler is not None:
        run_scheduler_faults(arguments)
        return
    chosen = [by_name(name) for name in arguments.names] or [*FAULTS, *VARIANTS]
    require_at_least(arguments, jobs=1)
    if arguments.list:
        print_catalogue(arguments, chosen)
        return
    require_hypothesis()
    results = {}
    with progress_bar("faults") as show:
        for done, result in enumerate(tried(chosen, arguments.profile, arguments.jobs), start=1):
            results[result["name"]] = result
            show(done, len(chosen))
    faults = [{**about(each), **results[each.name]} for each in chosen if isinstance(each, Fault)]
    benign = [{**about(each), **results[each.name]} for each in chosen if isinstance(each, Variant)]
    if arguments.json:
        print(json.dumps({"profile": arguments.profile, "faults": faults, "benign": benign}))
    else:
        print_table(faults, benign, arguments.show)
    wrong = [row["name"] for row in faults if not row["caught"]] + [row["name"] for row in benign if row["caught"]]
    if wrong:
        raise ProofError(f"faults that survive, or variants that are flagged: {', '.join(wrong)}")


def tried(chosen: Sequence[Fault | Variant], profile: str, jobs: int) -> Iterator[dict[str, Any]]:
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(try_one, change, profile) for change in chosen]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def try_one(change: Fault | Variant, profile: str) -> dict[str, Any]:
    extra = dict(change.environment) if isinstance(change, Variant) else {}
    command = [sys.executable, "-m", "lfm2np.suite.fault_trial", change.name, profile]
    ended = subprocess.run(command, env={**os.environ, **extra}, capture_output=True, text=True, check=False)
    if ended.returncode:  # no verdict: wrong for a fault and for a variant
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        problem = f"no verdict: its process ended with code {ended.returncode}: {last}"
        return {"name": change.name, "caught": isinstance(change, Variant), "by": problem, "message": ended.stderr}
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def about(change: Fault | Variant) -> dict[str, Any]:
    if isinstance(change, Variant):
        return {"name": change.name, "sentence": change.sentence}
    seen_in = list(change.seen_in)
    return {"name": change.name, "section": change.section, "sentence": change.sentence, "seen_in": seen_in}


def print_table(faults: Sequence[dict[str, Any]], benign: Sequence[dict[str, Any]], show: bool) -> None:
    """Markdown, as it stands in docs/why/fault-table.md."""
    if faults:
        print("| | fault | seen in | caught by | examples | size |\n|---|---|---|---|---|---|")
    for row in faults:
        survives = f"**survives** {row.get('by', '')}".rstrip()
        how = [row["by"], str(row["examples"]), str(row["size"] or "")] if row["caught"] else [survives, "", ""]
        print_row(row, show, [row["section"], row["name"], ", ".join(row["seen_in"]), *how])
    caught = [row for row in faults if row["caught"]]
    if caught:
        median = statistics.median(row["examples"] for row in caught)
        quick = sum(row["profile"] == "quick" for row in caught)
        counts = f"{len(caught)} of {len(faults)} faults caught, {quick} of them under quick"
        print(f"\n{counts}; examples to the first failure: median {median:g}")
    if benign:
        print("\n| benign variant | what it changes | flagged |\n|---|---|---|")
    for row in benign:
        print_row(row, show, [row["name"], row["sentence"], f"**by {row['by']}**" if row["caught"] else "no"])


def print_row(row: dict[str, Any], show: bool, cells: Sequence[str]) -> None:
    """With `show` also how its fault was caught."""
    print(f"| {' | '.join(cells)} |")
    if show and row["caught"]:
        print(f"\n{row['message']}\n")


def print_catalogue(arguments: argparse.Namespace, chosen: Sequence[Fault | Variant]) -> None:
    faults = [about(change) for change in chosen if isinstance(change, Fault)]
    benign = [about(change) for change in chosen if isinstance(change, Variant)]
    entries = [
        (f"{change.section}  {change.name}", described(change.sentence, change.seen_in))
        if isinstance(change, Fault)
        else (f"-  {change.name}", change.sentence)
        for change in chosen
    ]
    print_entries(arguments, {"faults": faults, "benign": benign}, entries)


def described(sentence: str, seen_in: Sequence[str]) -> str:
    return f"{sentence} ({', '.join(seen_in)})" if seen_in else sentence


def print_entries(arguments: argparse.Namespace, fields: dict[str, Any], entries: Iterable[tuple[str, str]]) -> None:
    """A catalogue: each name, and below it what it says."""
    print_result(arguments, fields, "\n".join(f"{name}\n     {text}" for name, text in entries))


# --- of any scheduler


def run_scheduler_faults(arguments: argparse.Namespace) -> None:
    """The same for a scheduler of anyone's. ProofError if a fault survives that changed something."""
    require_hypothesis()
    from lfm2np.suite.schedulers.fault_trials import chosen, trials
    from lfm2np.suite.schedulers.suite import require_scheduler

    if arguments.list:
        listed = chosen(arguments.names, frozenset())
        about_each = [
            {"name": fault.name, "sentence": fault.sentence, "needs": fault.needs, "seen_in": fault.seen_in}
            for fault in listed
        ]
        entries = [(fault.name, described(fault.sentence, fault.seen_in)) for fault in listed]
        print_entries(arguments, {"faults": about_each}, entries)
        return
    try:
        lacks = require_scheduler(arguments.scheduler)
    except AssertionError as problem:
        raise RequestError(f"--scheduler {arguments.scheduler}: {problem}") from None
    faults = chosen(arguments.names, lacks)
    results: list[Any] = []
    with progress_bar("faults") as show:
        for result in trials(arguments.scheduler, faults, arguments.profile):
            show(len(results), len(faults))
            results.append(result)
    bare, *rows = results  # the first is of no fault
    if arguments.json:
        print(json.dumps({"scheduler": arguments.scheduler, "broken": sorted(bare.broken), "faults": rows}))
    else:
        print_scheduler_table(bare, rows, arguments.show)
    survivors = [row["name"] for row in rows if row["applied"] and not row["caught"]]
    if survivors:
        raise ProofError(f"faults that survive: {', '.join(survivors)}")


def print_scheduler_table(bare: Any, rows: Sequence[dict[str, Any]], show: bool) -> None:
    for line in bare.summary():
        print(line)
    if bare.broken:
        print(f"Broken without any fault, so not judged with one: {', '.join(bare.broken)}")
    print("\n| fault | seen in | caught by | programs |\n|---|---|---|---|")
    for row in rows:
        how = row["by"] if row["caught"] else "**survives**" if row["applied"] else "never met"
        print_row(row, show, [row["name"], ", ".join(row["seen_in"]), how, str(row["programs"])])
    caught = [row for row in rows if row["caught"]]
    met = [row for row in rows if row["applied"]]
    median = f"; programs to the first failure: median {statistics.median(r['programs'] for r in caught):g}"
    print(f"\n{len(caught)} of {len(met)} faults caught{median if caught else ''}")


def add_faults(commands: Commands) -> None:
    text = "inject bugs of real engines into this entry, and check that the property suite catches them"
    example = """lfm2np faults request-seed-ignored slot-index-wraps-modulo-2 --show
  lfm2np faults --scheduler package.module:factory"""
    parser = add_command(commands, "faults", run_faults, text, example, model=False)
    parser.add_argument("names", metavar="NAME", nargs="*", help="faults or variants (default: all)")
    add(parser, "--scheduler MODULE:FACTORY", "instead into this scheduler or block manager: see scheduler/protocol.py")
    add(parser, "--profile", "how many examples of each property (ci)", choices=PROFILES, default="ci")
    add(parser, "--jobs N", "processes at a time (as many as there are cores)", default=os.cpu_count() or 1)
    add(parser, "--list", "describe each, and run nothing")
    add(parser, "--show", "also print how each was caught: example and script")


# --- conformance list


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
