"""From an application to a listening socket, and back: a first SIGTERM or interrupt drains, a second one ends."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from lfm2np.errors import RequestError
from lfm2np.serve.connections import Connection
from lfm2np.serve.limits import Limits
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
        found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        # On Windows SO_REUSEADDR would let two servers have one port.
        found.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR), 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections inherit it
        found.bind(address)
    except (OSError, UnicodeError, OverflowError) as problem:
        raise RequestError(f"--host {host} --port {port}: {problem}") from None
    return found


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
