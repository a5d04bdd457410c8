"""Who may send requests, and what may be read of them: key, host, and the size, time and type of a body."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.requests import Request

from lfm2np.commands.serve.settings import Refusal, Settings

CLOSE = {"Connection": "close"}


def require_key(request: Request, key: str) -> None:
    """Refusal unless the client shows it."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    fits = hmac.compare_digest(given.strip().encode("latin-1"), key.encode("latin-1"))
    if kind.lower() != "bearer" or not fits:
        raise Refusal(401, "expected the header Authorization: Bearer and this server's key")


def require_host(request: Request, hosts: Collection[str]) -> None:
    """Refusal unless the client knows the server by one of these names.

    Else a page in a browser, whose own name is made to mean this machine, could use a server that only listens here.
    """
    given = request.headers.get("host", "")
    host = None
    with contextlib.suppress(ValueError):
        host = urlsplit("//" + given).hostname
    if host not in hosts:
        raise Refusal(421, f"Host {given[:100]!r}: expected the name of this server")


async def read_body(request: Request, settings: Settings) -> bytes:
    """All of it; Refusal for one that is too large or too slow, ClientDisconnect if the client goes before."""
    # A page in a browser may send other types to a server of this machine without being asked whether it may.
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json":
        raise Refusal(415, f"Content-Type {given[:100]!r}: expected application/json")
    content, most = bytearray(), settings.max_body_bytes
    too_large = Refusal(413, f"a body of more than {most} bytes: expected at most that (--max-body-bytes)")
    if int(request.headers.get("content-length", 0)) > most:
        raise too_large
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for piece in request.stream():
                content += piece
                if len(content) > most:
                    raise too_large
    except TimeoutError:
        raise Refusal(408, f"the body was not there within {settings.body_seconds:g} s", headers=CLOSE) from None
    return bytes(content)
