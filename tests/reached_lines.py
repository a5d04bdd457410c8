"""Which lines of lfm2np/ and scheduler/ each test runs: PYTHONPATH=tests pytest -p reached_lines --lines FOLDER ...

Needs Python 3.12 (sys.monitoring). Each process of pytest-xdist adds lines of JSON to a file of its own in FOLDER: a
test, its seconds, and the lines of each file; what is run while tests are collected stands under the name "". What a
child process runs is not seen. `python tests/reached_lines.py FOLDER` prints the share of lines run, by package;
tests/mutants_of_all.py takes the folder to run only the tests that reach a mutant.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

TOP = Path(__file__).parent.parent
PACKAGES = ("lfm2np", "scheduler")


class Seen:
    """The lines run since the current test began, by file."""

    def __init__(self, top: Path) -> None:
        self.roots = tuple(f"{top / package}{os.sep}" for package in PACKAGES)
        self.begin = len(str(top)) + 1
        self.path = Path()
        self.lines = defaultdict[str, set[int]](set)
        self.monitoring: Any = vars(sys)["monitoring"]  # of Python 3.12
        tool = self.monitoring.PROFILER_ID
        self.monitoring.use_tool_id(tool, "lines by test")
        self.monitoring.register_callback(tool, self.monitoring.events.LINE, self.ran)
        self.monitoring.set_events(tool, self.monitoring.events.LINE)

    def ran(self, code: CodeType, line: int) -> Any:
        """Once for each line and test: it is asked again after `restart_events`."""
        if code.co_filename.startswith(self.roots):
            self.lines[code.co_filename[self.begin :]].add(line)
        return self.monitoring.DISABLE

    def write_to(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}.jsonl"

    def end(self, test: str, seconds: float) -> None:
        files = {name: sorted(lines) for name, lines in self.lines.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"test": test, "seconds": seconds, "files": files}) + "\n")
        self.lines.clear()
        self.monitoring.restart_events()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self.end("", 0.0)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        began = time.monotonic()
        result = yield
        self.end(item.nodeid, time.monotonic() - began)
        return result


SEEN = Seen(Path.cwd()) if __name__ == "reached_lines" else None  # before pytest imports what it tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", type=Path, metavar="FOLDER", help="which lines each test runs, as lines of JSON")


def pytest_configure(config: pytest.Config) -> None:
    is_controller = getattr(config.option, "numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ
    if SEEN and config.option.lines and not is_controller:
        SEEN.write_to(config.option.lines)
        config.pluginmanager.register(SEEN)


def records(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def executable(path: Path) -> set[int]:
    """The lines of a file that have bytecode."""
    waiting, found = [compile(path.read_text(encoding="utf-8"), str(path), "exec")], set[int]()
    while waiting:
        code = waiting.pop()
        found |= {line for _, _, line in code.co_lines() if line}
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--top", type=Path, default=TOP, help="the checkout that the tests were of (this one)")
    arguments = parser.parse_args()
    run = defaultdict[str, set[int]](set)
    for record in records(arguments.folder):
        for name, lines in record["files"].items():
            run[name].update(lines)
    sums = defaultdict[str, list[int]](lambda: [0, 0])
    for path in (path for package in PACKAGES for path in sorted((arguments.top / package).rglob("*.py"))):
        name = str(path.relative_to(arguments.top))
        lines = executable(path)
        parts = name.split("/")
        for group in (parts[1] if parts[0] == "lfm2np" and len(parts) > 2 else parts[0], "all"):
            sums[group][0] += len(lines & run[name])
            sums[group][1] += len(lines)
    for group, (seen, all_lines) in sums.items():
        print(f"{group:12} {seen:6} of {all_lines:6} lines  {seen / all_lines:.1%}")


if __name__ == "__main__":
    main()
