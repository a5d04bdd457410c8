"""One call of /v1/completions or /v1/chat/completions: into the engine, and what it says back to the client."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.commands.serve.bodies import Sampled
from lfm2np.commands.serve.desk import Call
from lfm2np.commands.serve.engine_thread import Failed, Job, Refused
from lfm2np.commands.serve.http_bodies import Left, read_body, require_access
from lfm2np.commands.serve.jobs import num_places, takes_long
from lfm2np.commands.serve.limits import Refusal, refusal_for
from lfm2np.commands.serve.replies.shared import Answers, error_reply, usage_of
from lfm2np.commands.serve.server import cut
from lfm2np.commands.serve.service import Service
from lfm2np.engine.outputs import RequestOutput
from lfm2np.errors import Lfm2npError

LOG = logging.getLogger("lfm2np.commands.serve")
NONE: Mapping[str, str] = {}
FAREWELL_SECONDS = 1.0  # for the last words to a client that does not read


@dataclass(frozen=True, eq=False)
class Calls:
    """An endpoint."""

    prefix: str  # of the names of its calls
    body_kind: type[Sampled]  # what it takes
    make_jobs: Callable[[Service, Any, str], list[Job]]  # of the name of a call; RequestError for what can't be met
    make_answers: Callable[[LoadedModel, Any], Answers]  # how they are told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, how = time.monotonic(), "500"
        service: Service = scope["app"].state.service
        reply = Reply(send)
        try:
            await self._answer(service, Request(scope, receive), reply)
            how = "200"
        except Left:
            how = "left"
        except asyncio.CancelledError:
            how = "left"
            raise
        except (Refusal, Lfm2npError, TimeoutError) as problem:
            refusal = refusal_for(problem, service.settings.limits.request_seconds)
            how = str(refusal.status)
            if not await reply.refuse(refusal):
                cut(scope)
        finally:
            service.metrics.count(how)
            LOG.info("%s %s %.3f s", scope["path"], how, time.monotonic() - began)

    async def _answer(self, service: Service, request: Request, reply: Reply) -> None:
        """Left, Refusal, RequestError or TimeoutError if there is none."""
        limits = service.settings.limits
        require_access(request, service.settings)
        body = await read_body(request, self.body_kind, limits)
        service.require_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise Refusal(400, "stream_options: expected stream true beside it", "stream_options")
        call = service.desk.enter(num_places(body))
        try:
            async with asyncio.timeout(limits.request_seconds):
                await unless_left(request.receive, self._tell(service, call, body, reply))
        finally:
            service.desk.leave(call)
            for output in call.outputs.values():
                if isinstance(output, RequestOutput) and output.metrics is not None:
                    service.metrics.observe(output.metrics)

    async def _tell(self, service: Service, call: Call, body: Sampled, reply: Reply) -> None:
        name = f"{self.prefix}-{uuid.uuid4().hex}"
        make = partial(self.make_jobs, service, body, name)
        service.desk.start(call, await service.beside(make) if takes_long(body) else make())
        head = {"id": name, "created": int(time.time()), "model": service.settings.name}
        head["system_fingerprint"] = service.fingerprint
        tell = self._stream if body.stream else self._whole
        await tell(call, self.make_answers(service.model, body), head, body, reply)

    async def _whole(self, call: Call, answers: Answers, head: Mapping[str, Any], body: Sampled, reply: Reply) -> None:
        while not call.is_finished:
            require_no_trouble(call.outputs.values())
            await call.news()
        require_no_trouble(call.outputs.values())
        outputs = outputs_of(call)
        choices = [answers.whole(choice) for index, output in outputs for choice in answers.more(index, output)]
        fields = answers.prompt_fields(outputs[0][1])
        usage = usage_of((output for _, output in outputs), answers.counts_new)
        await reply.json({**head, "object": answers.kind, "choices": choices, "usage": usage, **fields})

    async def _stream(self, call: Call, answers: Answers, head: Mapping[str, Any], body: Sampled, reply: Reply) -> None:
        head = {**head, "object": answers.kind_of_piece}
        counts = bool(body.stream_options and body.stream_options.include_usage)
        async for choice, fields in pieces(call, answers):
            await reply.event({**head, "choices": [choice], **({"usage": None} if counts else {}), **fields})
        if counts:
            usage = usage_of((output for _, output in outputs_of(call)), answers.counts_new)
            await reply.event({**head, "choices": [], "usage": usage})
        await reply.end()


async def pieces(call: Call, answers: Answers) -> AsyncIterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Choices as they grow, each with the fields of its event beside; Refusal when a job comes to trouble."""
    is_first = True
    while True:
        is_last = call.is_finished  # told before it is looked at: what comes meanwhile is looked at again
        require_no_trouble(call.outputs.values())
        for index, output in outputs_of(call):
            for choice in answers.more(index, output):
                yield choice, answers.prompt_fields(output) if is_first else {}
                is_first = False
        if is_last:
            return
        await call.news()


def outputs_of(call: Call) -> list[tuple[int, RequestOutput]]:
    """Of the jobs that have any, by their place in the call."""
    events = ((index, call.outputs.get(job.name)) for index, job in enumerate(call.jobs))
    return [(index, output) for index, output in events if isinstance(output, RequestOutput)]


def require_no_trouble(events: Any) -> None:
    """Refusal for a job that was refused or failed: one of several prompts ends all of its call."""
    for event in events:
        if isinstance(event, Refused):
            raise Refusal(400, event.why)
        if isinstance(event, Failed):
            raise Refusal(500, event.why)
        for sample in event.outputs:
            if sample.error is not None:
                raise Refusal(500, sample.error)


class Reply:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_begun = self._is_streamed = False

    async def json(self, fields: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] = NONE) -> None:
        content = json.dumps(fields, allow_nan=False).encode()
        self._is_begun = True
        all_headers = {"content-type": "application/json", "content-length": str(len(content)), **headers}
        await self._start(status, all_headers)
        await self._send({"type": "http.response.body", "body": content, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})  # waits until the client has read nearly all

    async def event(self, fields: Mapping[str, Any]) -> None:
        """Source: HTML standard, server-sent events."""
        await self._piece(b"data: " + json.dumps(fields, allow_nan=False).encode() + b"\n\n", True)

    async def end(self) -> None:
        await self._piece(b"data: [DONE]\n\n", False)

    async def refuse(self, refusal: Refusal) -> bool:
        """Whether the client could be told. In a stream that has begun the status is told already: the error is its
        last event."""
        reply = error_reply(refusal.status, refusal.message, refusal.param)
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                if not self._is_begun:
                    await self.json(reply, refusal.status, refusal.headers)
                elif self._is_streamed:
                    await self.event(reply)
                    await self.end()
                else:
                    return False
        except TimeoutError:
            return False
        return True

    async def _piece(self, content: bytes, goes_on: bool) -> None:
        if not self._is_begun:
            self._is_begun = self._is_streamed = True
            await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        await self._send({"type": "http.response.body", "body": content, "more_body": goes_on})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


async def unless_left(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does it, or raises Left as soon as the client has gone."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(until_left(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Left
        doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
