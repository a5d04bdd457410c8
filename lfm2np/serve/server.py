"""From an application to a listening socket, and back: a first SIGTERM or interrupt drains, a second one ends."""

from __future__ import annotations

import ipaddress
import socket
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from lfm2np.errors import RequestError
from lfm2np.values import require_count

BACKLOG = 2048
MAX_PORT = 2**16 - 1
KEEP_ALIVE_SECONDS = 30


def listen(host: str, port: int) -> socket.socket:
    """A socket to which clients can connect from now on. RequestError for an address that can't be had."""
    require_count("--port", port, 0, MAX_PORT)  # getaddrinfo would take its last 16 bits
    try:
        family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        # Named in full, or asyncio leaves Nagle's algorithm on, and each answer waits 40 ms for an acknowledgement.
        found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)
    except (OSError, UnicodeError, OverflowError) as problem:
        raise RequestError(f"--host {host} --port {port}: {problem}") from None
    return found


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listening: socket.socket) -> bool:
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


class Server(uvicorn.Server):
    """No signal is raised again when it has ended: that it drained is what was asked for."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def config_of(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )


def serve(app: Starlette, listening: socket.socket) -> bool:
    """Until a signal; whether all that was under way was answered."""
    server = Server(config_of(app))
    server.run(sockets=[listening])
    return not server.force_exit
