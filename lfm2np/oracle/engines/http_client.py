"""HTTP to one server that is not trusted: every wait, every size and every destination is bounded.

- A request has `timeout` seconds in all, connecting included; then its connection is cut, whatever it waits for.
- A response may hold 64 MiB, as JSON or server-sent events, not compressed.
- 429, 502, 503, 504, a refused and a broken connection are retried, with growing pauses; nothing else is.
- A redirect is followed to the same scheme, host and port only, and without the key.
- The key is read from LFM2NP_API_KEY, and from nowhere else; no message shows it.
- Proxies are not used, whatever the environment says: what is checked is the server that the URL names.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

from lfm2np.checkpoint.strict_json import parse_object
from lfm2np.errors import Lfm2npError
from lfm2np.oracle.engines.records import shortened
from lfm2np.oracle.engines.target import TargetError

KEY_VARIABLE = "LFM2NP_API_KEY"
MAX_BODY, PIECE, MAX_LINE = 64 * 2**20, 2**16, 2**20
MAX_COMPLAINT = 4096  # bytes of a refusal that are read
MAX_REDIRECTS, MAX_NOTES = 3, 100
REDIRECTS, BUSY = (301, 302, 303, 307, 308), (429, 502, 503, 504)
CONNECT_SECONDS, LONGEST_PAUSE = 10.0, 10.0
T = TypeVar("T")
Enough = Callable[[list[dict[str, Any]]], bool]


class HttpError(Lfm2npError):
    """A failed request; `status` is the server's, if it gave one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class BadReply(HttpError):
    """The server answered, but not as it should: another status, another type, or invalid JSON."""


class TimedOut(HttpError):
    """It took longer than it may."""


class Unready(HttpError):
    """Worth a retry: in `after` seconds if the server said so."""

    def __init__(self, message: str, after: float | None = None, status: int | None = None) -> None:
        super().__init__(message, status)
        self.after = after


class Unreachable(Unready):
    """There is no connection at all."""


@dataclass(frozen=True)
class Place:
    """Where a server is; `prefix` goes before every path."""

    scheme: str
    host: str
    port: int
    prefix: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"


