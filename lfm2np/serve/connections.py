"""One connection: what HTTP itself needs, before there is a request and where a client does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from lfm2np.serve.limits import Limits
from lfm2np.serve.replies.shared import error_reply

TRANSPORTS, LIMITS = "transports", "limits"  # names in the state that an application and its server share
LEAST_READ = 2**15  # bytes that a client takes within `write_seconds` of what is waiting for it


class Framed(h11.Connection):
    """Refuses a request with two lengths, which who stands between may read as two requests. Source: RFC 9112, 6.1."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {bytes(name).lower() for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version == b"1.0"):
                raise h11.RemoteProtocolError("Transfer-Encoding beside Content-Length, or in HTTP/1.0")
        return event


class Connection(H11Protocol):
    """Cut where the head of a request does not come, and where an answer is not read; what is no HTTP gets an error
    object, too.

    The transport pauses a writer while more than 64 KiB wait, until a quarter of that is left. Who does not read is
    cut off as if he had gone: that ends his request, and what it holds of engine and memory is free.
    """

    _waiting: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = Framed(h11.SERVER)
        if self.client is not None:
            self.app_state[TRANSPORTS][self.client] = transport
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.client is not None:
            self.app_state[TRANSPORTS].pop(self.client, None)
        self._head_is_there()
        self._stop_looking()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_is_there()
        elif self._waiting is None:
            self._wait_for_head()

    def on_response_complete(self) -> None:
        self._head_is_there()  # from now on uvicorn's own limit on idle connections holds
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_looking()
        self._look_later()

    def resume_writing(self) -> None:
        self._stop_looking()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        content = json.dumps(error_reply(400, msg)).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ):
            sent = self.conn.send(event)
            if sent is not None:
                self.transport.write(sent)
        self.transport.close()

    def _wait_for_head(self) -> None:
        self._waiting = self.loop.call_later(self._limits.body_seconds, self.transport.abort)

    def _head_is_there(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _look_later(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(self._limits.write_seconds, self._look, waiting)

    def _look(self, before: int) -> None:
        """Whether the client has read since as many bytes as that were waiting."""
        if self.transport.get_write_buffer_size() > before - LEAST_READ:
            self.transport.abort()
        else:
            self._look_later()

    def _stop_looking(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    @property
    def _limits(self) -> Limits:
        limits: Limits = self.app_state[LIMITS]
        return limits


def cut(scope: Scope) -> None:
    """Ends the connection of a request whatever it still holds: to close it would wait for who does not read."""
    state: MutableMapping[str, Any] = scope.get("state", {})
    transport = state.get(TRANSPORTS, {}).get(tuple(scope["client"] or ()))
    if transport is not None:
        transport.abort()
