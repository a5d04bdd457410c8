"""What comes over HTTP before anything is asked: size, time, kind and form of a body, and the key."""

from __future__ import annotations

import asyncio
import hmac
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from lfm2np.checkpoint.strict_json import parse_object
from lfm2np.errors import RequestError
from lfm2np.serve.limits import Limits
from lfm2np.serve.refusals import Refusal, refusal_of

B = TypeVar("B", bound=BaseModel)


class Left(Exception):
    """The client has gone: nobody waits for an answer."""


def require_key(request: Request, key: str | None) -> None:
    """A server without a key asks for none."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    fits = kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), (key or "").encode())
    if key is not None and not fits:
        raise Refusal(401, "expected the header Authorization: Bearer and this server's key")


async def read_body(request: Request, kind: type[B], limits: Limits) -> B:
    """The body in its form. Left if the client goes before all of it is there."""
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
    return parsed(content, kind)


async def read_bytes(request: Request, most: int) -> bytes:
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > most:
            message = f"a body of more than {most} bytes: expected at most that"
            raise Refusal(413, message, headers={"Connection": "close"})
    return bytes(content)


def parsed(content: bytes, kind: type[B]) -> B:
    try:
        return kind.model_validate(parse_object(content, "the body", RequestError))
    except RequestError as problem:
        raise Refusal(400, str(problem)) from None
    except ValidationError as problem:
        raise refusal_of(problem) from None
