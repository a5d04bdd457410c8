"""Clients that go, do not read, or send nothing: their requests end, and nobody else notices."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from served_app import HEAD, Served, model, serving

from lfm2np.commands.serve.settings import Settings

pytestmark = pytest.mark.slow

LONG = {"prompt": [1, 5], "max_tokens": 230, "ignore_eos": True, "temperature": 0}
linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not drop a client that does not read")


def put(port: int, fields: dict[str, Any], room: int | None = None) -> socket.socket:
    """Sends it; the client's system holds some `room` bytes of a response that is not read."""
    content = json.dumps(fields).encode()
    connection = socket.socket()
    connection.settimeout(60)
    if room is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    connection.connect(("127.0.0.1", port))
    connection.sendall(HEAD + f"{len(content)}\r\n\r\n".encode() + content)
    return connection


def reset(connection: socket.socket) -> None:
    """Closes it as a client that was killed does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def ipv4(port: int) -> str:
    """An address of this machine as /proc/net/tcp writes it."""
    return f"0100007F:{port:04X}"


def steps(served: Served) -> int:
    return served.service.engine.state.metrics.steps


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_abrupt", [False, True])
def test_who_leaves_is_computed_no_further(is_streamed: bool, is_abrupt: bool) -> None:
    with serving(model()) as served:
        connection = put(served.port, {**LONG, "stream": is_streamed})
        served.wait_until(lambda: steps(served))
        if is_streamed:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        reset(connection) if is_abrupt else connection.close()
        served.wait_until_empty()
        assert served.service.engine.state.metrics.sampled_tokens < 230
        assert 'status="499"} 1.0' in served.get("/metrics")[1]


def test_who_waits_in_the_queue_may_leave_it() -> None:
    with serving(model(), max_num_seqs=1) as served:
        first, second = put(served.port, LONG), put(served.port, LONG)
        served.wait_until(lambda: served.service.engine.state.waiting)
        second.close()
        served.wait_until(lambda: served.service.engine.num_places == 1)
        first.close()
        served.wait_until_empty()


@linux
@pytest.mark.parametrize("is_streamed", [False, True])
def test_responses_that_nobody_reads_hold_no_place_and_no_end(is_streamed: bool) -> None:
    """Each is larger than what the sockets between hold, all together as many as the server takes on."""
    settings = Settings("trained", write_seconds=0.2, max_logprobs=512, max_requests=6)
    with serving(model(), settings, num_blocks=300) as served, contextlib.ExitStack() as stack:
        much = {**LONG, "max_tokens": 250 if is_streamed else 30, "logprobs": 512, "stream": is_streamed}
        for _ in range(6):
            slow = stack.enter_context(put(served.port, much, 2048))
        served.wait_until(lambda: steps(served) > 2)
        served.wait_until_empty()
        assert served.service.engine.state.metrics.sampled_tokens < 6 * (200 if is_streamed else 31)
        status, reply = served.ask("/v1/completions", {"prompt": "sort: 3 1 ->", "temperature": 0, "max_tokens": 5})
        assert status == 200 and reply["choices"][0]["text"] == " 1 3"
        client = f"{ipv4(served.port)} {ipv4(slow.getsockname()[1])} "
        served.wait_until(lambda: client not in Path("/proc/net/tcp").read_text())
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response = http.client.HTTPResponse(slow)
            response.begin()
            response.read()


def test_who_does_not_read_is_not_computed_beyond_its_time() -> None:
    """Also where the system does not drop it: then its connection is all that it costs, until the server ends."""
    settings = Settings("trained", request_seconds=2.0, write_seconds=1000.0, max_logprobs=512)
    with serving(model(), settings, num_blocks=300, max_num_seqs=5) as served:
        much = {**LONG, "max_tokens": 900, "logprobs": 512, "stream": True}
        with put(served.port, much, 2048):
            served.wait_until(lambda: served.service.engine.num_places)
            served.wait_until_empty()
            assert served.service.engine.state.metrics.sampled_tokens < 900
            assert served.get("/health")[0] == 200


def test_connections_that_send_nothing_or_garbage_hold_up_nobody_and_no_end() -> None:
    with serving(model()) as served, contextlib.ExitStack() as stack:
        sent = (b"", b"POST /v1/completions HTTP/1.1\r\nHost", b"\x16\x03\x01garbage\r\n\r\n", HEAD + b"50\r\n\r\n{")
        idle = [stack.enter_context(served.raw()) for _ in range(100)]
        for number, connection in enumerate(idle):
            connection.sendall(sent[number % 4])
        assert idle[2].recv(4096).startswith(b"HTTP/1.1 400")
        assert served.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        for connection in idle[3::4]:
            connection.close()
        served.wait_until_empty()
