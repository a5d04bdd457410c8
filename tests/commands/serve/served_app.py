"""A server of ours in this process, and a client that knows nothing of it but HTTP."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lfm2np
from lfm2np.commands.serve.app import Service, make_app
from lfm2np.commands.serve.server import serving_beside
from lfm2np.commands.serve.settings import Settings
from lfm2np.engine.engine import Engine

JSON = {"Content-Type": "application/json"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
SETTINGS = Settings("trained")
SMALL = {"block_size": 4, "num_blocks": 60, "max_num_seqs": 4, "max_num_batched_tokens": 24}


@functools.cache
def model() -> lfm2np.Model:
    return lfm2np.load()


@dataclass(frozen=True, eq=False, repr=False)
class Served:
    port: int
    engine: Engine
    service: Service

    def ask(self, path: str, fields: Any, headers: dict[str, str] = JSON) -> tuple[int, Any]:
        """The status, and the object or the events that came."""
        content = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        with self.connection() as connection:
            connection.request("POST", path, content, headers)
            return read(connection.getresponse())

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        with self.connection() as connection:
            connection.request("GET", path, headers=headers or {})
            return read(connection.getresponse())

    @contextlib.contextmanager
    def connection(self) -> Iterator[http.client.HTTPConnection]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            yield connection

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 60)

    def wait_until(self, is_so: Callable[[], Any], seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < until, (self.service.engine.num_places, self.service.engine.state)
            time.sleep(0.005)

    def wait_until_empty(self) -> None:
        """Until nothing is in progress, in the engine and before it."""
        self.wait_until(lambda: not self.service.engine.num_places and not self.is_busy())

    def is_busy(self) -> bool:
        state = self.service.engine.state
        return bool(state.running or state.waiting or state.used_blocks)


def read(response: http.client.HTTPResponse) -> tuple[int, Any]:
    content = response.read().decode()
    kind = response.getheader("Content-Type", "")
    if kind.startswith("application/json"):
        return response.status, json.loads(content)
    return response.status, events_of(content) if kind.startswith("text/event-stream") else content


def events_of(content: str) -> list[Any]:
    """What comes before [DONE], which comes last."""
    *events, last, rest = content.split("\n\n")
    assert (last, rest) == ("data: [DONE]", ""), content[-200:]
    return [json.loads(event.removeprefix("data: ")) for event in events]


@contextlib.contextmanager
def serving(served: lfm2np.Model, settings: Settings = SETTINGS, **options: Any) -> Iterator[Served]:
    """Until the block ends: then what is in progress is drained, as after a signal."""
    engine = Engine(served, **{**SMALL, **options})
    app = make_app(engine, settings)
    with serving_beside(app, settings.request_seconds, settings.write_seconds) as port:
        yield Served(port, engine, app.state.service)
