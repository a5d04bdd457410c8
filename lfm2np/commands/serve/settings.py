"""What a server allows, and why a request is refused: a status and a sentence, in OpenAI's error object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from lfm2np.errors import RequestError, TokenizerError
from lfm2np.values import require_count

LOCAL = ("localhost", "127.0.0.1", "::1")
LEFT = 499  # as nginx logs it; nobody reads it
FIELDS = ("role", "content", "name", "type", "tool_calls")  # of messages, that errors name
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(frozen=True)
class Settings:
    """
    name          under which the model is served
    key           that clients must show; None asks for none
    hosts         names by which clients without a key may know the server; None: any
    max_requests  prompts times samples that run or wait, of all clients
    """

    name: str
    key: str | None = None
    hosts: tuple[str, ...] | None = LOCAL
    max_requests: int = 256
    max_logprobs: int = 20  # of a token, in response and prompt; vLLM's default
    max_body_bytes: int = 2**21  # the ids of 262,144 tokens; what it becomes is parsed within some 0.3 s
    body_seconds: float = 30.0  # until all of a body is there
    request_seconds: float = 600.0  # from then until the response is complete
    write_seconds: float = 10.0  # that a client may read nothing of it

    def __post_init__(self) -> None:
        if self.key is not None and (not self.key.isascii() or not self.key.isprintable() or " " in self.key):
            raise RequestError("the key: expected printable ASCII letters without spaces")
        for name, least in (("max_requests", 1), ("max_logprobs", 0), ("max_body_bytes", 1)):
            require_count(name, getattr(self, name), least, None)
        for name in ("body_seconds", "request_seconds", "write_seconds"):
            if not 0.001 <= getattr(self, name) < 1e6:
                raise RequestError(f"{name} {getattr(self, name)!r}: expected a number of seconds, 0.001 to 1e6")


class Refusal(Exception):
    """Ends a request with an HTTP status; `param` is the field that it is about."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers

    def as_json(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


def refusal_for(problem: Exception) -> Refusal:
    """How an error is reported to the client."""
    if isinstance(problem, Refusal):
        return problem
    if isinstance(problem, ValidationError):
        return _refusal_of_form(problem)
    if isinstance(problem, ClientDisconnect):
        return Refusal(LEFT, "the client has left")
    return Refusal(400 if isinstance(problem, RequestError | TokenizerError) else 500, str(problem))


async def error_response(request: Request, problem: Exception) -> Response:
    """Starlette's handler of exceptions."""
    refusal = refusal_for(problem)
    if isinstance(problem, HTTPException):  # another path or method
        message = f"{request.method} {request.scope['path'][:200]}: {problem.detail.lower()}"
        refusal = Refusal(problem.status_code, message, headers=problem.headers)
    return JSONResponse(refusal.as_json(), refusal.status, refusal.headers)


def _refusal_of_form(problem: ValidationError) -> Refusal:
    """The first field that has another form; of one that may have several forms, what each of them says."""
    errors = problem.errors(include_url=False, include_input=False)
    first, where = errors[0], errors[0]["loc"][:1]
    if first["type"] == "unknown_field":
        return Refusal(400, first["msg"], first["ctx"]["name"])
    messages = dict.fromkeys(error["msg"] for error in errors if error["loc"][:1] == where)
    steps = [step for step in first["loc"][1:] if isinstance(step, int) or step in FIELDS]  # not the names of forms
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    name = str(where[0]) if where else "the body"
    return Refusal(400, f"{name}{place}: {', or '.join(list(messages)[:4])}", name if where else None)
