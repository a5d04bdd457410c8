"""HTTP to one server: JSON out, JSON, text or server-sent events back.

- A request has `timeout` seconds in all; then its connection is cut, whatever it waits for.
- 429, 502, 503, 504, a refused and a broken connection are tried again, with growing pauses; nothing else is.
- The key is read from LFM2NP_API_KEY, and from nowhere else; no message shows it.
- A response has at most MOST_BYTES: one without an end would take all memory before its time is over.
- Neither proxies nor redirects are followed: what is checked is the server that the URL names.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import math
import os
import random
import re
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from lfm2np.checkpoint.strict_json import KINDS, parse_object, parse_value
from lfm2np.errors import Lfm2npError
from lfm2np.oracle.engines.records import shortened
from lfm2np.oracle.engines.target import TargetError

KEY_VARIABLE = "LFM2NP_API_KEY"
BUSY = (429, 502, 503, 504)
CONNECT_SECONDS, LONGEST_PAUSE = 10.0, 10.0
MOST_BYTES = 2**28  # of a response: 2 KiB for each of 131,072 tokens of a prompt, whose entry takes some 100 bytes
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
    """Worth another attempt: in `after` seconds if the server said so."""

    def __init__(self, message: str, status: int | None = None, after: str | None = None) -> None:
        super().__init__(message, status)
        self.after = float(after) if after is not None and re.fullmatch("[0-9]+", after) else None


class Unreachable(Unready):
    """There is no connection at all."""


class HttpClient:
    """Requests to one server, from any number of threads; each has its own connection.

    place   the server's URL, without a final /v1
    """

    def __init__(self, url: str, timeout: float = 60.0, retries: int = 3, backoff: float = 0.25) -> None:
        self._url = split_url(url)
        self.place = f"{self._url.scheme}://{self._url.netloc}{self._url.path}"
        self.timeout = timeout
        self._retries, self._backoff, self._key = retries, backoff, read_key()
        self._cuts: set[Callable[[], None]] = set()  # of the connections that are open
        self._closed = threading.Event()

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path. HttpError for anything else, TargetError if there is no server."""
        return parse_reply(self._send("GET", path, None, json_of), "the answer")

    def get_text(self, path: str) -> str:
        """The text at a path, whatever its kind; errors as in `get`."""
        return self._send("GET", path, None, lambda response: body_of(response).decode(errors="replace"))

    def post(self, path: str, fields: Mapping[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """The response to a JSON object; errors as in `get`."""
        return parse_reply(self._send("POST", path, fields, json_of, seconds), "the answer")

    def post_and_leave(self, path: str, fields: Mapping[str, Any], is_enough: Enough) -> list[dict[str, Any]]:
        """Server-sent events until they are enough; then the connection is closed, in the middle of the response."""
        return self._send("POST", path, fields, lambda response: read_events(response, is_enough))

    def close(self) -> None:
        """Cuts all connections, from any thread. No request can be sent afterwards."""
        self._closed.set()
        for cut in list(self._cuts):
            cut()

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
        for tried in itertools.count(1):
            try:
                return self._attempt(method, path, body, read, limit)
            except Unready as problem:
                if tried > self._retries:
                    why = f"{problem} ({tried} attempts)"
                    is_gone = isinstance(problem, Unreachable)
                    raise (TargetError(f"{self.place}: {why}") if is_gone else HttpError(why, problem.status)) from None
                # varied, so that requests that were refused together don't return together
                pause = self._backoff * 2.0 ** (tried - 1) * random.uniform(0.5, 1.5)
                self._closed.wait(min(pause if problem.after is None else problem.after, LONGEST_PAUSE))
        raise AssertionError("it counts for ever")

    def _attempt(
        self, method: str, path: str, body: bytes | None, read: Callable[[http.client.HTTPResponse], T], seconds: float
    ) -> T:
        """Over a connection of its own, which is cut after so many seconds. Errors on it become HttpErrors."""
        if self._closed.is_set():
            raise HttpError("the connection was closed from this side")
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=min(seconds, CONNECT_SECONDS))
        used: socket.socket | None = None
        is_cut = threading.Event()

        def cut() -> None:
            is_cut.set()
            if used is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(used, socket.SHUT_RDWR)  # the transport itself, below TLS

        timer = threading.Timer(seconds, cut)  # a timeout for each read would let a server send comments for ever
        timer.daemon = True
        try:
            connection.connect()
            used = connection.sock
            used.settimeout(seconds)
            self._cuts.add(cut)
            timer.start()
            connection.request(method, self._url.path + path, body, self._headers())
            response = connection.getresponse()
            self._require_success(response)
            result = read(response)
            if is_cut.is_set():  # a response without a length would pass for a whole one
                raise TimeoutError
            return result
        except (OSError, http.client.HTTPException, ValueError, HttpError) as problem:
            if is_cut.is_set() or (used is not None and isinstance(problem, TimeoutError)):
                raise TimedOut(f"no complete answer within {seconds:g} s") from None
            raise translated(problem, used is not None) from None
        finally:
            timer.cancel()
            self._cuts.discard(cut)
            connection.close()

    def _headers(self) -> dict[str, str]:
        kinds = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
        return {**kinds, "Connection": "close"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})

    def _require_success(self, response: http.client.HTTPResponse) -> None:
        status = response.status
        if status == 200:
            return
        words = f"to {response.getheader('Location')}, expected no redirect" if 300 <= status < 400 else ""
        message = f"HTTP {status}: {words or complaint_of(body_of(response), self._key)}"
        if status in BUSY:
            raise Unready(message, status, response.getheader("Retry-After"))
        if status in (401, 403):
            raise HttpError(f"{message}; a key is read from the variable {KEY_VARIABLE}", status)
        raise BadReply(message, status)


