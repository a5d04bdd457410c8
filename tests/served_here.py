"""fixtures/served.py in this process, on a port of its own, and doing wrong on demand."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import served
from builders import write_model

import lfm2np
from lfm2np.engine.loading import Model
from lfm2np.suite.fuzz.watched import WatchedServer

SIZES = {"max_num_seqs": 4, "block_size": 4, "num_blocks": 120, "max_num_batched_tokens": 16}
Trouble = Callable[[Any], bool]


@functools.cache
def home() -> tempfile.TemporaryDirectory[str]:
    """As long as the process lasts."""
    return tempfile.TemporaryDirectory()


@functools.cache
def folder() -> Path:
    """A tiny random checkpoint with a tokenizer."""
    return write_model(Path(home().name) / "model")


@functools.cache
def model(numerics: str = "exact") -> Model:
    return lfm2np.load(folder(), numerics)


class Here(served.Server):
    """trouble   called before each request of a trace: True if it has dealt with it
    spoil     changes what is sent: a body or an event
    freed     set at the end, so that no handler waits longer
    """

    block_on_close = False

    def __init__(self, served_engine: served.Served) -> None:
        super().__init__(("127.0.0.1", 0), handler_of(served_engine, self))
        self.engine = served_engine
        self.trouble: Trouble | None = None
        self.spoil: Callable[[dict[str, Any]], object] | None = None
        self.freed = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that left."""

    def close(self) -> None:
        self.freed.set()
        self.shutdown()
        self.server_close()


def handler_of(engine: served.Served, here: Here) -> type[BaseHTTPRequestHandler]:
    class Handler(served.handler_of(engine)):  # type: ignore[misc]
        server: Here

        def do_POST(self) -> None:
            if here.trouble is None or not here.trouble(self):
                super().do_POST()

        def do_GET(self) -> None:
            if here.trouble is None or self.path == "/health" or not here.trouble(self):
                super().do_GET()

        def send_json(self, status: int, fields: dict[str, Any]) -> None:
            if here.spoil is not None and "choices" in fields:
                here.spoil(fields)
            super().send_json(status, fields)

    return Handler


@contextlib.contextmanager
def serving(numerics: str = "exact", **sizes: Any) -> Iterator[Here]:
    here = Here(served.Served(model(numerics), {**SIZES, **sizes}))
    thread = threading.Thread(target=lambda: here.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    try:
        yield here
    finally:
        here.close()
        thread.join()


@contextlib.contextmanager
def player_of(here: Here, timeout: float = 20.0) -> Iterator[WatchedServer]:
    with contextlib.closing(WatchedServer(here.url, model().tokenizer, None, timeout)) as player:
        yield player
