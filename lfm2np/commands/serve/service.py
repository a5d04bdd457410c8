"""What all endpoints of one server share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.commands.serve.desk import Desk
from lfm2np.commands.serve.limits import Limits, Refusal
from lfm2np.commands.serve.metrics import Metrics
from lfm2np.commands.serve.replies.shared import fingerprint_of
from lfm2np.errors import RequestError

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """
    name   under which the model is served
    key    that clients must show; None asks for none
    hosts  names, beside this machine's own, by which clients without a key may know the server; None: any
    """

    name: str
    key: str | None = None
    limits: Limits = field(default_factory=Limits)
    hosts: tuple[str, ...] | None = ()

    def __post_init__(self) -> None:
        if self.key is not None and (not self.key.isascii() or not self.key.isprintable() or " " in self.key):
            raise RequestError("the key: expected printable ASCII letters without spaces")


@dataclass(frozen=True, eq=False)
class Service:
    """
    capacity   tokens that the cache holds
    preparing  threads where texts become tokens
    created    seconds since 1970, when it began
    """

    model: LoadedModel
    settings: Settings
    capacity: int
    desk: Desk
    metrics: Metrics
    preparing: ThreadPoolExecutor
    created: int

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.model)

    async def beside(self, work: Callable[[], T]) -> T:
        """What it returns, done in one of the threads where texts become tokens, and back."""
        return await asyncio.get_running_loop().run_in_executor(self.preparing, work)

    def require_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.name:
            raise Refusal(404, f"model {name[:200]!r}: expected {self.settings.name!r}, the only one here", "model")
