"""Children that end with all that they started, on POSIX and on a system that lacks what Windows lacks.

What is done otherwise without processes and threads, as in a browser, is done here.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lfm2np import system
from lfm2np.arithmetic import pieces
from lfm2np.oracle.engines.exec_target import LineProcess
from lfm2np.suite.fuzz.started import StartedServer
from lfm2np.system import kill_session, session, split_command, terminate_session

SLEEPS = [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(600)"]
COMMANDS = ("python -m engine --name 'two words'", 'a "b c" d\\ e', "  ", "# x")


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No killpg, a Ctrl-Break (here SIGTERM, as background jobs ignore SIGINT) for a group, and a taskkill, which notes
    its arguments in the file."""
    noted = tmp_path / "taskkill.txt"
    program = tmp_path / "taskkill"
    program.write_text(f'#!/bin/sh\necho "$@" >>{shlex.quote(str(noted))}\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(system, "IS_WINDOWS", True)
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0, raising=False)
    monkeypatch.setattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM, raising=False)
    monkeypatch.delattr(os, "killpg", raising=False)
    return noted


only_posix = pytest.mark.skipif(os.name == "nt", reason="plays Windows by a shell script and signals of POSIX")


@only_posix
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_split_as_a_shell_splits_it(command: str) -> None:
    assert split_command(command) == shlex.split(command)


@only_posix
def test_on_windows_a_backslash_is_part_of_a_path(windows: Path) -> None:
    command = r"""C:\Python\python.exe -m engine "C:\my models\LFM2" 'x\y'"""
    assert split_command(command) == [r"C:\Python\python.exe", "-m", "engine", r"C:\my models\LFM2", r"x\y"]
    assert r"C:\Python" not in " ".join(shlex.split(command))  # what it would have been


@pytest.mark.parametrize("platform", [pytest.param("windows", marks=only_posix), "this"])
@pytest.mark.parametrize("end", [terminate_session, kill_session])
def test_a_child_ends_and_a_second_call_does_nothing(platform: str, end, request: pytest.FixtureRequest) -> None:
    noted = request.getfixturevalue("windows") if platform == "windows" else None
    with subprocess.Popen(SLEEPS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **session()) as child:
        assert child.stdout is not None
        try:
            child.stdout.readline()
            end(child)
            assert child.wait(30) != 0
            end(child)
        finally:
            child.kill()
    if noted is not None and end is kill_session:
        assert set(noted.read_text(encoding="utf-8").splitlines()) == {f"/F /T /PID {child.pid}"}


@only_posix
def test_engines_and_servers_are_ended_on_windows_too(windows: Path) -> None:
    lines = LineProcess(shlex.join(SLEEPS))
    assert lines.receive() == b"\n"
    lines.close(grace=0.0)
    server = StartedServer(shlex.join(SLEEPS), lambda: server._process is not None, 30.0)
    server.start()
    process = server._process
    server.close()
    assert lines.process.returncode is not None and process is not None and process.returncode is not None
    assert windows.read_text(encoding="utf-8").splitlines() == [
        f"/F /T /PID {number}" for number in (lines.process.pid, process.pid)
    ]


def test_on_windows_a_port_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an option of its own, played here by another one: SO_REUSEADDR there lets two servers have one port."""
    pytest.importorskip("uvicorn")
    from lfm2np.commands.serve.server import listen

    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_KEEPALIVE, raising=False)
    with listen("127.0.0.1", 0) as listening:
        options = [listening.getsockopt(socket.SOL_SOCKET, n) for n in (socket.SO_KEEPALIVE, socket.SO_REUSEADDR)]
    assert [option != 0 for option in options] == [True, False]


# In a browser


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


@pytest.mark.slow
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
