"""Mutation testing: python tests/mutants.py [--integers] [--only FILE ...] [--jobs N] [--json FILE].

Needs the extra `mutation`.

cosmic-ray's operators change one place of the files below at a time; the property suite, and nothing else, then runs in
a process of its own, first with few examples of every property, then with more. A mutant is killed when a property
fails, or does not end within the time limit. Mutants that differ in annotations or
docstrings only are the same program, and those that do not compile are none: neither is run. Those that
`equivalent_mutants.json` names, with reasons, are not run either, but counted. Exit code 1 if any other survives.
Hours on two cores; not part of CI.

`--integers`: of the fast arithmetic, by its comparison with integers alone (tests/numerics/test_integers.py).
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import json
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

if os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # read when NumPy is loaded; children are forked
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OPENBLAS_NUM_THREADS": "1"})

import hypothesis.stateful
import numpy
import pytest
import safetensors.numpy
import tokenizers
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from tqdm import tqdm

LOADED = (hypothesis, numpy, pytest, safetensors, tokenizers)  # before the fork, so that no child loads them again
TOP = Path(__file__).resolve().parent.parent
FILES = [
    *sorted(
        str(path.relative_to(TOP))
        for path in (TOP / "scheduler").glob("*.py")
        if path.name not in ("__init__.py", "benchmark.py")  # no behaviour; a measurement, which nothing calls
    ),
    *(
        f"lfm2np/{name}.py"
        for name in (
            "engine/engine",
            "engine/samples",
            "engine/answers",
            "engine/outputs",
            "engine/drafting",
            "engine/draft_model",
            "speculation/proposals",
            "speculation/acceptance",
            "speculation/drafters",
            "sampling/choice",
            "sampling/logprobs",
            "sampling/stop_strings",
            "network/cache",
            "network/step",
            "network/ragged",
            "numerics/attention",
            "numerics/ragged",
        )
    ),
]
EXACT = [
    f"lfm2np/numerics/{name}.py"
    for name in (
        "exact",
        "grids",
        "attention",
        "pieces",
        "ragged",
        "weight_grids",
        "matrix",
        "routing",
        "products/product",
        "products/tiles",
        "products/fastest",
    )
]
COMPARISON = TOP / "tests" / "numerics" / "test_integers.py"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
SECONDS = {"quick": 12, "ci": 120}  # of processor time for one property; the longest takes 2 and 15
WAIT = 300  # seconds of the comparison with integers, which takes 30
MEMORY = 4 << 30
FIRST = {  # the cheapest, and those that kill most, by where the mutant is; the longest beginning of its name counts
    "scheduler": (
        "wrong-calls-are-refused",
        "answers-are-judged",
        "corruption-is-seen",
        "pool-machine",
        "scheduler-machine",
        "engine-machine",
        "every-schedule",
    ),
    "lfm2np/network/cache": ("cache-is-sized", "memory-is-bounded", "every-schedule", "memory-is-right"),
    "lfm2np/engine": (
        "runs-are-counted",
        "text-is-not-taken-back",
        "failing-drafters-cost-drafts",
        "warm-prompts-are-taken",
        "outputs-are-those-alone",
        "wrong-calls-are-refused",
    ),
    "lfm2np/engine/draft_model": ("draft-models-propose", "drawn-drafts-are-of-their-place", "wrong-calls-are-refused"),
    "lfm2np/engine/outputs": ("runs-are-counted", "padding-is-counted", "outputs-are-those-alone"),
    "lfm2np/engine/drafting": ("failing-drafters-cost-drafts", "runs-are-counted", "text-is-what-the-tokens-say"),
    "lfm2np/speculation": ("rejection-is-exact", "guesses-use-their-own-noise", "runs-are-counted"),
    "lfm2np/speculation/drafters": ("lookup-is-its-definition", "runs-are-counted", "wrong-calls-are-refused"),
    "lfm2np/speculation/proposals": (
        "drafts-are-used",
        "failing-drafters-cost-drafts",
        "drawn-drafts-are-of-their-place",
    ),
    "lfm2np/sampling": (
        "sampling-is-its-definition",
        "noise-is-of-its-place",
        "logprobs-are-their-definition",
        "guesses-use-their-own-noise",
        "wrong-calls-are-refused",
        "noise-differs",
        "engine-seed-counts",
        "seed-of-its-own",
    ),
    "lfm2np/sampling/stop_strings": ("stop-strings-are-found", "text-is-not-taken-back"),
    "lfm2np/network": ("is-lfm2", "generates-lfm2", "batched-is-sequential", "runs-are-counted"),
    "lfm2np/network/ragged": ("whole-sequences-are-ragged",),
    "lfm2np/numerics": (
        "attention-is-cut-to-size",
        "is-lfm2",
        "generates-lfm2",
        "attention-in-pieces",
        "whole-sequences-are-ragged",
        "batched-is-sequential",
        "overflow-stays-home",
    ),
}
LAST = (  # those that take longest
    "every-schedule",
    "large-schedules",
    "engine-machine",
    "scheduler-machine",
    "speculative-is-plain",
    "forks",
    "equals-reference",
    "batches-fit",
    "cache-is-sized",
)


@dataclass(frozen=True)
class Mutant:
    file: str
    operator: str
    occurrence: int
    line: int
    before: str
    after: str

    @property
    def key(self) -> tuple[str, ...]:
        return self.file, self.before, self.after


def mutants(file: str) -> Iterator[tuple[Mutant, str]]:
    """Every mutant of a file that is another program, with its source."""
    source = (TOP / file).read_text()
    same = bare(source)
    for name in sorted(operator_names()):
        if get_operator(name).arguments():
            continue  # those that insert or replace named variables, off in cosmic-ray too unless asked for
        operator = get_operator(name)()
        occurrence = 0
        while (changed := mutate_code(source, operator, occurrence)) is not None:
            if bare(changed) not in (same, None):
                yield described(file, name, occurrence, source, changed), changed
            occurrence += 1


def bare(source: str) -> str | None:
    """The program without what does not run: annotations (postponed) and docstrings. None for no program at all."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None:
                setattr(node, field, ast.Constant(0))
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0].value = ast.Constant(0)
    return ast.dump(tree)


