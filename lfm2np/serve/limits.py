"""Limits of a server; a request beyond them is refused or aborted."""

from __future__ import annotations

from dataclasses import dataclass

from lfm2np.errors import RequestError
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
