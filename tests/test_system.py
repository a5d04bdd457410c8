"""A system without processes and threads: what is done otherwise there, done here."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from lfm2np import system
from lfm2np.arithmetic import pieces


def test_without_threads_the_caller_computes_all_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pieces.threads_of({"OMP_NUM_THREADS": "3"}) == 3
    monkeypatch.setattr(system, "HAS_THREADS", False)
    assert pieces.threads_of({"OMP_NUM_THREADS": "3"}) == 1


def test_the_c_library_of_a_browser_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in system.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ctypes.CDLL", lambda _: pytest.fail("asked"))
    monkeypatch.setattr(system, "IS_WASM", True)
    assert not system.keep_freed_memory()


def test_a_program_for_a_browser_computes_the_same_tokens() -> None:
    """The flags as they are there, before anything of the package is imported; a process can't be started."""
    program = """
    import sys, subprocess, threading
    import numpy
    sys.platform = "emscripten"
    def refuse(*words, **more):
        raise OSError("emscripten does not support processes")
    subprocess.Popen = refuse
    threading.Thread.start = lambda self: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
    import lfm2np
    from lfm2np import system
    from lfm2np.arithmetic import pieces
    assert not system.HAS_THREADS and pieces.THREADS == 1
    print(lfm2np.load().generate("sort: 3 1 2 ->").text)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("1 2 3", "")