class HttpClient:
    """Requests to one server, from any number of threads; each has its own connection.

    notes   what was retried, and why: no answer shows it
    """

    def __init__(self, url: str, timeout: float = 60.0, retries: int = 3, backoff: float = 0.25) -> None:
        self.place = parse_url(url)
        self.timeout = timeout
        self.notes: list[str] = []
        self._retries, self._backoff = retries, backoff
        self._key = read_key()
        self._tls = ssl.create_default_context() if self.place.scheme == "https" else None
        self._open: set[Watch] = set()
        self._closed = threading.Event()

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path. HttpError for anything else, TargetError if there is no server."""
        return self._send("GET", path, None, read_json)

    def get_text(self, path: str) -> str:
        """The text at a path, whatever its kind; errors as in `get`."""
        return self._send("GET", path, None, lambda response: read_whole(response).decode(errors="replace"))

    def only_model(self) -> str | None:
        """The name of the only model that the server lists; None if it lists none, or several."""
        try:
            listed = self.get("/v1/models").get("data")
        except HttpError:
            return None
        names = [row.get("id") for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
        return names[0] if len(names) == 1 and isinstance(names[0], str) else None

    def post(self, path: str, fields: Mapping[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """The response to a JSON object; errors as in `get`."""
        return self._send("POST", path, fields, read_json, seconds)

    def post_and_leave(self, path: str, fields: Mapping[str, Any], is_enough: Enough) -> list[dict[str, Any]]:
        """Server-sent events until they are enough; then the connection is closed, in the middle of the response."""
        return self._send("POST", path, fields, lambda response: read_events(response, is_enough))

    def close(self) -> None:
        """Cuts all connections, from any thread. No request can be sent afterwards."""
        self._closed.set()
        for watch in list(self._open):
            watch.cut()

    def _send(
        self,
        method: str,
        path: str,
        fields: Mapping[str, Any] | None,
        read: Callable[[http.client.HTTPResponse], T],
        seconds: float | None = None,
    ) -> T:
        """In as many attempts as it takes. TargetError if there was no connection in the end."""
        body = None if fields is None else json.dumps(fields, allow_nan=False).encode()
        limit = self.timeout if seconds is None else min(seconds, self.timeout)
        tried = 0
        while True:
            tried += 1
            try:
                return self._attempt(method, path, body, read, limit)
            except Unready as problem:
                why = f"{problem} ({tried} attempts)"
                if tried > self._retries and isinstance(problem, Unreachable):
                    raise TargetError(f"{self.place}: {why}") from None
                if tried > self._retries:
                    raise HttpError(why, problem.status) from None
                if len(self.notes) < MAX_NOTES:
                    self.notes.append(f"tried again: {problem}")
                self._closed.wait(pause_before(tried, problem.after, self._backoff))

    def _attempt(
        self, method: str, path: str, body: bytes | None, read: Callable[[http.client.HTTPResponse], T], seconds: float
    ) -> T:
        """With its redirects."""
        target, key = self.place.prefix + path, self._key
        for _ in range(MAX_REDIRECTS + 1):
            with self._connection(seconds) as connection:
                connection.request(method, target, body, headers_of(body, key))
                response = connection.getresponse()
                if response.status not in REDIRECTS:
                    self._require_success(response)
                    return read(response)
                target, key = redirected(self.place, target, method, response), None
        raise HttpError(f"more than {MAX_REDIRECTS} redirects, the last to {shortened(target, 200)}")

    @contextlib.contextmanager
    def _connection(self, seconds: float) -> Iterator[http.client.HTTPConnection]:
        """A connection that is cut after so many seconds; errors on it become HttpErrors."""
        if self._closed.is_set():
            raise HttpError("the connection was closed from this side")
        host, port = self.place.host, self.place.port
        started = time.monotonic()
        try:
            plain = socket.create_connection((host, port), min(self.timeout, CONNECT_SECONDS))
        except (OSError, UnicodeError) as problem:
            raise Unreachable(f"no connection: {problem}") from None
        plain.settimeout(seconds)
        left = max(0.0, seconds - (time.monotonic() - started))
        if self._tls is None:
            watch, connection = Watch(plain, left), http.client.HTTPConnection(host, port)
        else:
            secured = self._tls.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
            watch, connection = Watch(secured, left), http.client.HTTPSConnection(host, port, context=self._tls)
        connection.sock = watch.connection
        self._open.add(watch)
        try:
            if self._tls is not None:
                secured.do_handshake()
            yield connection
            if watch.is_cut:  # a response without a length would pass for a whole one
                raise TimeoutError
        except (OSError, http.client.HTTPException, ValueError, HttpError) as problem:
            if watch.is_cut or isinstance(problem, TimeoutError):
                raise TimedOut(f"no complete answer within {seconds:g} s") from None
            raise problem if isinstance(problem, HttpError) else translated(problem) from None
        finally:
            self._open.discard(watch)
            watch.end()
            connection.close()

    def _require_success(self, response: http.client.HTTPResponse) -> None:
        encoding = response.getheader("Content-Encoding", "identity").strip().lower()
        if encoding not in ("identity", ""):
            raise BadReply(f"Content-Encoding {shortened(encoding, 40)!r}: expected none, as asked")
        if response.status == 200:
            return
        message = f"HTTP {response.status}: {complaint_of(response.read(MAX_COMPLAINT), self._key)}"
        if response.status in BUSY:
            raise Unready(message, seconds_of(response.getheader("Retry-After")), response.status)
        if response.status in (401, 403):
            raise HttpError(f"{message}; a key is read from the variable {KEY_VARIABLE}", response.status)
        raise BadReply(message, response.status)


class Watch:
    """Cuts a connection after so many seconds: a timeout for each read would let a server drip bytes for ever."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.connection = connection
        self.is_cut = False
        self._timer = threading.Timer(seconds, self.cut)
        self._timer.daemon = True
        self._timer.start()

    def cut(self) -> None:
        self.is_cut = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)  # the transport itself, below TLS

    def end(self) -> None:
        self._timer.cancel()


def parse_url(url: str) -> Place:
    """TargetError unless it is a plain address of a server. A final `/v1`, as OpenAI's clients have, is removed."""
    try:
        parts = urlsplit(url)
        if parts.username is not None or parts.password is not None:
            raise TargetError(f"the URL holds a user or password: expected none, a key belongs into {KEY_VARIABLE}")
        port = parts.port
    except ValueError as problem:
        raise TargetError(f"{shortened(url, 200)!r}: not a URL: {problem}") from None
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise TargetError(f"{shortened(url, 200)!r}: expected a URL of printable ASCII letters without spaces")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise TargetError(f"{shortened(url, 200)!r}: expected http://HOST[:PORT][/PATH], or https")
    default = 443 if parts.scheme == "https" else 80
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Place(parts.scheme, parts.hostname, default if port is None else port, prefix)


def read_key() -> str | None:
    key = os.environ.get(KEY_VARIABLE)
    if key == "":
        raise TargetError(f"{KEY_VARIABLE}: set to an empty text, expected a key, or the variable unset for none")
    if key is not None and (not key.isascii() or not key.isprintable() or " " in key):
        raise TargetError(f"{KEY_VARIABLE}: expected printable ASCII letters without spaces")
    return key


