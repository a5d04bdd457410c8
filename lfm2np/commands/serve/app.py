"""The endpoints of one server, as an ASGI application."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import lfm2np
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.commands.serve.access import read_body, require_host, require_key
from lfm2np.commands.serve.answers import Answers, Chats, Completions, fingerprint_of, token_name
from lfm2np.commands.serve.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Sampled,
    TokenizeBody,
    parsed,
)
from lfm2np.commands.serve.engine_thread import Call, EngineThread
from lfm2np.commands.serve.jobs import chat_ids, jobs_of, num_places, prompt_ids, require_tokenizer
from lfm2np.commands.serve.metrics import metrics_text
from lfm2np.commands.serve.settings import Refusal, Settings, error_response, refusal_for
from lfm2np.engine.engine import Engine
from lfm2np.errors import Lfm2npError

LOG = logging.getLogger("lfm2np.commands.serve")
LARGE = 2**16  # bytes of a body that is parsed beside the event loop, one at a time
PREPARING = 4  # threads where texts become tokens
OPEN = "/health"  # to clients without key or host
ERRORS = (Refusal, Lfm2npError, ValidationError, HTTPException, ClientDisconnect, Exception)
T = TypeVar("T")
B = TypeVar("B", TokenizeBody, DetokenizeBody, Sampled)


@dataclass(frozen=True, eq=False)
class Service:
    """What all endpoints of one server share.

    capacity  tokens that the cache holds
    parsing   the thread of large bodies: one, since each becomes objects of many times its size
    created   seconds since 1970, when it began
    ended     POST requests by HTTP status
    """

    model: LoadedModel
    settings: Settings
    capacity: int
    engine: EngineThread
    preparing: ThreadPoolExecutor
    parsing: ThreadPoolExecutor
    created: int
    ended: Counter[int] = field(default_factory=Counter)

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.model)

    async def beside(self, work: Callable[[], T]) -> T:
        """What it returns, computed in one of the threads where texts become tokens."""
        return await asyncio.get_running_loop().run_in_executor(self.preparing, work)

    async def read(self, request: Request, kind: type[B]) -> B:
        """The body in its form, of a request for the model that is here."""
        content = await read_body(request, self.settings)
        parse = partial(parsed, content, kind)
        if len(content) < LARGE:
            body = parse()
        else:
            body = await asyncio.get_running_loop().run_in_executor(self.parsing, parse)
        if body.model is not None:
            self.require_model(body.model)
        return body

    def require_model(self, name: str) -> None:
        if name != self.settings.name:
            raise Refusal(404, f"model {name[:200]!r}: expected {self.settings.name!r}, the only one here", "model")

    def model_card(self) -> dict[str, Any]:
        """`max_model_len` is what context and cache have room for."""
        return {
            "id": self.settings.name,
            "object": "model",
            "created": self.created,
            "owned_by": "lfm2np",
            "max_model_len": min(self.model.config.max_position_embeddings, self.capacity),
            "numerics": self.model.numerics.name,
            "checkpoint_sha256": self.model.sha256,
        }


def make_app(engine: Engine, settings: Settings) -> Starlette:
    """The application of one engine, which no one else may touch while it runs; `app.state.service` is there then."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        thread = EngineThread(engine, settings.max_requests)
        sizes = engine.scheduler.config
        pools = ThreadPoolExecutor(PREPARING), ThreadPoolExecutor(1)
        capacity = sizes.num_blocks * sizes.block_size
        app.state.service = Service(engine.model, settings, capacity, thread, *pools, int(time.time()))
        try:
            yield
        finally:
            for pool in pools:
                pool.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(thread.stop)

    app = Starlette(
        lifespan=lifespan,
        exception_handlers=dict.fromkeys(ERRORS, error_response),
        middleware=[Middleware(Gate)],
        routes=[
            Route("/v1/completions", Generation("cmpl", CompletionBody, Completions), methods=["POST"]),
            Route("/v1/chat/completions", Generation("chatcmpl", ChatBody, Chats), methods=["POST"]),
            Route("/v1/models", endpoint(models)),
            Route("/v1/models/{name:path}", endpoint(one_model)),
            Route("/tokenize", endpoint(tokenize), methods=["POST"]),
            Route("/detokenize", endpoint(detokenize), methods=["POST"]),
            Route("/tokenizer_info", endpoint(tokenizer_info)),
            Route("/version", endpoint(version)),
            Route("/metrics", endpoint(metrics)),
            Route(OPEN, endpoint(health)),
        ],
    )
    app.router.redirect_slashes = False  # to wherever the client says that it is
    return app


