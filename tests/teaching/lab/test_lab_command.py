"""`lfm2np lab` as a process: how it begins, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from lfm2np.commands.cli import main

COMMAND = [sys.executable, "-m", "lfm2np", "lab", "--port", "0", "--no-browser", "--json"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_is_answers_and_ends(how: signal.Signals) -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            url = urlsplit(json.loads(process.stdout.readline())["url"])
            assert url.hostname == "127.0.0.1"
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", url.port, timeout=60)) as connection:
                connection.request("GET", "/?slots=0")
                assert connection.getresponse().status == 400
            process.send_signal(how)
            assert process.wait(60) == 0
            assert process.stdout.read() == process.stderr.read() == ""
        finally:
            process.kill()


def test_a_port_that_is_taken_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        assert main(["lab", "--no-browser", "--port", port]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"lfm2np: RequestError: --port {port}: ") and "in use" in error
