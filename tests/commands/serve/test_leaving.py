"""Clients that go, do not read, or send nothing: their requests end, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import random
import re
import socket
import struct
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvicorn
from served_app import HEAD, Served, model, serving
from uvicorn.server import ServerState

from lfm2np.commands.serve.limits import Limits
from lfm2np.commands.serve.server import LEAST_READ, LIMITS, TRANSPORTS, Connection
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.sequential import answer_alone

LONG = {"prompt": [1, 5], "max_tokens": 230, "ignore_eos": True, "temperature": 0}


def put(served: Served, fields: dict[str, Any], room: int | None = None) -> socket.socket:
    """Sends it; the client's system holds some `room` bytes of an answer that is not read."""
    content = json.dumps(fields).encode()
    connection = socket.socket()
    connection.settimeout(60)
    if room is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    connection.connect(("127.0.0.1", served.port))
    connection.sendall(HEAD + f"{len(content)}\r\n\r\n".encode() + content)
    return connection


def num_begun(served: Served) -> int:
    """Calls under way, and those that ended."""
    ended = re.findall(r"request_total{.*} (\d+)", served.get("/metrics")[1])
    return served.service.desk.num_places + sum(map(int, ended))


def reset(connection: socket.socket) -> None:
    """Closes it as a client that was killed does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_abrupt", [False, True])
def test_who_leaves_is_computed_no_further(is_streamed: bool, is_abrupt: bool):
    with serving(model()) as served:
        connection = put(served, {**LONG, "stream": is_streamed})
        while not served.service.desk.runner.state.metrics.steps:
            time.sleep(0.005)
        if is_streamed:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        reset(connection) if is_abrupt else connection.close()
        served.wait_until_empty()
        assert served.service.desk.runner.state.metrics.sampled_tokens < 230
        assert 'how="left"} 1.0' in served.get("/metrics")[1]


def test_who_waits_in_the_queue_may_leave_it():
    with serving(model(), max_num_seqs=1) as served:
        first, second = put(served, LONG), put(served, LONG)
        while not served.service.desk.runner.state.waiting:
            time.sleep(0.005)
        second.close()
        while served.service.desk.num_places > 1:
            time.sleep(0.005)
        first.close()
        served.wait_until_empty()


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_does_not_read_holds_up_nobody_and_no_end(is_streamed: bool):
    """Its answer is larger than what the sockets between hold; the server ends without it."""
    limits = Limits(request_seconds=8.0, body_seconds=1.0, max_logprobs=512)
    with serving(model(), limits, num_blocks=300, max_num_seqs=5) as served:
        much = {**LONG, "prompt": [[1, 5]] * 4, "max_tokens": 20, "logprobs": 512}
        slow = put(served, {**much, "stream": is_streamed}, 2048)
        status, _ = served.ask("/v1/completions", {"prompt": "sort: 3 1 ->", "temperature": 0, "max_tokens": 5})
        assert status == 200 and served.service.desk.num_places >= 4
        served.wait_until_empty()
        assert served.service.desk.runner.state.metrics.sampled_tokens > 4 * 20
        while 'how="504"} 1.0' not in served.get("/metrics")[1]:
            time.sleep(0.05)
    slow.close()


def test_streams_that_nobody_reads_are_not_computed_to_their_end():
    """Another client waits behind 16 of them, in four slots; each would be 900 tokens long."""
    limits = Limits(write_seconds=0.05, max_logprobs=200)
    with serving(model(), limits, block_size=16, num_blocks=300) as served, contextlib.ExitStack() as stack:
        much = {**LONG, "max_tokens": 900, "logprobs": 200, "stream": True}
        for _ in range(16):
            stack.enter_context(put(served, much, 2048))
        while num_begun(served) < 16:
            time.sleep(0.005)
        status, reply = served.ask("/v1/completions", {"prompt": "sort: 3 1 ->", "temperature": 0, "max_tokens": 5})
        assert status == 200 and reply["choices"][0]["text"] == " 1 3"
        assert served.service.desk.runner.state.metrics.sampled_tokens < 16 * 900 / 3
        served.wait_until_empty()


def test_answers_that_nobody_reads_hold_no_place():
    """Each is some 300 KB, all of them together as many as the server takes on."""
    limits = Limits(write_seconds=0.05, max_logprobs=512, max_requests=10)
    with serving(model(), limits) as served, contextlib.ExitStack() as stack:
        for _ in range(10):
            slow = stack.enter_context(put(served, {**LONG, "max_tokens": 24, "logprobs": 512}, 2048))
        while num_begun(served) < 10:
            time.sleep(0.005)
        served.wait_until_empty()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response = http.client.HTTPResponse(slow)
            response.begin()
            response.read()
        assert served.ask("/v1/completions", {"prompt": [1], "max_tokens": 1})[0] == 200


class Waiting(asyncio.Transport):
    """Of an answer so many bytes wait to be read."""

    num_bytes = 0
    is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.num_bytes

    def abort(self) -> None:
        self.is_aborted = True


class Clock:
    """What was put off, until the test says that its time has come."""

    def __init__(self) -> None:
        self.put_off: dict[float, Callable[[], Any]] = {}

    def call_later(self, seconds: float, call: Callable[..., Any], *arguments: Any) -> Any:
        self.put_off[seconds] = functools.partial(call, *arguments)
        return types.SimpleNamespace(cancel=lambda: self.put_off.pop(seconds, None))


def test_who_reads_slowly_is_waited_for_and_who_stops_is_cut_off():
    clock, transport, limits = Clock(), Waiting(), Limits(write_seconds=7.0)
    config, shared = uvicorn.Config(lambda: None, log_config=None), {TRANSPORTS: {}, LIMITS: limits}
    connection = Connection(config, ServerState(), shared, clock)  # type: ignore[arg-type]
    connection.connection_made(transport)
    transport.num_bytes = 4 * LEAST_READ
    connection.pause_writing()
    for num_bytes in (3 * LEAST_READ, 2 * LEAST_READ):
        transport.num_bytes = num_bytes
        clock.put_off.pop(7.0)()
        assert not transport.is_aborted
    connection.resume_writing()
    assert 7.0 not in clock.put_off
    connection.pause_writing()
    transport.num_bytes -= LEAST_READ - 1
    clock.put_off.pop(7.0)()
    assert transport.is_aborted and 7.0 not in clock.put_off


def test_connections_that_ask_nothing_are_closed():
    with serving(model(), Limits(body_seconds=0.3)) as served:
        idle = [served.raw() for _ in range(3)]
        idle[1].sendall(b"POST /v1/compl")
        idle[2].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /heal")
        for connection in idle:
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
            connection.close()


def test_half_open_connections_and_garbage_hold_up_nobody():
    with serving(model()) as served:
        idle = [served.raw() for _ in range(100)]
        for number, connection in enumerate(idle):
            connection.sendall(
                [b"", b"POST /v1/completions HTTP/1.1\r\nHost", b"\x16\x03\x01garbage\r\n\r\n"][number % 3]
            )
        assert served.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        for connection in idle:
            connection.close()
        assert served.get("/health")[0] == 200


@pytest.mark.slow
def test_clients_that_come_and_go_at_random_change_nothing_for_the_others():
    """Every answer that is waited for is the reference's; then the pool is empty."""
    randomly = random.Random(1)
    asks = [
        {
            "prompt": [randomly.randrange(320) for _ in range(randomly.randrange(1, 20))],
            "temperature": randomly.choice([0.0, 1.0]),
            "seed": randomly.randrange(1000),
            "max_tokens": randomly.randrange(1, 20),
            "return_token_ids": True,
        }
        for _ in range(60)
    ]
    leaves = [randomly.random() < 0.4 for _ in asks]
    pauses = [randomly.uniform(0.0, 0.05) for _ in asks]

    def one(number: int) -> list[int] | None:
        if not leaves[number]:
            status, reply = served.ask("/v1/completions", asks[number])
            assert status == 200, reply
            return list(reply["choices"][0]["token_ids"])
        connection = put(served, {**asks[number], "stream": bool(number % 2)})
        time.sleep(pauses[number])
        reset(connection)
        return None

    with serving(model(), num_blocks=20) as served:
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(one, range(len(asks))))
        served.wait_until_empty()
    for ask, ids in zip(asks, answers, strict=True):
        params = SamplingParams(temperature=ask["temperature"], seed=ask["seed"], max_tokens=ask["max_tokens"])
        if ids is not None:
            (sample,) = list(answer_alone(model(), "alone", ask["prompt"], params, 0))[-1].outputs
            assert ids == list(sample.token_ids)
