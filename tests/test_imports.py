"""Eight packages: each imports only from those above it in the table, and nothing runs in a circle.

An import counts wherever it stands, inside a function and under TYPE_CHECKING too: whoever reads the file must know the
other. Not counted is what stands in a string (faults name functions so, processes are started so), and that Python runs
a package's `__init__` before any of its modules.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
PACKAGES = (
    "truth",  # what has to be believed: the network for one sequence, in integers
    "arithmetic",  # the same operations fast
    "checkpoint",  # files -> config, weights, tokens, rendered chats
    "engine",  # paged, ragged, continuously batched
    "oracle",  # verdicts on other engines
    "suite",  # property-based: engines, schedulers, fuzz, itself
    "teaching",  # a run -> pictures, lessons, laboratory
    "commands",  # the command line, serve, simulate
)
ALL_USE = ("lfm2np.errors", "lfm2np.system", "lfm2np.values")  # which import nothing but each other
PUBLIC = "lfm2np"  # the names of the engine and, lazily, of what stands on it: for those above it
SCHEDULER_FROM = "engine"  # what stands above it knows of no scheduler, but for its checksums of lines


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(TOP).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {module_of(path): path for folder in ("lfm2np", "scheduler") for path in sorted((TOP / folder).rglob("*.py"))}


def package_of(module: str) -> str | None:
    """The name in PACKAGES, or None for what stands beside them."""
    parts = module.split(".")
    return parts[1] if parts[0] == "lfm2np" and len(parts) > 1 and parts[1] in PACKAGES else None


def may_import(module: str, other: str) -> bool:
    package, theirs = package_of(module), package_of(other)
    if other in ALL_USE or other.partition(".")[0] == module.partition(".")[0] == "scheduler":
        return True
    if module in ALL_USE or module.startswith("scheduler"):
        return False
    if module == PUBLIC:
        return theirs is None or PACKAGES.index(theirs) <= PACKAGES.index("suite")
    if package is None:  # __main__
        return True
    if other == PUBLIC:
        return PACKAGES.index(package) > PACKAGES.index("engine")
    if other.startswith("scheduler"):
        return PACKAGES.index(package) >= PACKAGES.index(SCHEDULER_FROM)
    return theirs is not None and PACKAGES.index(theirs) <= PACKAGES.index(package)


def imported(source: str) -> Iterator[str]:
    """The modules that a file imports, wherever it does so."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are written out in full"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in SOURCES else node.module


@functools.cache
def imports() -> dict[str, set[str]]:
    """By module; read once, by the process that needs it."""
    return {module: set(imported(path.read_text(encoding="utf-8"))) for module, path in SOURCES.items()}


def wrong_ways(imports: dict[str, set[str]]) -> list[str]:
    return [
        f"{module} -> {other}"
        for module, others in imports.items()
        for other in sorted(others & SOURCES.keys() - {module})
        if not may_import(module, other)
    ]


def test_there_are_these_packages_and_no_others():
    folders = {path.parent.name for path in (TOP / "lfm2np").glob("*/__init__.py")}
    assert folders == set(PACKAGES)
    assert {module for module in SOURCES if module.count(".") == 1 and package_of(module) is None} <= {
        "lfm2np.__main__",
        "lfm2np.testing",  # for the tests of others: a name as public as the package's own
        *ALL_USE,
        *(module for module in SOURCES if module.startswith("scheduler.")),
    }


def test_imports_run_up_the_table():
    assert wrong_ways(imports()) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    from lfm2np.oracle.check import check\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lfm2np.commands.cli import main\n",
        "import lfm2np\n",
    ],
)
def test_an_import_of_what_stands_below_is_seen(source: str):
    """The control: inside a function, of a type only, and of the public names."""
    assert len(wrong_ways({"lfm2np.engine.step": set(imported(source))})) == 1


def test_no_module_imports_itself_through_others():
    at_once = {module: others for module, others in imports().items() if module != PUBLIC}  # which imports when asked
    graph = {module: others & SOURCES.keys() - {module} for module, others in at_once.items()}
    TopologicalSorter(graph).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter({**graph, "lfm2np.errors": {"lfm2np.engine.engine"}}).prepare()


def test_the_scheduler_needs_the_standard_library_only():
    for module, others in imports().items():
        if module.startswith("scheduler"):
            foreign = {other.partition(".")[0] for other in others} - sys.stdlib_module_names - {"scheduler"}
            assert not foreign, module


def test_every_package_says_what_lives_there():
    for module, path in SOURCES.items():
        if path.name == "__init__.py":
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            assert docstring, module
