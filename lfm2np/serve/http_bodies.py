"""What comes over HTTP before anything is asked: who asks, and size, time, kind and form of a body."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
from collections.abc import AsyncIterator
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from lfm2np.checkpoint.strict_json import parse_object
from lfm2np.errors import RequestError
from lfm2np.memory import trim_memory
from lfm2np.serve.limits import Limits
from lfm2np.serve.refusals import Refusal, refusal_of
from lfm2np.serve.service import Settings

B = TypeVar("B", bound=BaseModel)
LARGE = 2**16  # bytes: from here on a body is parsed beside the event loop
MOST_PARTS = 2**17  # to make more lists and objects stops all threads for a second
PARTS = (b"[", b"{", b":")
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
TRIM_SECONDS = 1.0  # after a large body: its objects are gone then, if it was refused
LOCAL = ("localhost", "127.0.0.1", "::1")
DISCARD_SECONDS = 1.0  # for the rest of a body that is too large: who writes before he reads then sees the answer


class Left(Exception):
    """The client has gone: nobody waits for an answer."""


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
    """The body in its form. Left if the client goes before all of it is there.

    Large ones are parsed one after another: each becomes objects of some twenty times its size.
    """
    parsing: asyncio.Lock = request.app.state.parsing
    # A page in a browser may send other kinds to a server of this machine without being asked whether it may.
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json":
        raise Refusal(415, f"Content-Type {given[:100]!r}: expected application/json")
    try:
        async with asyncio.timeout(limits.body_seconds):
            content = await read_bytes(request, limits.max_body_bytes)
    except TimeoutError:
        message = f"the body was not there within {limits.body_seconds:g} s"
        raise Refusal(408, message, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise Left from None
    if len(content) < LARGE:
        return parsed(content, kind)
    async with parsing:
        try:
            return await asyncio.to_thread(parsed, content, kind)
        finally:
            del content
            asyncio.get_running_loop().call_later(TRIM_SECONDS, trim_soon)


async def read_bytes(request: Request, most: int) -> bytes:
    content, pieces = bytearray(), request.stream()
    async for piece in pieces:
        content += piece
        if len(content) > most:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DISCARD_SECONDS):
                    await discard(pieces)
            message = f"a body of more than {most} bytes: expected at most that"
            raise Refusal(413, message, headers={"Connection": "close"})
    return bytes(content)


async def discard(pieces: AsyncIterator[bytes]) -> None:
    async for _ in pieces:
        pass


def trim_soon() -> None:
    asyncio.get_running_loop().run_in_executor(None, trim_memory)


def num_parts(content: bytes) -> int:
    """Lists, objects and keys of a JSON text, without what its strings spell."""
    count = sum(map(content.count, PARTS))
    for text in STRING.finditer(content) if count > MOST_PARTS else ():
        count -= sum(map(text.group().count, PARTS))
    return count


def parsed(content: bytes, kind: type[B]) -> B:
    if len(content) >= LARGE and (count := num_parts(content)) > MOST_PARTS:
        raise Refusal(413, f"the body: {count} lists, objects and keys, expected at most {MOST_PARTS}")
    try:
        return kind.model_validate(parse_object(content, "the body", RequestError))
    except RequestError as problem:
        refusal = Refusal(400, str(problem))
    except ValidationError as problem:
        refusal = refusal_of(problem)
    raise refusal  # out here, or it would keep the other, which keeps all of the body's objects