def split_url(url: str) -> SplitResult:
    """TargetError unless it is a plain address of a server. A final `/v1`, as OpenAI's clients have, is removed."""
    try:
        parts = urlsplit(url)
        is_plain = bool(parts.hostname) and (parts.port or 80) > 0 and not (parts.query or parts.fragment)
    except ValueError as problem:
        raise TargetError(f"{shortened(url, 200)!r}: not a URL: {problem}") from None
    if "@" in parts.netloc:
        raise TargetError(f"the URL holds a user or password: expected none, a key belongs into {KEY_VARIABLE}")
    if not is_plain or not re.fullmatch("https?://[!-~]+", url):
        raise TargetError(f"{shortened(url, 200)!r}: expected http://HOST[:PORT][/PATH], or https")
    return parts._replace(path=re.sub("/v1(/chat)?(/completions)?$", "", parts.path.rstrip("/")))


def read_key() -> str | None:
    key = os.environ.get(KEY_VARIABLE)
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise TargetError(f"{KEY_VARIABLE}: expected printable ASCII letters without spaces, or the variable unset")
    return key


def translated(problem: Exception, is_connected: bool) -> HttpError:
    if isinstance(problem, HttpError):
        return problem
    name = type(problem).__name__
    if isinstance(problem, OSError) and not is_connected and not name.startswith("SSL"):
        return Unreachable(f"no connection: {problem}")
    if isinstance(problem, ConnectionError | http.client.IncompleteRead):
        return Unready(f"the connection broke: {name}")
    return HttpError(f"no HTTP as it should be: {name}: {shortened(str(problem), 200)}")


def body_of(response: http.client.HTTPResponse) -> bytes:
    """The whole of it. BadReply beyond MOST_BYTES, IncompleteRead for fewer than were announced."""
    body = bytearray()
    while piece := response.read(2**16):
        body += piece
        require_size(len(body))
    if response.length:
        raise http.client.IncompleteRead(bytes(body), response.length)
    return bytes(body)


def require_size(num_bytes: int) -> None:
    if num_bytes > MOST_BYTES:
        raise BadReply(f"a response of more than {MOST_BYTES} bytes: expected fewer, and an end")


def json_of(response: http.client.HTTPResponse) -> bytes:
    """The body, to be parsed once it is known to be whole: of one that was cut that may take longer than its timeout.
    BadReply for another type."""
    require_type(response, "application/json")
    return body_of(response)


def parse_reply(content: bytes, what: str) -> dict[str, Any]:
    """A JSON object, with NaN as Python writes it: records_json.py says of which field it is."""
    parsed = parse_value(content, what, BadReply)
    if not isinstance(parsed, dict):
        raise BadReply(f"{what}: a JSON {KINDS[type(parsed)]}, expected an object")
    return parsed


def read_events(response: http.client.HTTPResponse, is_enough: Enough) -> list[dict[str, Any]]:
    """Until they are enough, or the stream ends. Source: HTML standard, server-sent events, `data` lines."""
    require_type(response, "text/event-stream")
    events: list[dict[str, Any]] = []
    num_bytes = 0
    while not is_enough(events) and (line := response.readline(MOST_BYTES + 1)):
        num_bytes += len(line)
        require_size(num_bytes)
        if line.startswith(b"data:"):
            content = line.removeprefix(b"data:").strip()
            if content == b"[DONE]":
                break
            events.append(parse_reply(content, f"event {len(events)}"))
    return events


def metrics_of(text: str) -> dict[str, float]:
    """Prometheus' text format: the sum of each name's samples; lines of another form are skipped."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name = line.split("{")[0].split(" ")[0]
        if name and not line.startswith("#"):
            with contextlib.suppress(ValueError, IndexError):
                sums[name] = sums.get(name, 0.0) + float(line.rsplit("}", 1)[-1].removeprefix(name).split()[0])
    return {name: value for name, value in sums.items() if math.isfinite(value)}


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