def described(file: str, operator: str, occurrence: int, source: str, changed: str) -> Mutant:
    pairs = zip(source.splitlines(), changed.splitlines(), strict=False)
    for line, (before, after) in enumerate(pairs, start=1):
        if before != after:
            return Mutant(file, operator.removeprefix("core/"), occurrence, line, before.strip(), after.strip())
    return Mutant(file, operator, occurrence, 0, "", "")


class Replacing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from another source than its file's."""

    def __init__(self, file: str, source: str) -> None:
        self.name, self.path, self.source = file.removesuffix(".py").replace("/", "."), TOP / file, source

    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return None

    def exec_module(self, module) -> None:  # type: ignore[no-untyped-def]
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)


def survives(file: str, source: str, profiles: Sequence[str]) -> bool:
    """In a forked process, which a limit of processor time ends: whether every property passes."""
    sys.path.insert(0, str(TOP))
    sys.meta_path.insert(0, Replacing(file, source))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS["quick"])
    from lfm2np.conformance.adapters import own
    from lfm2np.conformance.catalogue import ALL
    from lfm2np.conformance.runner import run_property

    first = FIRST[max((place for place in FIRST if file.startswith(place)), key=len)]
    rest = [one.id for one in ALL if one.id not in first]
    order = [*first, *(name for name in rest if name not in LAST), *(name for name in rest if name in LAST)]
    ordered = sorted(ALL, key=lambda one: order.index(one.id))
    for profile in profiles:
        for one in ordered:
            signal.setitimer(signal.ITIMER_PROF, SECONDS[profile])
            if run_property(one, own, profile, shrink=False).status == "failed":
                return False
    return True


