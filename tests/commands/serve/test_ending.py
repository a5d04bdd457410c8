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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from served_app import JSON, read

from lfm2np.commands.cli import main
from lfm2np.commands.serve.server import listen

LONG = {"prompt": [1, 5], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
COMMAND = [sys.executable, "-m", "lfm2np", "serve", "--port", "0", "--json"]


@contextlib.contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [*COMMAND, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = urlsplit(json.loads(process.stdout.readline())["url"]).port
            assert port is not None
            yield process, port
        finally:
            process.kill()


def ask(port: int, fields: Any, path: str = "/v1/completions") -> tuple[int, Any]:
    """The status, and the object or the events that came."""
    content = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
        connection.request("POST", path, content, JSON)
        return read(connection.getresponse())


def get(port: int, path: str) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()


def wait_for_steps(port: int) -> None:
    """Until the engine computes."""
    while "engine_steps_total 0.0" in get(port, "/metrics")[1]:
        time.sleep(0.01)


@pytest.mark.slow
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
        asked = pool.submit(ask, port, LONG)
        wait_for_steps(port)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
        with contextlib.suppress(http.client.HTTPException, OSError, ValueError):  # as far as it gets
            assert asked.result()[0] != 200
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


def test_each_call_is_a_line_where_that_is_asked_for():
    with started("--verbose") as (process, port):
        ask(port, {"prompt": "a", "max_tokens": 1})
        ask(port, {"prompt": "a", "max_tokns": 1})
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr is not None
        first, second = process.stderr.read().splitlines()
        assert first.startswith("lfm2np: /v1/completions 200 ") and second.startswith("lfm2np: /v1/completions 400 ")


def test_what_the_engine_did_is_in_its_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace = tmp_path / "run.jsonl"
    with started("--trace", str(trace), "--speculative", "ngram", "--policy", "priority") as (process, port):
        assert ask(port, {"prompt": "sort: 7 2 9 4 ->", "max_tokens": 12, "temperature": 0})[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert main(["draw", str(trace), "--replay"]) == 0
    capsys.readouterr()


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = main(["serve", *options])
    return code, capsys.readouterr().err


def test_an_address_that_is_taken_or_none_is_told(capsys: pytest.CaptureFixture[str]):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        code, error = refused(capsys, "--port", port)
        assert code == 2 and f"--port {port}" in error and "in use" in error
    for options in (("--port", "70000"), ("--host", "no.such.host.invalid"), ("--host", "a b")):
        code, error = refused(capsys, *options)
        assert code == 2 and error.count("\n") == 1 and options[0] in error, error


@pytest.mark.parametrize(
    "options",
    [
        ("--max-requests", "0"),
        ("--request-seconds", "0"),
        ("--num-blocks", "0"),
        ("--draft-sampling", "greedy"),
    ],
)
def test_sizes_that_can_not_be_are_told_before_it_listens(options: Sequence[str], capsys: pytest.CaptureFixture[str]):
    code, error = refused(capsys, "--port", "0", *options)
    assert code == 2 and error.count("\n") == 1, error


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    code, error = refused(capsys)
    assert code == 2 and "uvicorn: not installed" in error and "lfm2np[serve]" in error


def test_answers_do_not_wait_for_acknowledgements():
    """asyncio sets TCP_NODELAY on what it accepts only where the protocol is named."""
    with contextlib.closing(listen("127.0.0.1", 0)) as listening:
        assert listening.proto == socket.IPPROTO_TCP
