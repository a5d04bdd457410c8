"""Limits of a server, and why a call is refused: a status and a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from lfm2np.errors import RequestError, TokenizerError
from lfm2np.values import require_count


@dataclass(frozen=True)
class Limits:
    """`max_requests` counts prompts times samples that run or wait, of all clients."""

    max_requests: int = 256
    max_logprobs: int = 20  # of a token, in response and prompt; vLLM's default
    max_body_bytes: int = 8 * 2**20
    max_bodies_bytes: int | None = None  # of all calls together, read or awaited and not parsed yet; 8 of the largest
    body_seconds: float = 30.0  # until all of a head, and then of a body, is there
    request_seconds: float = 600.0  # from then until the answer is on its way to the client, all of it
    write_seconds: float = 10.0  # until a client reads on in an answer that waits for it, else it is cut off

    def __post_init__(self) -> None:
        for name, least in (("max_requests", 1), ("max_logprobs", 0), ("max_body_bytes", 1)):
            require_count(name, getattr(self, name), least, None)
        require_count("max_bodies_bytes", self.most_bodies_bytes, self.max_body_bytes, None)
        for name in ("body_seconds", "request_seconds", "write_seconds"):
            if not 0.0 < getattr(self, name) < 1e9:
                raise RequestError(f"{name} {getattr(self, name)!r}: expected a number of seconds above 0")

    @property
    def most_bodies_bytes(self) -> int:
        return 8 * self.max_body_bytes if self.max_bodies_bytes is None else self.max_bodies_bytes


class Refusal(Exception):
    """Ends a call with an HTTP status; `param` is the field that it is about."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, dict(headers or {})


def refusal_for(problem: Exception, seconds: float) -> Refusal:
    """The response to an error; `seconds` is the time limit of a request."""
    if isinstance(problem, Refusal):
        return problem
    if isinstance(problem, TimeoutError):
        return Refusal(504, f"the answer was not complete within {seconds:g} s")
    return Refusal(400 if isinstance(problem, RequestError | TokenizerError) else 500, str(problem))


def refusal_of(problem: ValidationError) -> Refusal:
    """The first field that is not as the document of the protocol has it; of one that may be of several kinds, all."""
    errors = problem.errors(include_url=False, include_context=False, include_input=False)
    where = errors[0]["loc"][:1]
    if errors[0]["type"] == "extra_forbidden":
        path = ".".join(map(str, errors[0]["loc"]))[:200]
        return Refusal(400, f"{path}: unknown field", path)
    messages = dict.fromkeys(
        error["msg"][:1].lower() + error["msg"][1:] for error in errors if error["loc"][:1] == where
    )
    name = str(where[0]) if where else "the body"
    return Refusal(400, f"{name}: {', or '.join(list(messages)[:4])}", name if where else None)