def equals_integers(file: str, source: str) -> bool:
    """In a forked process: whether the fast arithmetic still equals integers, and no process hangs."""
    sys.path.insert(0, str(TOP))
    sys.meta_path.insert(0, Replacing(file, source))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.setitimer(signal.ITIMER_REAL, WAIT)  # a thread that waits for another takes no processor time
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.environ["HYPOTHESIS_PROFILE"] = "ci"
    return pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", str(COMPARISON)]) == 0


def tried(mutant: Mutant, source: str, passes: Callable[[str, str], bool]) -> str:
    """killed, timeout or survived."""
    child = os.fork()
    if child == 0:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        code = 1
        try:
            code = 0 if passes(mutant.file, source) else 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: "survived", -signal.SIGPROF: "timeout", -signal.SIGALRM: "timeout"}.get(code, "killed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="FILE", help="files, as scheduler/memory.py")
    parser.add_argument("--integers", action="store_true", help="the fast arithmetic against integers")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="the few examples only")
    parser.add_argument("--json", metavar="FILE", help="write what came of each, as it goes; what it says is kept")
    arguments = parser.parse_args()
    profiles = ("quick",) if arguments.quick else ("quick", "ci")
    passes = equals_integers if arguments.integers else partial(survives, profiles=profiles)
    arguments.only = arguments.only or (EXACT if arguments.integers else FILES)
    known = dict.fromkeys(equivalent(), "equivalent") | read(arguments.json)

    def outcome(pair: tuple[Mutant, str]) -> tuple[Mutant, str]:
        mutant, source = pair
        return mutant, known.get(mutant.key) or tried(mutant, source, passes)

    everything = [one for file in arguments.only for one in mutants(file)]
    for key in sorted(set(equivalent()) - {mutant.key for mutant, _ in everything}):
        if key[0] in arguments.only:
            print(f"listed as equivalent, but no mutant: {' -> '.join(key)}", file=sys.stderr)
    results: list[tuple[Mutant, str]] = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for result in tqdm(pool.map(outcome, everything), total=len(everything), disable=not sys.stderr.isatty()):
            results.append(result)
            if arguments.json:
                rows = [{**asdict(one), "status": what} for one, what in results]
                Path(arguments.json).write_text(json.dumps(rows, indent=1))
    show(results, arguments.only)
    return int(any(status == "survived" for _, status in results))


def equivalent() -> list[tuple[str, ...]]:
    """The keys of the mutants of which the file beside this one says why no run can tell them from the program."""
    listed = json.loads(EQUIVALENT.read_text())
    return [(file, one["before"], one["after"]) for file, rows in listed.items() for one in rows]


def read(file: str | None) -> dict[tuple[str, ...], str]:
    """What an earlier run found out: the kills; what survived is tried again."""
    if file is None or not Path(file).exists():
        return {}
    rows = json.loads(Path(file).read_text())
    return {
        (row["file"], row["before"], row["after"]): row["status"]
        for row in rows
        if row["status"] in ("killed", "timeout")
    }


def show(results: Sequence[tuple[Mutant, str]], files: Sequence[str]) -> None:
    print(f"{'':<28}{'mutants':>8}{'killed':>8}{'equivalent':>12}{'survived':>10}{'killed of the others':>22}")
    for file in [*files, ""]:
        counts = Counter(status for mutant, status in results if mutant.file == file or not file)
        killed, same, left = counts["killed"] + counts["timeout"], counts["equivalent"], counts["survived"]
        share = killed / max(1, killed + left)
        print(f"{file or 'all':<28}{counts.total():>8}{killed:>8}{same:>12}{left:>10}{share:>22.1%}")
    for mutant, status in results:
        if status == "survived":
            print(f"survived: {mutant.file}:{mutant.line} {mutant.operator}\n    {mutant.before}\n    {mutant.after}")


if __name__ == "__main__":
    raise SystemExit(main())