def headers_of(body: bytes | None, key: str | None) -> dict[str, str]:
    headers = {"Accept": "application/json, text/event-stream", "Connection": "close"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    return headers if key is None else headers | {"Authorization": f"Bearer {key}"}


def redirected(place: Place, target: str, method: str, response: http.client.HTTPResponse) -> str:
    """The new path. HttpError if it leads to another server, or would turn a POST into a GET."""
    location = response.getheader("Location", "")
    shown = shortened(location, 200)
    if method != "GET" and response.status not in (307, 308):
        raise HttpError(f"HTTP {response.status} to {shown!r}: expected 307 or 308, which keep the method")
    try:
        parts = urlsplit(urljoin(f"{place.scheme}://{place.host}:{place.port}{target}", location))
        there = (parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
    except ValueError:
        raise HttpError(f"HTTP {response.status} to {shown!r}: not a URL") from None
    is_plain = location.isascii() and location.isprintable() and " " not in location
    if there != (place.scheme, place.host, place.port) or parts.username is not None or not is_plain or not location:
        raise HttpError(f"HTTP {response.status} to {shown!r}: only redirects within {place} are followed")
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def translated(problem: Exception) -> HttpError:
    name = type(problem).__name__
    if isinstance(problem, ConnectionError | http.client.IncompleteRead | ssl.SSLEOFError):
        return Unready(f"the connection broke: {name}")
    return HttpError(f"no HTTP as it should be: {name}: {shortened(str(problem), 200)}")


def seconds_of(retry_after: str | None) -> float | None:
    """Whole seconds only; its other form, a date, would need synchronised clocks."""
    text = (retry_after or "").strip()
    return float(text) if text.isascii() and text.isdigit() else None


def pause_before(tried: int, after: float | None, backoff: float) -> float:
    """`after`, if the server said so; else it doubles with each attempt, and varies by half, so that requests that were
    refused together don't return together."""
    pause = backoff * 2.0 ** (tried - 1) * random.uniform(0.5, 1.5) if after is None else after
    return min(pause, LONGEST_PAUSE)


def read_json(response: http.client.HTTPResponse) -> dict[str, Any]:
    require_type(response, "application/json")
    return parse_object(read_whole(response), "the answer", BadReply)


def read_whole(response: http.client.HTTPResponse) -> bytes:
    if response.length is not None and response.length > MAX_BODY:
        raise HttpError(f"an answer of {response.length} bytes, expected at most {MAX_BODY}")
    body = bytearray()
    while piece := response.read(PIECE):
        body += piece
        if len(body) > MAX_BODY:
            raise HttpError(f"an answer of more than {MAX_BODY} bytes")
    if response.length:  # http.client does not notice that a body read in pieces ends early
        raise http.client.IncompleteRead(b"", response.length)
    return bytes(body)


def read_events(response: http.client.HTTPResponse, is_enough: Enough) -> list[dict[str, Any]]:
    """Until they are enough, or the stream ends. Source: HTML standard, server-sent events, `data` lines."""
    require_type(response, "text/event-stream")
    events: list[dict[str, Any]] = []
    size = 0
    while not is_enough(events) and (line := response.readline(MAX_LINE)):
        size += len(line)
        if size > MAX_BODY or len(line) == MAX_LINE:
            raise HttpError(f"events of more than {MAX_BODY} bytes, or a line of more than {MAX_LINE}")
        if line.startswith(b"data:"):
            content = line[len(b"data:") :].strip()
            if content == b"[DONE]":
                break
            events.append(parse_object(content, f"event {len(events)}", BadReply))
    return events


def require_type(response: http.client.HTTPResponse, expected: str) -> None:
    kind = response.getheader("Content-Type", "none").split(";")[0].strip().lower()
    if kind != expected:
        raise BadReply(f"Content-Type {shortened(kind, 60)}: expected {expected}")


def complaint_of(body: bytes, key: str | None) -> str:
    """The message in an error's body, as OpenAI, vLLM, llama.cpp, mlx-lm or FastAPI write it, else its beginning.

    The key is removed, as a server may repeat the headers that it got.
    """
    try:
        message: Any = parse_object(body, "", BadReply)
        for name in ("error", "message", "detail"):
            if isinstance(message, dict) and message.get(name):
                message = message[name]
    except BadReply:
        message = body.decode(errors="replace")
    text = message if isinstance(message, str) else json.dumps(message)
    return shortened(text.replace(key, "***") if key else text, 300) or "without a message"
