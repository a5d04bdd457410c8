"""A server of ours in this process, and a client that knows nothing of it but HTTP."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import lfm2np
from lfm2np.commands.serve.app import Service, make_app
from lfm2np.commands.serve.server import serving_beside
from lfm2np.commands.serve.settings import Settings
from lfm2np.engine.engine import Engine
from lfm2np.engine.outputs import RequestOutput
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.sequential import answer_alone

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
        return ask(self.port, fields, path, headers)

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        return get(self.port, path, headers)

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


def connection(port: int) -> contextlib.closing[http.client.HTTPConnection]:
    return contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=600))


def ask(port: int, fields: Any, path: str = "/v1/completions", headers: dict[str, str] = JSON) -> tuple[int, Any]:
    """The status, and the object or the events that came."""
    content = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    with connection(port) as opened:
        opened.request("POST", path, content, headers)
        return read(opened.getresponse())


def get(port: int, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    with connection(port) as opened:
        opened.request("GET", path, headers=headers or {})
        return read(opened.getresponse())


def read(response: http.client.HTTPResponse) -> tuple[int, Any]:
    content = response.read().decode()
    kind = response.getheader("Content-Type", "")
    if kind.startswith("application/json"):
        return response.status, json.loads(content)
    return response.status, events_of(content) if kind.startswith("text/event-stream") else content


def alone(ids: list[int], **params: Any) -> RequestOutput:
    """The same request through reference.py."""
    return list(answer_alone(model(), "alone", ids, SamplingParams(**params), 0))[-1]


def expected(fields: Mapping[str, Any], **more: Any) -> RequestOutput:
    """What a body's request gets."""
    params = {name: fields[name] for name in fields if name not in ("prompt", "cache_salt", "priority")} | more
    if "logit_bias" in params:
        params["logit_bias"] = {int(key): bias for key, bias in params["logit_bias"].items()}
    return alone(model().prompt_ids(fields["prompt"]), **params)


def joined(events: list[Any]) -> dict[int, Any]:
    """The choices of a stream, put together."""
    whole: dict[int, Any] = {}
    for event in events:
        for piece in event["choices"]:
            choice = whole.setdefault(piece["index"], {"text": "", "token_ids": [], "logprobs": None})
            choice["text"] += piece["text"]
            choice["token_ids"] += piece.get("token_ids", [])
            if piece["logprobs"] is not None:
                logprobs = choice["logprobs"] = choice["logprobs"] or {name: [] for name in piece["logprobs"]}
                for name, values in piece["logprobs"].items():
                    logprobs[name] += values
            assert "finish_reason" not in choice or choice["finish_reason"] is None, "told after its end"
            choice |= {name: piece[name] for name in ("index", "finish_reason", "stop_reason")}
    return whole


def wrong(port: int, fields: dict[str, Any], truth: RequestOutput, is_streamed: bool) -> str:
    """What differs from the truth, with two log-probabilities a token; nothing if all is right."""
    status, reply = ask(port, fields | {"logprobs": 2, "return_token_ids": True, "stream": is_streamed})
    if status != 200:
        return f"{fields}: {status} {reply}"
    choice, (sample,) = joined(reply)[0] if is_streamed else reply["choices"][0], truth.outputs
    logprobs = choice["logprobs"]["token_logprobs"]
    given = choice["token_ids"], choice["text"], logprobs, choice["finish_reason"], choice["stop_reason"]
    logprobs = [each.logprob for each in sample.logprobs or ()]
    right = list(sample.token_ids), sample.text, logprobs, sample.finish_reason, sample.stop_reason
    return "" if given == right else f"{fields}: {given}, expected {right}"


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
