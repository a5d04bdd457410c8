"""The laboratory over HTTP, on this machine only: one page, whose query is the run, computed in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from lfm2np.errors import RequestError
from lfm2np.teaching.lab.page import compute
from lfm2np.values import require_count

HOST = "127.0.0.1"
NAMES = ("localhost", HOST, "::1")
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page's own policy can't say this
}
IDLE_SECONDS = 60.0  # of a client that sends or reads nothing

one_at_a_time = threading.Lock()  # a fault changes the functions of this process
computed = lru_cache(maxsize=8)(compute)


def reply(link: str) -> tuple[int, str, str]:
    """Status, text and its kind."""
    try:
        with one_at_a_time:
            return *computed(link), "html"
    except Exception as problem:
        return 500, f"{type(problem).__name__}: a defect of the laboratory\n", "plain"


class Handler(BaseHTTPRequestHandler):
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if refused := self.refused():
            self.answer(403, f"{refused}\n", "plain")
        elif path != "/":
            self.answer(404, f"{path[:200]!r}: the page is at /\n", "plain")
        else:
            self.answer(*reply(query))

    def refused(self) -> str:
        """A page elsewhere may lead here; it may not keep the engine busy, nor read what this machine's name hides."""
        host = self.headers.get("Host", "")
        try:
            is_ours = urlsplit(f"//{host}").hostname in NAMES
        except ValueError:
            is_ours = False
        if not is_ours:  # else a page whose own name is made to mean this machine could use it
            return f"Host {host[:100]!r}: expected the name of this machine"
        site, mode, dest = (self.headers.get(f"Sec-Fetch-{name}") for name in ("Site", "Mode", "Dest"))
        if site in ("cross-site", "same-site") and (mode, dest) != ("navigate", "document"):
            return "a page of another site asks: expected the laboratory's own, or a link"
        return ""

    def answer(self, status: int, text: str, kind: str) -> None:
        content = text.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Standard error is for what goes wrong."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone is no error."""


def listen(port: int) -> Server:
    """Clients can connect; they are answered within `serve_forever`. RequestError where the port can't be had."""
    require_count("--port", port, 0, 2**16 - 1)
    try:
        return Server((HOST, port), Handler)
    except OSError as problem:
        raise RequestError(f"--port {port}: {problem}") from None


def url_of(server: Server) -> str:
    return f"http://{HOST}:{server.server_port}/"


@contextmanager
def serving() -> Iterator[str]:
    """Its address, while the block runs."""
    with listen(0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield url_of(server)
        finally:
            server.shutdown()
            thread.join()
