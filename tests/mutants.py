"""Mutation testing: python tests/mutants.py [--integers] [--only FILE ...] [--jobs N] [--json FILE] [--sample N].

Needs the extra `mutation`.

cosmic-ray's operators change one place of the files below at a time; the property suite, and nothing else, then runs in
a process of its own, first with few examples of every property, then with more. A mutant is killed when a property
fails, or does not end within the time limit. Mutants that differ in annotations or
docstrings only are the same program, and those that do not compile are none: neither is run. Those that
`equivalent_mutants.json` names, with reasons, are not run either, but counted. Exit code 1 if any other survives.
Hours on two cores; not part of CI.

`--integers`: of the fast arithmetic, by its comparison with integers alone (tests/truth/test_integers.py). What
survives it in a line that `equivalent_mutants.json` lists under "lines", with the reason why any change of it that
passes leaves all bits as they are, counts as equivalent: those are run, so none that is killed can be listed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
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
from mutants_of_exact import EXACT, IDLE, MEMORY, TOP, Replacing, equals_integers, prepare_comparison
from tqdm import tqdm

LOADED = (hypothesis, numpy, pytest, safetensors, tokenizers)  # before the fork, so that no child loads them again
FILES = [
    *sorted(str(path.relative_to(TOP)) for path in (TOP / "scheduler").glob("*.py") if path.name != "__init__.py"),
    *(
        f"lfm2np/{name}.py"
        for name in (
            "engine/engine",
            "engine/sequence",
            "engine/sampler",
            "engine/outputs",
            "engine/draft_model",
            "engine/proposals",
            "engine/acceptance",
            "engine/drafters",
            "engine/sampling/choice",
            "engine/sampling/logprobs",
            "engine/sampling/stop_strings",
            "engine/cache",
            "engine/step",
            "engine/uncached",
            "arithmetic/attention",
            "arithmetic/convolution_windows",
        )
    ),
]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
SECONDS = {"quick": 12, "ci": 120}  # of processor time for one property; the longest takes 2 and 15
FIRST = {  # the cheapest, and those that kill most, by where the mutant is; the longest beginning of its name counts
    "scheduler": (
        "wrong-calls-are-refused",
        "answers-are-judged",
        "corruption-is-seen",
        "scheduler-machine",
        "every-schedule",
    ),
    "lfm2np/engine/cache": ("cache-is-sized", "memory-is-bounded", "every-schedule", "memory-is-right"),
    "lfm2np/engine": (
        "runs-are-counted",
        "text-is-what-the-tokens-say",
        "failing-drafters-cost-drafts",
        "warm-prompts-are-taken",
        "outputs-are-those-alone",
        "wrong-calls-are-refused",
    ),
    "lfm2np/engine/draft_model": ("draft-models-propose", "drawn-drafts-are-of-their-place", "wrong-calls-are-refused"),
    "lfm2np/engine/outputs": ("runs-are-counted", "padding-is-counted", "outputs-are-those-alone"),
    "lfm2np/engine/sampler": ("failing-drafters-cost-drafts", "runs-are-counted", "text-is-what-the-tokens-say"),
    "lfm2np/engine/acceptance": ("rejection-is-exact", "guesses-use-their-own-noise", "runs-are-counted"),
    "lfm2np/engine/drafters": ("lookup-is-its-definition", "runs-are-counted", "wrong-calls-are-refused"),
    "lfm2np/engine/proposals": (
        "drafts-are-used",
        "failing-drafters-cost-drafts",
        "drawn-drafts-are-of-their-place",
    ),
    "lfm2np/engine/sampling": (
        "sampling-is-its-definition",
        "noise-is-of-its-place",
        "logprobs-are-their-definition",
        "guesses-use-their-own-noise",
        "wrong-calls-are-refused",
        "noise-differs",
    ),
    "lfm2np/engine/sampling/stop_strings": ("stop-strings-are-found", "text-is-what-the-tokens-say"),
    "lfm2np/engine/step": ("is-lfm2", "equals-reference", "runs-are-counted"),
    "lfm2np/engine/uncached": ("whole-sequences-are-ragged",),
    "lfm2np/arithmetic": (
        "attention-is-cut-to-size",
        "is-lfm2",
        "attention-in-pieces",
        "whole-sequences-are-ragged",
        "equals-reference",
        "overflow-stays-home",
    ),
}
LAST = (  # those that take longest
    "every-schedule",
    "large-schedules",
    "scheduler-machine",
    "speculative-is-plain",
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

    @property
    def rule(self) -> tuple[str, ...]:
        return self.file, self.before


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


def survives(file: str, source: str, profiles: Sequence[str]) -> bool:
    """In a forked process, which a limit of processor time ends: whether every property passes."""
    sys.path.insert(0, str(TOP))
    sys.meta_path.insert(0, Replacing(file, source))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS["quick"])
    from internal_properties.catalogue import EVERYTHING

    from lfm2np.suite.adapters import own
    from lfm2np.suite.runner import run_property

    first = FIRST[max((place for place in FIRST if file.startswith(place)), key=len)]
    rest = [prop.id for prop in EVERYTHING if prop.id not in first]
    order = [*first, *(name for name in rest if name not in LAST), *(name for name in rest if name in LAST)]
    ordered = sorted(EVERYTHING, key=lambda prop: order.index(prop.id))
    for profile in profiles:
        for prop in ordered:
            signal.setitimer(signal.ITIMER_PROF, SECONDS[profile])
            if run_property(prop, own, profile, shrink=False).status == "failed":
                return False
    return True


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
    return {0: "survived", -signal.SIGPROF: "timeout", IDLE: "timeout"}.get(code, "killed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="FILE", help="files, as scheduler/memory.py")
    parser.add_argument("--integers", action="store_true", help="the fast arithmetic against integers")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sample", type=int, metavar="N", help="of each file only so many mutants, the same each time")
    parser.add_argument("--quick", action="store_true", help="the few examples only; with --integers, no whole models")
    parser.add_argument("--json", metavar="FILE", help="write what came of each, as it goes; what it says is kept")
    arguments = parser.parse_args()
    profiles = ("quick",) if arguments.quick else ("quick", "ci")
    passes = partial(survives, profiles=profiles)
    arguments.only = arguments.only or (EXACT if arguments.integers else FILES)
    known = read(arguments.json)
    if arguments.integers:
        drawn = prepare_comparison()
        compared_quickly = partial(equals_integers, drawn=drawn, whole_models=False)
        passes = compared_quickly if arguments.quick else partial(equals_integers, drawn=drawn, whole_models=True)

    reasons = equivalent()

    def outcome(pair: tuple[Mutant, str]) -> tuple[Mutant, str]:
        mutant, source = pair
        is_listed = mutant.key in reasons or (arguments.integers and mutant.rule in reasons)
        if mutant.key in known or (is_listed and not arguments.integers):
            return mutant, known.get(mutant.key, "equivalent")
        status = tried(mutant, source, compared_quickly if is_listed and arguments.integers else passes)
        return mutant, "equivalent" if is_listed and status == "survived" else status

    for file in arguments.only if arguments.integers else ():
        if tried(Mutant(file, "none", 0, 0, "", ""), (TOP / file).read_text(), passes) != "survived":
            parser.error(f"{file}: the comparison fails without a mutant")
    everything = [one for file in arguments.only for one in sampled(mutants(file), arguments.sample)]
    seen = {key for mutant, _ in everything for key in (mutant.key, mutant.rule)}
    for key in sorted(set(reasons) - seen) if arguments.sample is None else ():
        if key[0] in arguments.only and (arguments.integers or len(key) == 3):
            print(f"listed as equivalent, but no mutant: {' -> '.join(key)}", file=sys.stderr)
    results: list[tuple[Mutant, str]] = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for result in tqdm(pool.map(outcome, everything), total=len(everything), disable=not sys.stderr.isatty()):
            results.append(result)
            if arguments.json:
                rows = [{**asdict(one), "status": what} for one, what in results]
                Path(f"{arguments.json}.part").write_text(json.dumps(rows, indent=1))
                Path(f"{arguments.json}.part").replace(arguments.json)  # whole, whenever this process ends
    show(results, arguments.only)
    return int(any(status == "survived" for _, status in results))


def sampled(everything: Iterator[tuple[Mutant, str]], count: int | None) -> list[tuple[Mutant, str]]:
    population = list(everything)
    return population if count is None or count >= len(population) else random.Random(0).sample(population, count)


def equivalent() -> dict[tuple[str, ...], str]:
    """The keys of the mutants, and the lines, of which the file beside this one says why no run can tell them apart."""
    reasons: dict[tuple[str, ...], str] = {}
    for file, rows in json.loads(EQUIVALENT.read_text()).items():
        for row in rows:
            keys = [(file, row["before"], row["after"])] if "after" in row else [(file, line) for line in row["lines"]]
            reasons |= dict.fromkeys(keys, row["reason"])
    return reasons


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
    """A row for each file, then the survivors; docs/why/proved.md has their sums."""
    print(
        "| file | changes | killed | the same program | survivors | killed of the others |\n|---|---|---|---|---|---|"
    )
    for file in [*files, ""]:
        counts = Counter(status for mutant, status in results if mutant.file == file or not file)
        killed, same, left = counts["killed"] + counts["timeout"], counts["equivalent"], counts["survived"]
        share = killed / max(1, killed + left)
        print(f"| {f'`{file}`' if file else 'all'} | {counts.total()} | {killed} | {same} | {left} | {share:.1%} |")
    for mutant, status in results:
        if status == "survived":
            print(f"survived: {mutant.file}:{mutant.line} {mutant.operator}\n    {mutant.before}\n    {mutant.after}")


if __name__ == "__main__":
    raise SystemExit(main())