class Gate:
    """Checks key or host of each request; its end is logged and, of a POST, counted."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, status = time.monotonic(), 500
        service, request = scope["app"].state.service, Request(scope)

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            require_access(request, service.settings)
            await self._app(scope, receive, noting)
        except Refusal as refusal:
            await (await error_response(request, refusal))(scope, receive, noting)
        finally:
            status = getattr(request.state, "ended", status)
            LOG.info("%s %d %.3f s", scope["path"][:200], status, time.monotonic() - began)
            if scope["method"] == "POST":
                service.ended[status] += 1


def require_access(request: Request, settings: Settings) -> None:
    if request.scope["path"] == OPEN:
        return
    if settings.key is not None:
        require_key(request, settings.key)
    elif settings.hosts is not None:
        require_host(request, settings.hosts)


# --- completions and chats


@dataclass(frozen=True, eq=False)
class Generation:
    """An endpoint that computes: the prefix of its ids, what it takes, and how it answers."""

    prefix: str
    body_kind: type[Sampled]
    answers_kind: type[Answers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The client that leaves, and time that runs out, end the call, whatever it waits for."""
        request, service = Request(scope, receive), scope["app"].state.service
        body = await service.read(request, self.body_kind)
        if body.stream_options is not None and not body.stream:
            raise Refusal(400, "stream_options: expected stream true beside it", "stream_options")
        seconds, loop = service.settings.request_seconds, asyncio.get_running_loop()
        too_late = Refusal(504, f"the response was not complete within {seconds:g} s")
        with service.engine.entered(num_places(body)) as call:
            timer = loop.call_later(seconds, service.engine.end, call, too_late)
            watching = asyncio.create_task(end_when_left(receive, service.engine, call))
            try:
                name = f"{self.prefix}-{uuid.uuid4().hex}"
                make = partial(jobs_of, service.model, service.settings, service.capacity, body, name)
                service.engine.start(call, await service.beside(make))
                head = {"id": name, "created": int(time.time()), "model": service.settings.name}
                head["system_fingerprint"] = service.fingerprint
                respond = stream if body.stream else respond_whole
                await respond(request, send, call, self.answers_kind(service.model, body), head)
            finally:
                timer.cancel()
                watching.cancel()


async def end_when_left(receive: Receive, engine: EngineThread, call: Call) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    engine.end(call, ClientDisconnect())


async def respond_whole(request: Request, send: Send, call: Call, answers: Answers, head: Mapping[str, Any]) -> None:
    async for latest in call.changes():
        outputs = latest
    choices, usage = map(answers.whole, answers.pieces(outputs)), answers.usage(outputs)
    fields = {**head, "object": answers.kind, "choices": [*choices], "usage": usage, **answers.shared(outputs[0][1])}
    await JSONResponse(fields)(request.scope, request.receive, send)


async def stream(request: Request, send: Send, call: Call, answers: Answers, head: Mapping[str, Any]) -> None:
    """An event for each change of a choice. Once it has begun, an error is its last event.

    Source: HTML standard, server-sent events.
    """
    counts = bool(answers.body.stream_options and answers.body.stream_options.include_usage)
    head = {**head, "object": answers.kind_of_piece}
    has_begun = False

    async def event(fields: Mapping[str, Any]) -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        content = b"data: " + json.dumps(fields, allow_nan=False).encode() + b"\n\n"
        await send({"type": "http.response.body", "body": content, "more_body": True})

    try:
        async for outputs in call.changes():
            for choice in answers.pieces(outputs):
                fields = {"usage": None} if counts else {}
                fields |= {} if has_begun else answers.shared(outputs[0][1])
                await event({**head, "choices": [choice], **fields})
                if call.problem is not None:  # ended while the client did not read
                    raise call.problem
        if counts:
            await event({**head, "choices": [], "usage": answers.usage(outputs)})
    except Exception as problem:
        if not has_begun:
            raise
        refusal = refusal_for(problem)
        request.state.ended = refusal.status
        await event(refusal.as_json())
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


# --- endpoints without the engine


def endpoint(answer: Callable[[Service, Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def answered(request: Request) -> Response:
        return await answer(request.app.state.service, request)

    return answered


async def models(service: Service, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [service.model_card()]})


async def one_model(service: Service, request: Request) -> Response:
    service.require_model(request.path_params["name"])
    return JSONResponse(service.model_card())


async def tokenize(service: Service, request: Request) -> Response:
    body = await service.read(request, TokenizeBody)
    ids = await service.beside(lambda: tokens_of(service.model, body))
    fields = {"count": len(ids), "max_model_len": service.model_card()["max_model_len"], "tokens": ids}
    if body.return_token_strs:
        fields["token_strs"] = [token_name(service.model, token_id) for token_id in ids]
    return JSONResponse(fields)


def tokens_of(model: LoadedModel, body: TokenizeBody) -> list[int]:
    """Refusal unless there is either a text or a conversation."""
    if body.prompt is not None and body.messages is None:
        return prompt_ids(model, body.prompt, body.add_special_tokens)
    if body.messages is not None and body.prompt is None and body.add_special_tokens is not False:
        return chat_ids(model, body.messages, body)
    raise Refusal(400, "prompt, messages: expected one of them; messages have their special tokens", "prompt")


async def detokenize(service: Service, request: Request) -> Response:
    body = await service.read(request, DetokenizeBody)
    require_tokenizer(service.model)
    return JSONResponse({"prompt": await service.beside(lambda: service.model.tokenizer.decode(body.tokens))})


async def tokenizer_info(service: Service, request: Request) -> Response:
    """As vLLM's; lm-evaluation-harness then uses the server's tokenizer."""
    require_tokenizer(service.model)
    chat, eos = service.model.tokenizer.chat, service.model.config.eos_token_ids
    fields = {
        "bos_token": chat.special_tokens["bos_token"] or None,
        "eos_token": token_name(service.model, eos[0]) if eos else None,
        "chat_template": chat.template,
    }
    return JSONResponse(fields)


async def version(service: Service, request: Request) -> Response:
    return JSONResponse({"version": lfm2np.__version__, "system_fingerprint": service.fingerprint})


async def metrics(service: Service, request: Request) -> Response:
    text = metrics_text(service.engine.state, service.ended)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def health(service: Service, request: Request) -> Response:
    if service.engine.broken is not None:
        raise Refusal(503, f"the engine ended: {service.engine.broken}")
    return JSONResponse({"status": "ok"})
