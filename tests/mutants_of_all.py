"""Mutants of all packages: python tests/mutants_of_all.py [--count N] [--seed N] [--json FILE].

Needs the extra `mutation`. Draws files by their lines and in each one place that cosmic-ray's operators change, then
runs tests in a copy of the checkout until one fails: first the test files that name the module, then those of its
folder, then those of its package. What is marked night, peers, browser, docs or clients is not run. tests/mutants.py
holds the engine and the scheduler to the property suite alone.

Hours on one core. Exit code 1 if any survives.
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
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from mutants import TOP, Mutant, bare, described
from tqdm import tqdm

COPIED = ("lfm2np", "scheduler", "tests", "fixtures", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
LEFT_OUT = "not night and not peers and not browser and not docs and not clients"
SECONDS = 900  # of the tests of one mutant, each time


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


def tests_of(file: str) -> Iterator[list[str]]:
    """Ever more: files that name the module, its folder, its package."""
    parts = Path(file).with_suffix("").parts
    module, tests = ".".join(parts), sorted((TOP / "tests").rglob("test_*.py"))
    folders = parts[1:-1] if parts[0] == "lfm2np" else parts[:1]
    named = [path for path in tests if module in path.read_text(encoding="utf-8")]
    yield [str(path.relative_to(TOP)) for path in named]
    for depth in sorted({len(folders), 1}, reverse=True):
        folder = TOP.joinpath("tests", *folders[:depth])
        if folders and folder.is_dir():
            yield [str(folder.relative_to(TOP))]
    yield [str(path.relative_to(TOP)) for path in (TOP / "tests").glob("test_*.py")]


def outcome(mutant: Mutant, source: str, copy: Path) -> str:
    """killed, with the tests that did it, or survived."""
    changed = copy / mutant.file
    before = changed.read_bytes()
    changed.write_text(source, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(copy), "OPENBLAS_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "ci"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", LEFT_OUT]
    try:
        for tests in filter(None, tests_of(mutant.file)):
            code = subprocess.run(
                [*command, *tests], cwd=copy, env=environment, capture_output=True, timeout=SECONDS, check=False
            ).returncode
            if code not in (0, 5):  # 5: no test was left
                return f"killed by {tests[0]}{' ...' if len(tests) > 1 else ''}"
    except subprocess.TimeoutExpired:
        return "killed by the time limit"
    finally:
        changed.write_bytes(before)
    return "survived"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, metavar="N", help="mutants (200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a line of JSON a mutant, as they are tried")
    arguments = parser.parse_args()
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            (shutil.copytree if (TOP / name).is_dir() else shutil.copy)(TOP / name, Path(folder, name))
        for mutant, source in tqdm(drawn(arguments.count, arguments.seed), total=arguments.count):
            status = outcome(mutant, source, Path(folder))
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
