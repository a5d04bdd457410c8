"""A server of ours in this process, and a client that knows nothing of it but HTTP."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lfm2np
from lfm2np.commands.serve.app import make_app
from lfm2np.commands.serve.http_bodies import Bodies
from lfm2np.commands.serve.limits import Limits
from lfm2np.commands.serve.server import serving_beside
from lfm2np.commands.serve.service import Service, Settings
from lfm2np.engine.engine import Engine

JSON = {"Content-Type": "application/json"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
SMALL = {"block_size": 4, "num_blocks": 60, "max_num_seqs": 4, "max_num_batched_tokens": 24}


@functools.cache
def model() -> lfm2np.Model:
    return lfm2np.load()


@dataclass(frozen=True, eq=False, repr=False)
class Served:
    port: int
    engine: Engine
    service: Service
    bodies: Bodies

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

    def wait_until_empty(self, seconds: float = 30.0) -> None:
        """Until nothing is under way, in the engine and at the desk."""
        until = time.monotonic() + seconds
        while self.service.desk.num_places or self.state_is_busy():
            assert time.monotonic() < until, (self.service.desk.num_places, self.service.desk.runner.state)
            time.sleep(0.01)

    def state_is_busy(self) -> bool:
        state = self.service.desk.runner.state
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
def serving(
    served: lfm2np.Model, limits: Limits | None = None, key: str | None = None, **options: Any
) -> Iterator[Served]:
    """Until the block ends: then what is under way is drained, as after a signal."""
    engine = Engine(served, **{**SMALL, **options})
    settings = Settings("trained", key, limits or Limits())
    app = make_app(engine, settings)
    with serving_beside(app, settings.limits) as port:
        yield Served(port, engine, app.state.service, app.state.bodies)
