"""From an application to a listening socket, and back: a first SIGTERM or interrupt drains, a second one ends."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterator, MutableMapping
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from lfm2np.commands.serve.limits import Limits
from lfm2np.commands.serve.replies.shared import error_reply
from lfm2np.errors import RequestError
from lfm2np.values import require_count

BACKLOG = 2048
SEND_BUFFER = 2**16  # bytes that the system keeps of an answer; else up to 4 MiB, and who does not read shows late
MAX_PORT = 2**16 - 1
START_SECONDS = 60.0


def listen(host: str, port: int) -> socket.socket:
    """A socket with that address; clients can connect when the server begins. RequestError where it can't be had."""
    require_count("--port", port, 0, MAX_PORT)  # getaddrinfo would take its last 16 bits
    try:
        family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        # Named in full, or asyncio leaves Nagle's algorithm on, and each answer waits 40 ms for an acknowledgement.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        # On Windows SO_REUSEADDR would let two servers have one port.
        sock.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR), 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections inherit it
        sock.bind(address)
    except (OSError, UnicodeError, OverflowError) as problem:
        raise RequestError(f"--host {host} --port {port}: {problem}") from None
    return sock


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listening: socket.socket) -> bool:
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


class Server(uvicorn.Server):
    """No signal is raised again when it has ended: that it drained is what was asked for.

    on_start  called when clients can connect, and signals drain
    """

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        if self.force_exit:  # what is cut off then is nothing to tell
            logging.getLogger("uvicorn.error").disabled = True


def config_of(app: Starlette, limits: Limits) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connection,
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=math.ceil(limits.body_seconds),
        timeout_graceful_shutdown=math.ceil(limits.body_seconds + limits.request_seconds) + 1,
    )


def serve(app: Starlette, limits: Limits, listening: socket.socket, on_start: Callable[[], None]) -> bool:
    """Until a signal; whether all that was under way was answered."""
    server = Server(config_of(app, limits), on_start)
    server.run(sockets=[listening])
    return not server.force_exit


@contextlib.contextmanager
def serving_beside(app: Starlette, limits: Limits) -> Iterator[int]:
    """Serves this machine in a thread of its own; its port. At the end what is under way is answered."""
    listening, begun = listen("127.0.0.1", 0), threading.Event()
    server = Server(config_of(app, limits), begun.set)
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), name="lfm2np-server", daemon=True)
    thread.start()
    try:
        if not begun.wait(START_SECONDS):
            raise RequestError(f"the server did not begin within {START_SECONDS:g} s")
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


# --- one connection


TRANSPORTS, LIMITS = "transports", "limits"  # names in the state that an application and its server share
HEAD, READING = "head", "reading"  # what a connection waits for
LEAST_READ = 2**15  # bytes that a client takes within `write_seconds` of what is waiting for it


class Framed(h11.Connection):
    """Refuses a request with two lengths, which who stands between may read as two requests. Source: RFC 9112, 6.1."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {bytes(name).lower() for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version == b"1.0"):
                raise h11.RemoteProtocolError("Transfer-Encoding beside Content-Length, or in HTTP/1.0")
        return event


class Connection(H11Protocol):
    """Cut where the head of a request does not come, and where an answer is not read; what is no HTTP gets an error
    object, too.

    The transport pauses a writer while more than 64 KiB wait, until a quarter of that is left. Who does not read is
    cut off as if he had gone: that ends his request, and what it holds of engine and memory is free.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = Framed(h11.SERVER)
        self._timers: dict[str, asyncio.TimerHandle] = {}  # until the head is there, and until the client has read
        if self.client is not None:
            self.app_state[TRANSPORTS][self.client] = transport
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.client is not None:
            self.app_state[TRANSPORTS].pop(self.client, None)
        self._stop(HEAD)
        self._stop(READING)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop(HEAD)
        elif HEAD not in self._timers:
            self._wait_for_head()

    def on_response_complete(self) -> None:
        self._stop(HEAD)  # from now on uvicorn's own limit on idle connections holds
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop(READING)
        self._look_later()

    def resume_writing(self) -> None:
        self._stop(READING)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        content = json.dumps(error_reply(400, msg)).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ):
            sent = self.conn.send(event)
            if sent is not None:
                self.transport.write(sent)
        self.transport.close()

    def _wait_for_head(self) -> None:
        self._timers[HEAD] = self.loop.call_later(self._limits.body_seconds, self.transport.abort)

    def _stop(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()

    def _look_later(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._timers[READING] = self.loop.call_later(self._limits.write_seconds, self._look, waiting)

    def _look(self, before: int) -> None:
        """Whether the client has read since as many bytes as that were waiting."""
        if self.transport.get_write_buffer_size() > before - LEAST_READ:
            self.transport.abort()
        else:
            self._look_later()

    @property
    def _limits(self) -> Limits:
        limits: Limits = self.app_state[LIMITS]
        return limits


def cut(scope: Scope) -> None:
    """Ends the connection of a request whatever it still holds: to close it would wait for who does not read."""
    state: MutableMapping[str, Any] = scope.get("state", {})
    transport = state.get(TRANSPORTS, {}).get(tuple(scope["client"] or ()))
    if transport is not None:
        transport.abort()
