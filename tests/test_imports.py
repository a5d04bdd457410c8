"""The house: which room may import which, read off the source; no circle.

An import counts wherever it stands, inside a function and under TYPE_CHECKING too: whoever reads the file must know the
other. Not counted is what stands in a string (faults name functions so, processes are started so), and that Python runs
a room's `__init__` before any of its modules.
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

# What every room may use, and what each may use beside that: only rooms that stand before it in this table, so that the
# table itself shows that there is no circle of rooms. A module's room is the longest name that covers it.
ALL_USE = {
    "lfm2np.child_processes",
    "lfm2np.errors",
    "lfm2np.progress",
    "lfm2np.system",
    "lfm2np.values",
    "lfm2np.whole_file",
}
READ = {"lfm2np.checkpoint", "lfm2np.truth", "lfm2np.arithmetic"}
COMPUTE = {*READ, "lfm2np.truth.reference", "lfm2np.engine"}
RUN = {*COMPUTE, "lfm2np.engine.sampling", "lfm2np.engine", "lfm2np.engine", "lfm2np.engine.work", "lfm2np.engine"}
CALL = {*RUN, "lfm2np.engine.loading", "lfm2np.malloc", "lfm2np", "scheduler"}
ORACLE = {"lfm2np.oracle", "lfm2np.oracle.engines", "lfm2np.oracle.judging"}
PROTOCOL = "lfm2np.oracle.engines.protocol"
SUITE = [f"lfm2np.suite.{name}" for name in ("draining", "strategies", "properties")]
SCHEDULERS, SHRINKING = "lfm2np.suite.schedulers", "lfm2np.suite.shrinking"
ROOMS: dict[str, set[str]] = {
    "scheduler": set(),
    "lfm2np.before_numpy": set(),
    "lfm2np.child_processes": set(),
    "lfm2np.errors": set(),
    "lfm2np.progress": set(),
    "lfm2np.system": set(),
    "lfm2np.values": set(),
    "lfm2np.whole_file": set(),
    "lfm2np.malloc": set(),
    "lfm2np.arithmetic": set(),
    "lfm2np.truth": {"lfm2np.arithmetic"},
    "lfm2np.checkpoint": {"lfm2np.truth", "lfm2np.arithmetic"},
    "lfm2np.truth.reference": {"lfm2np.truth", "lfm2np.arithmetic"},
    "lfm2np.commands.cli.trusted": set(),
    "lfm2np.engine": {"lfm2np.truth", "lfm2np.arithmetic", "lfm2np.truth.reference", "scheduler"},
    "lfm2np.engine.sampling": READ,
    "lfm2np.suite.plain": {"lfm2np.engine.sampling"},
    "lfm2np.engine": {*READ, "lfm2np.engine.sampling"},
    "lfm2np.engine.work": {"lfm2np.checkpoint", "scheduler"},
    "lfm2np.engine": {*COMPUTE, "lfm2np.engine.sampling", "lfm2np.engine", "scheduler"},
    "lfm2np.engine": {*COMPUTE, "lfm2np.engine.work"},
    "lfm2np.engine.loading": RUN,
    "lfm2np.engine.llm": {*RUN, "lfm2np.engine.loading"},
    "lfm2np": {*RUN, "lfm2np.engine.loading", "lfm2np.engine.llm", "lfm2np.before_numpy", "lfm2np.malloc"},
    PROTOCOL: {"lfm2np.engine.sampling"},
    "lfm2np.suite.faults": set(),
    "lfm2np.oracle.engines": {*READ, "lfm2np.engine.sampling", "lfm2np.engine.work", PROTOCOL, "scheduler"},
    "lfm2np.oracle.judging": {
        *COMPUTE,
        "lfm2np.engine.sampling",
        "lfm2np.engine.work",
        "lfm2np.engine",
        "lfm2np.oracle.engines",
    },
    "lfm2np.oracle": {*CALL, "lfm2np.oracle.engines", "lfm2np.oracle.judging", PROTOCOL},
    "lfm2np.oracle.report": {"lfm2np", "lfm2np.arithmetic"},
    "lfm2np.oracle.reports": {*ORACLE, "lfm2np", "lfm2np.arithmetic"},
    "lfm2np.oracle.api": {*CALL, *ORACLE, "lfm2np.oracle.reports", PROTOCOL},
    "lfm2np.oracle.compare": {*CALL, *ORACLE, "lfm2np.oracle.reports"},
    "lfm2np.oracle.vet": {*CALL, *ORACLE, "lfm2np.oracle.reports"},
    "lfm2np.oracle.rollouts": {*CALL, *ORACLE, "lfm2np.oracle.reports", "lfm2np.oracle.compare"},
    "lfm2np.oracle.locate": {*CALL, "lfm2np.oracle.judging"},
    "lfm2np.oracle.recorders": {*CALL, *ORACLE, "lfm2np.oracle.locate", PROTOCOL},
    "lfm2np.oracle.wrong_engine": {*CALL, PROTOCOL, "lfm2np.oracle.recorders"},
    "lfm2np.oracle.vectors": {*CALL, *ORACLE, "lfm2np.oracle.locate", "lfm2np.oracle.recorders"},
    SUITE[0]: {PROTOCOL},
    SUITE[1]: {*CALL, PROTOCOL, *SUITE[:1]},
    SUITE[2]: {*CALL, *ORACLE, "lfm2np.suite.plain", PROTOCOL, *SUITE[:2]},
    SHRINKING: set(),
    SCHEDULERS: {PROTOCOL, SHRINKING, "scheduler"},
    "lfm2np.suite.fuzz": {*CALL, *ORACLE, "lfm2np.oracle.reports", PROTOCOL},
    "lfm2np.commands.simulate": {"scheduler"},
    "lfm2np.suite.itself": {*CALL, *ORACLE, "lfm2np.oracle.reports", "lfm2np.suite.fuzz", PROTOCOL},
    "lfm2np.suite": {
        *CALL,
        *(PROTOCOL, *SUITE, SHRINKING, SCHEDULERS),
        *("lfm2np.suite.faults", "lfm2np.suite.itself", "lfm2np.oracle.engines"),
    },
    "lfm2np.teaching.drawings.runs": {*CALL, "lfm2np.suite.faults"},
    "lfm2np.teaching.drawings.page": {"lfm2np.teaching.drawings.runs"},
    "lfm2np.teaching.drawings.views": {"scheduler", "lfm2np.teaching.drawings.runs", "lfm2np.teaching.drawings.page"},
    "lfm2np.teaching.drawings": {
        *CALL,
        SCHEDULERS,
        *(f"lfm2np.teaching.drawings.{name}" for name in ("runs", "page", "views")),
    },
    "lfm2np.commands.serve": CALL,
    "lfm2np.teaching.lab": {
        *CALL,
        "lfm2np.suite.faults",
        "lfm2np.teaching.drawings",
        *(f"lfm2np.teaching.drawings.{name}" for name in ("runs", "page", "views")),
        "lfm2np.commands.serve",
    },
    "lfm2np.commands.simulate.page": {"lfm2np.commands.simulate", "lfm2np.oracle.report"},
    "lfm2np.commands.bench.sides": {*CALL, *ORACLE, "lfm2np.commands.serve"},
    "lfm2np.commands.bench": {
        *CALL,
        "lfm2np.commands.bench.sides",
        "lfm2np.commands.serve",
        "lfm2np.commands.simulate",
    },
}
ROOMS["lfm2np.commands.cli.shared"] = set(ROOMS)  # all of them
ROOMS["lfm2np.commands.cli"] = set(ROOMS)
ROOMS["lfm2np.__main__"] = {"lfm2np.commands.cli"}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(TOP).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {module_of(path): path for folder in ("lfm2np", "scheduler") for path in sorted((TOP / folder).rglob("*.py"))}


def room_of(module: str) -> str:
    """The longest name of ROOMS that covers it; `lfm2np` itself covers only its own `__init__`."""
    matching = [name for name in ROOMS if module == name or (module.startswith(f"{name}.") and name != "lfm2np")]
    assert matching, f"{module}: in no room of the table"
    return max(matching, key=len)


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
        for other in sorted(others & SOURCES.keys())
        if room_of(other) not in {room_of(module), *ROOMS[room_of(module)], *ALL_USE}
    ]


def test_the_table_itself_runs_one_way():
    order = list(ROOMS)
    for room, others in ROOMS.items():
        assert room in SOURCES, f"{room}: there is no such room"
        assert all(order.index(other) < order.index(room) for other in others), room


def test_imports_run_down():
    assert wrong_ways(imports()) == []


def test_an_import_upwards_is_seen():
    """The control: inside a function, and of a type only."""
    upwards = "def f():\n    from lfm2np.engine.engine import Engine\n"
    typing_only = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lfm2np.commands.cli import main\n"
    for source in (upwards, typing_only):
        assert len(wrong_ways({"lfm2np.engine.step": set(imported(source))})) == 1


def test_no_module_imports_itself_through_others():
    graph = {module: others & SOURCES.keys() - {module} for module, others in imports().items()}
    TopologicalSorter(graph).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter({**graph, "lfm2np.errors": {"lfm2np.engine.engine"}}).prepare()


def test_the_scheduler_needs_the_standard_library_only():
    for module, others in imports().items():
        if room_of(module) == "scheduler":
            foreign = {other.partition(".")[0] for other in others} - sys.stdlib_module_names - {"scheduler"}
            assert not foreign, module


def test_every_room_says_what_lives_there():
    for module, path in SOURCES.items():
        if path.name == "__init__.py":
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            assert docstring, module
