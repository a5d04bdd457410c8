"""`lfm2np serve` as a process: how it begins, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
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
from served_app import ask, get

from lfm2np.commands.cli import main
from lfm2np.commands.serve.server import listen

pytestmark = pytest.mark.slow

LONG = {"prompt": [1, 5], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
COMMAND = [sys.executable, "-m", "lfm2np", "serve", "--json"]


@contextlib.contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [*COMMAND, *options, *([] if "--port" in options else ["--port", "0"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = urlsplit(json.loads(process.stdout.readline())["url"]).port
            assert port is not None
            yield process, port
        finally:
            process.kill()


def wait_for_steps(port: int) -> None:
    """Until the engine computes."""
    while "engine_steps_total 0.0" in get(port, "/metrics")[1]:
        time.sleep(0.01)


def wait_until_refused(port: int) -> None:
    """Until the first signal has come."""
    with contextlib.suppress(ConnectionError):
        while True:
            socket.create_connection(("127.0.0.1", port), 60).close()
            time.sleep(0.01)


@pytest.mark.night
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_first_signal_waits_for_what_is_under_way(how: signal.Signals):
    with started() as (process, port), ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, port, LONG) for _ in range(3)]
        wait_for_steps(port)
        process.send_signal(how)
        replies = [future.result() for future in asked]
        assert [status for status, _ in replies] == [200] * 3
        assert all(reply["usage"]["completion_tokens"] == 400 for _, reply in replies)
        assert process.wait(60) == 0
        assert process.stderr is not None and process.stderr.read() == ""


def test_a_second_signal_ends_at_once():
    with started() as (process, port), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, port, LONG | {"max_tokens": 1000})
        wait_for_steps(port)
        process.send_signal(signal.SIGTERM)
        wait_until_refused(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
        with contextlib.suppress(http.client.HTTPException, OSError, ValueError):  # as far as it gets
            status, reply = asked.result()
            assert status != 200 or reply["usage"]["completion_tokens"] == 1000, "a busy machine may get it done"
        assert process.stderr is not None and process.stderr.read() == "lfm2np: interrupted\n"


def test_a_signal_right_after_it_says_where_it_listens_is_a_drain():
    with started() as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_trace_that_can_not_be_written_fails_no_request():
    with started("--trace", "/dev/full") as (process, port):
        for _ in range(3):
            assert ask(port, {"prompt": "a", "max_tokens": 2})[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr is not None
        errors = process.stderr.read()
        assert errors.count("\n") == 1 and "--trace /dev/full: can't be written, and ends here" in errors


def test_a_kill_in_mid_stream_and_a_restart_on_the_same_port():
    with started() as (process, port), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, port, LONG)
        wait_for_steps(port)
        process.kill()
        with pytest.raises((http.client.HTTPException, OSError)):
            asked.result()
    with started("--port", str(port)) as (_, again):
        assert again == port
        assert ask(port, {"prompt": "a", "max_tokens": 1})[0] == 200


def test_each_call_is_a_line_where_that_is_asked_for_and_what_the_engine_did_is_in_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    trace = tmp_path / "run.jsonl"
    options = ["--verbose", "--trace", str(trace), "--speculative", "ngram", "--policy", "priority"]
    with started(*options) as (process, port):
        ask(port, {"prompt": "sort: 7 2 9 4 ->", "max_tokens": 12, "temperature": 0})
        ask(port, {"prompt": "a", "max_tokns": 1})
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr is not None
        first, second = process.stderr.read().splitlines()
        assert first.startswith("lfm2np: /v1/completions 200 ") and second.startswith("lfm2np: /v1/completions 400 ")
    assert main(["draw", str(trace), "--replay"]) == 0
    capsys.readouterr()


def test_an_address_that_is_taken_and_a_missing_extra_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Other options: tests/commands/cli/test_refused.py."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"--port {port}" in error and "in use" in error
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert main(["serve"]) == 2
    error = capsys.readouterr().err
    assert "uvicorn: not installed" in error and "lfm2np[serve]" in error


def test_answers_do_not_wait_for_acknowledgements():
    """asyncio sets TCP_NODELAY on what it accepts only where the protocol is named."""
    with contextlib.closing(listen("127.0.0.1", 0)) as listening:
        assert listening.proto == socket.IPPROTO_TCP
