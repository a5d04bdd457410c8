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
from lfm2np.values import require_count

MOST_CONNECTIONS = 1000  # idle ones too: beyond it uvicorn answers 503
SEND_BUFFER = 2**16  # bytes that the system keeps of a response; else up to 4 MiB, and who does not read shows late
MAX_PORT = 2**16 - 1
START_SECONDS = 60.0
KEEP_SECONDS = 30  # of a connection between two requests


def listen(host: str, port: int, write_seconds: float = 10.0) -> socket.socket:
    """A socket with that address; clients can connect when the server begins. RequestError where it can't be had.

    write_seconds  that a client may read nothing of what is sent: then Linux drops the connection; other systems have
                   no such option
    """
    require_count("--port", port, 0, MAX_PORT)  # getaddrinfo would take its last 16 bits
    try:
        family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        # Named in full, or asyncio leaves Nagle's algorithm on, and each answer waits 40 ms for an acknowledgement.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        # On Windows SO_REUSEADDR would let two servers have one port.
        sock.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR), 1)
        # Connections inherit these.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1000 * write_seconds))
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
    """No signal is raised again when it has ended: that it drained is what was requested.

    drain_seconds  for what is in progress at a first signal
    on_start       called when clients can connect, and signals drain
    """

    def __init__(self, app: Starlette, drain_seconds: float, on_start: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=KEEP_SECONDS,
            timeout_graceful_shutdown=math.ceil(drain_seconds),
        )
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        if self.force_exit:  # what is cut off then need not be reported
            logging.getLogger("uvicorn.error").disabled = True


def serve(app: Starlette, listening: socket.socket, drain_seconds: float, on_start: Callable[[], None]) -> bool:
    """Until a signal; whether all that was in progress was answered."""
    server = Server(app, drain_seconds, on_start)
    server.run(sockets=[listening])
    return not server.force_exit


@contextlib.contextmanager
def serving_beside(app: Starlette, drain_seconds: float = 60.0, write_seconds: float = 10.0) -> Iterator[int]:
    """Serves this machine in a thread of its own; its port. At the end what is in progress is answered."""
    listening, begun = listen("127.0.0.1", 0, write_seconds), threading.Event()
    server = Server(app, drain_seconds, begun.set)
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), name="lfm2np-server", daemon=True)
    thread.start()
    try:
        if not begun.wait(START_SECONDS):
            raise RequestError(f"the server did not begin within {START_SECONDS:g} s")
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
