"""`lfm2np lab` as a process: how it begins, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lfm2np.commands.cli import main

COMMAND = [sys.executable, "-m", "lfm2np", "lab", "--port", "0", "--no-browser"]
ROWS = [f"prompt=copy:+{name}+red+blue+cat+dog+red+->&tokens=48" for name in "abcdefgh"]
SHORT, LONG = ("&".join(ROWS[:count]) + "&blocks=128&slots=1" for count in (2, 8))


@contextlib.contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and its first line."""
    with subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().rstrip("\n")
        finally:
            process.kill()


def ask(url: str, query: str) -> tuple[int, str]:
    parts = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)) as connection:
        connection.request("GET", f"/?{query}")
        response = connection.getresponse()
        return response.status, response.read().decode()


def children_of(pid: int) -> list[int]:
    processes = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                processes.append(int(stat.parent.name))
    return processes


def is_gone(pid: int, seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_is_answers_and_drains(how: signal.Signals):
    with started() as (process, url), ThreadPoolExecutor(1) as pool:
        assert urlsplit(url).hostname == "127.0.0.1" and url.startswith("http://") and url.endswith("/")
        assert ask(url, "slots=0")[0] == 400
        children = children_of(process.pid)
        asked = pool.submit(ask, url, SHORT)
        time.sleep(0.2)
        process.send_signal(how)
        assert asked.result()[0] == 200, "what was under way is answered"
        assert process.wait(60) == 0
        assert process.stdout is not None and process.stdout.read() == ""
        assert process.stderr is not None and process.stderr.read() == ""
    assert all(map(is_gone, children))


@pytest.mark.slow
def test_a_second_signal_ends_at_once_and_leaves_nothing():
    with started("--json") as (process, line), ThreadPoolExecutor(1) as pool:
        url = json.loads(line)["url"]
        assert ask(url, "slots=0")[0] == 400
        children = children_of(process.pid)
        asked = pool.submit(ask, url, LONG)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 130
        with contextlib.suppress(http.client.HTTPException, OSError):
            assert asked.result()[0] != 200
        assert process.stderr is not None and process.stderr.read() == "lfm2np: interrupted\n"
    assert all(map(is_gone, children))


@pytest.mark.slow
def test_a_killed_server_leaves_nothing():
    with started() as (process, url):
        ask(url, "slots=0")
        children = children_of(process.pid)
        process.kill()
        process.wait(20)
    assert all(map(is_gone, children))


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = main(["lab", "--no-browser", *options])
    return code, capsys.readouterr().err


def test_a_port_that_is_taken_or_none_is_told(capsys: pytest.CaptureFixture[str]):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        code, error = refused(capsys, "--port", port)
        assert code == 2 and error.startswith(f"lfm2np: RequestError: --port {port}: ") and "in use" in error
    code, error = refused(capsys, "--port", "70000")
    assert code == 2 and error.count("\n") == 1 and "--port 70000" in error


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    code, error = refused(capsys, "--port", "70000")  # which would be the next thing to be refused
    assert code == 2 and "uvicorn: not installed; lab needs" in error and "lfm2np[serve]" in error
