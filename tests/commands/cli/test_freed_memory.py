"""Memory that arrays leave is used again, unless the environment says otherwise."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from lfm2np import system

pytestmark = pytest.mark.slow

IS_GLIBC = platform.libc_ver()[0] == "glibc"
FAULTS = """
import json, resource, sys
import numpy as np
from lfm2np.system import keep_freed_memory

def step():
    arrays = [np.ones(2**20) for _ in range(12)]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory() if sys.argv[1] == "keep" else None
step()
step()
print(json.dumps([kept, faults()]))
"""


def faults(argument: str) -> tuple[bool | None, int]:
    """What the call says, and how often the system mapped memory in ten steps of a hundred megabytes each."""
    environment = {name: value for name, value in os.environ.items() if name not in system.ENVIRONMENT}
    command = [sys.executable, "-c", FAULTS, argument]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    kept, count = json.loads(done.stdout)
    return kept, count


@pytest.mark.skipif(not IS_GLIBC, reason="mallopt is glibc's")
def test_what_a_step_leaves_is_not_mapped_anew_in_the_next():
    _, without = faults("leave")
    kept, count = faults("keep")
    assert kept
    assert count < without / 10


class Old:
    """glibc before 2.35: it takes 2**25 bytes at most."""

    def __init__(self) -> None:
        self.taken: dict[int, int] = {}

    def mallopt(self, what: int, value: int) -> int:
        is_taken = what == system.M_TRIM_THRESHOLD or value <= 2**25
        self.taken.update({what: value} if is_taken else {})
        return int(is_taken)


def test_another_c_library_has_no_such_thing_an_old_one_less_and_the_environment_comes_first(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not system.keep_freed_memory()
    for name in system.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for library in (lambda _: object(), lambda _: (_ for _ in ()).throw(OSError), lambda _: int(_)):
        monkeypatch.setattr("ctypes.CDLL", library)
        assert not system.keep_freed_memory()
    old = Old()
    monkeypatch.setattr("ctypes.CDLL", lambda _: old)
    assert system.keep_freed_memory()
    assert old.taken == {system.M_MMAP_THRESHOLD: 2**25, system.M_TRIM_THRESHOLD: 2**29}


def test_commands_and_their_workers_keep_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from lfm2np.commands.cli import main
    from lfm2np.engine.work import place

    asked: list[str] = []
    monkeypatch.setattr("lfm2np.keep_freed_memory", lambda: asked.append("command"))
    monkeypatch.setattr(place, "keep_freed_memory", lambda: asked.append("worker"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(["info", "--json"]) == 0
    place.begin_worker()
    assert asked == ["command", "worker"]
    capsys.readouterr()
