"""What large bodies took of memory is given back."""

from __future__ import annotations

import contextlib
import http.client
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_ending import ask, started

STATUS = Path("/proc/self/status")


def resident(process: int) -> int:
    """Kilobytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def post(port: int, content: bytes) -> int:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
        return connection.getresponse().status


@pytest.mark.skipif(not STATUS.exists(), reason="the system has no /proc")
def test_memory_is_back_after_large_bodies():
    """Of a million token ids each, which are parsed, and of four million, which are not."""
    bodies = [b'{"prompt":[' + b"70000," * (2**20 - 1) + b"1]}"] * 6 + [
        b'{"prompt":[' + b"1," * (2**22 - 10) + b"1]}"
    ] * 2
    with started() as (process, port), ThreadPoolExecutor(len(bodies)) as pool:
        assert ask(port, {"prompt": "a", "max_tokens": 2})[0] == 200
        before = resident(process.pid)
        assert list(pool.map(lambda content: post(port, content), bodies)) == [400] * 6 + [413] * 2
        until = time.monotonic() + 60
        while resident(process.pid) > 1.2 * before:
            assert time.monotonic() < until, (before, resident(process.pid))
            time.sleep(0.1)
