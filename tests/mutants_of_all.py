"""Mutants of all packages: python tests/mutants_of_all.py FOLDER [--count N] [--seed N] [--json FILE].

Needs the extra `mutation`, and a folder of tests/reached_lines.py. Draws files by their lines and in each one place
that cosmic-ray's operators change, then runs tests in a copy of the checkout until one fails: first those that run
the line, the quickest first, then the test files that name the module. What is marked night, peers, browser, docs or
clients is not run. tests/mutants.py holds the engine and the scheduler to the property suite alone.

Some 20 seconds a mutant on one core. Exit code 1 if any survives.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from mutants import TOP, Mutant, bare, described
from reached_lines import records
from tqdm import tqdm

COPIED = ("lfm2np", "scheduler", "tests", "fixtures", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
LEFT_OUT = "not night and not peers and not browser and not docs and not clients"
SECONDS = 900  # of the tests of one mutant, each time
VARIABLES = {"OPENBLAS_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "ci", "PYTHONDONTWRITEBYTECODE": "1"}


def drawn(count: int, seed: int) -> Iterator[tuple[Mutant, str]]:
    """Mutants that are other programs, each of a file drawn by its lines, with the file's source."""
    rng = random.Random(seed)
    files = [path for top in ("lfm2np", "scheduler") for path in sorted((TOP / top).rglob("*.py"))]
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in files]
    while count:
        path = rng.choices(files, lines)[0]
        source = path.read_text(encoding="utf-8")
        places = [(name, number) for name, count in places_in(source).items() for number in range(count)]
        name, number = rng.choice(places) if places else ("", 0)
        changed = mutate_code(source, get_operator(name)(), number) if name else None
        if changed is not None and bare(changed) not in (bare(source), None):
            yield described(str(path.relative_to(TOP)), name, number, source, changed), changed
            count -= 1


@cache
def places_in(source: str) -> Counter[str]:
    """How many each operator has that needs no arguments."""
    operators = {name: get_operator(name) for name in sorted(operator_names())}
    plain = {name: operator() for name, operator in operators.items() if not operator.arguments()}
    counts, waiting = Counter[str](), [get_ast(source)]
    while waiting:
        node = waiting.pop()
        counts.update({name: len(list(operator.mutation_positions(node))) for name, operator in plain.items()})
        waiting += getattr(node, "children", [])
    return counts


def reaching(folder: Path, mutants: Sequence[Mutant]) -> dict[tuple[str, int], list[str]]:
    """The tests that run each mutant's line, quickest first; where none does, those that run any line of its file."""
    wanted = {mutant.file for mutant in mutants}
    by_line, by_file = defaultdict[tuple[str, int], list[str]](list), defaultdict[str, list[str]](list)
    for record in sorted(records(folder), key=lambda each: float(each["seconds"])):
        for file in wanted & record["files"].keys() if record["test"] else ():
            by_file[file].append(record["test"])
            for line in record["files"][file]:
                by_line[file, line].append(record["test"])
    return {(each.file, each.line): by_line[each.file, each.line] or by_file[each.file] for each in mutants}


def naming(file: str) -> list[str]:
    """Test files that name the module, or else the folder of its tests: of what child processes run, none is known."""
    parts = Path(file).with_suffix("").parts
    module = ".".join(parts)
    named = [path for path in sorted((TOP / "tests").rglob("test_*.py")) if module in path.read_text(encoding="utf-8")]
    folder = TOP.joinpath("tests", *parts[parts[0] == "lfm2np" : -1])
    return [str(path.relative_to(TOP)) for path in named or [folder] if path.exists()]


def outcome(mutant: Mutant, source: str, reached: list[str], copy: Path) -> str:
    """killed, with the tests that did it, or survived."""
    changed = copy / mutant.file
    before = changed.read_bytes()
    changed.write_text(source, encoding="utf-8")
    environment = {**os.environ, **VARIABLES, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", LEFT_OUT, "@tests.txt"]
    try:
        for kind, tests in (("that run its line or file", reached), ("that name it", naming(mutant.file))):
            copy.joinpath("tests.txt").write_text("\n".join(tests), encoding="utf-8")
            if not tests:
                continue
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=SECONDS, check=False)
            if done.returncode not in (0, 5):  # 5: no test was left
                return f"killed by tests {kind}"
    except subprocess.TimeoutExpired:
        return "killed by the time limit"
    finally:
        changed.write_bytes(before)
    return "survived"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="which lines each test runs")
    parser.add_argument("--count", type=int, default=200, metavar="N", help="mutants (200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a line of JSON a mutant, as they are tried")
    arguments = parser.parse_args()
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            (shutil.copytree if (TOP / name).is_dir() else shutil.copy)(TOP / name, Path(folder, name))
        everything = list(drawn(arguments.count, arguments.seed))
        reached = reaching(arguments.folder, [mutant for mutant, _ in everything])
        for mutant, source in tqdm(everything):
            status = outcome(mutant, source, reached[mutant.file, mutant.line], Path(folder))
            survivors += status == "survived"
            if status == "survived":
                print(f"survived: {mutant.file}:{mutant.line}\n    {mutant.before}\n    {mutant.after}", flush=True)
            if arguments.json:
                with arguments.json.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps({**asdict(mutant), "status": status}) + "\n")
    print(f"{arguments.count} mutants, {arguments.count - survivors} killed, {survivors} survive")
    return int(survivors > 0)


if __name__ == "__main__":
    raise SystemExit(main())
