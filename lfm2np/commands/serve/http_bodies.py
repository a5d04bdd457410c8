"""Checks of an HTTP request before it is read: key and host, and size, time, type and form of its body."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from lfm2np.checkpoint.strict_json import parse_object
from lfm2np.commands.serve.desk import RETRY_SECONDS
from lfm2np.commands.serve.limits import Limits, Refusal, refusal_of
from lfm2np.commands.serve.service import Settings
from lfm2np.errors import RequestError
from lfm2np.system import trim_memory

B = TypeVar("B", bound=BaseModel)
LARGE = 2**16  # bytes: from here on a body is counted, and parsed beside the event loop
MOST_PARTS = 2**17  # to make more lists and objects stops all threads for a second
MOST_ELEMENTS = 2**20  # a million numbers take some 40 MB, and as long
PARTS, ELEMENTS = (b"[", b"{", b":"), (b",",)
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
TRIM_SECONDS = 1.0  # after a large body: its objects are gone then, if it was refused
LOCAL = ("localhost", "127.0.0.1", "::1")
DISCARD_SECONDS = 1.0  # for the rest of a body that is refused: who writes before he reads then sees the answer


class Left(Exception):
    """The client has gone: nobody waits for an answer."""


class Bodies:
    """What all clients together send: the bytes of bodies that are not parsed yet, and the thread of the large ones.

    One thread: each body becomes objects of some twenty times its size, and each thread would keep memory of its own.
    """

    def __init__(self, most: int) -> None:
        self._most, self.num_bytes = most, 0
        self.parsing = ThreadPoolExecutor(1)

    @contextlib.contextmanager
    def counted(self) -> Iterator[Callable[[int], None]]:
        """A function that takes so many bytes more for one body, until the block ends; Refusal if others have them."""
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if self.num_bytes + count > self._most:
                message = f"a body of {taken + count} bytes, and {self.num_bytes - taken} of others are not parsed yet"
                headers = {"Retry-After": RETRY_SECONDS, "Connection": "close"}
                raise Refusal(503, f"{message}: expected at most {self._most} together", headers=headers)
            taken += count
            self.num_bytes += count

        try:
            yield take
        finally:
            self.num_bytes -= taken


def require_access(request: Request, settings: Settings) -> None:
    """Refusal unless the client shows the key; where there is none, unless it knows the server by a name of its own.

    Else a page in a browser, whose own name is made to mean this machine, could ask a server that only listens here.
    """
    if settings.key is not None:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        fits = hmac.compare_digest(given.strip().encode("latin-1"), settings.key.encode("latin-1"))
        if kind.lower() != "bearer" or not fits:
            raise Refusal(401, "expected the header Authorization: Bearer and this server's key")
    elif settings.hosts is not None and host_of(request) not in (*LOCAL, *settings.hosts):
        raise Refusal(421, f"Host {request.headers.get('host', '')[:100]!r}: expected the name of this server")


def host_of(request: Request) -> str:
    """Without the port; empty for what is none."""
    with contextlib.suppress(ValueError):
        return urlsplit("//" + request.headers.get("host", "")).hostname or ""
    return ""


async def read_body(request: Request, kind: type[B], limits: Limits) -> B:
    """The body in its form. Left if the client goes before all of it is there."""
    bodies: Bodies = request.app.state.bodies
    # A page in a browser may send other kinds to a server of this machine without being asked whether it may.
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json":
        raise Refusal(415, f"Content-Type {given[:100]!r}: expected application/json")
    with bodies.counted() as take:
        try:
            async with asyncio.timeout(limits.body_seconds):
                content = await read_bytes(request, limits.max_body_bytes, take)
        except TimeoutError:
            message = f"the body was not there within {limits.body_seconds:g} s"
            raise Refusal(408, message, headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise Left from None
        if len(content) < LARGE:
            return parsed(content, kind)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(bodies.parsing, parsed, content, kind)
        finally:
            del content
            loop.call_later(TRIM_SECONDS, lambda: loop.run_in_executor(None, trim_memory))


async def read_bytes(request: Request, most: int, take: Callable[[int], None]) -> bytes:
    """What the head says is taken before anything is read; what it does not say, piece by piece.

    Small bodies take nothing: so much of one is in memory before anybody asks for it, and they would wait for others.
    """
    content, pieces, taken = bytearray(), request.stream(), 0
    size = int(request.headers.get("content-length", 0))
    try:
        require_size(size, most)
        if size >= LARGE:
            take(size)
            taken = size
        async for piece in pieces:
            content += piece
            require_size(len(content), most)
            if len(content) > max(taken, LARGE):
                take(len(content) - taken)
                taken = len(content)
    except Refusal:
        content.clear()
        if "expect" not in request.headers:  # who asks first sends nothing yet
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DISCARD_SECONDS):
                    async for _ in pieces:
                        pass
        raise
    return bytes(content)


def require_size(count: int, most: int) -> None:
    if count > most:
        message = f"a body of more than {most} bytes: expected at most that"
        raise Refusal(413, message, headers={"Connection": "close"})


def require_few(content: bytes, marks: tuple[bytes, ...], most: int, name: str) -> None:
    """Refusal of a JSON text with more of these than that, without what its strings spell."""
    count = sum(map(content.count, marks))
    for text in STRING.finditer(content) if count > most else ():
        count -= sum(map(text.group().count, marks))
    if count > most:
        raise Refusal(413, f"the body: {count} {name}, expected at most {most}")


def parsed(content: bytes, kind: type[B]) -> B:
    if len(content) >= LARGE:
        require_few(content, PARTS, MOST_PARTS, "lists, objects and keys")
        require_few(content, ELEMENTS, MOST_ELEMENTS, "commas between elements")
    try:
        return kind.model_validate(parse_object(content, "the body", RequestError))
    except RequestError as problem:
        refusal = Refusal(400, str(problem))
    except ValidationError as problem:
        refusal = refusal_of(problem)
    raise refusal  # out here, or it would keep the other, which keeps all of the body's objects
