"""The endpoints of one server, as an ASGI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import lfm2np
from lfm2np.commands.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from lfm2np.commands.serve.calls import LOG, Calls
from lfm2np.commands.serve.desk import Desk
from lfm2np.commands.serve.http_bodies import Bodies, Left, read_body, require_access
from lfm2np.commands.serve.jobs import chat_ids, chat_jobs, completion_jobs, prompt_ids, require_tokenizer
from lfm2np.commands.serve.limits import Refusal, refusal_for
from lfm2np.commands.serve.metrics import Metrics
from lfm2np.commands.serve.replies.chats import Chats
from lfm2np.commands.serve.replies.completions import Completions
from lfm2np.commands.serve.replies.openapi import openapi
from lfm2np.commands.serve.replies.shared import (
    TYPES,
    Detokenized,
    ModelTold,
    Tokenized,
    TokenizerTold,
    error_reply,
    token_name,
)
from lfm2np.commands.serve.server import LIMITS, TRANSPORTS
from lfm2np.commands.serve.service import Service, Settings
from lfm2np.engine.engine import Engine
from lfm2np.errors import Lfm2npError

Endpoint = Callable[[Service, Request], Awaitable[Response]]
PREPARING = 4  # threads
LEFT = 499  # as nginx logs it; nobody reads it


def make_app(engine: Engine, settings: Settings) -> Starlette:
    """The application of one engine, which no one else may touch while it runs; `app.state.service` is there then."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
        desk = Desk(engine, settings.limits)
        sizes, metrics = engine.scheduler.config, Metrics(lambda: desk.runner.state)
        capacity, preparing = sizes.num_blocks * sizes.block_size, ThreadPoolExecutor(PREPARING)
        now = int(time.time())
        app.state.bodies = bodies = Bodies(settings.limits.most_bodies_bytes)
        app.state.service = Service(engine.model, settings, capacity, desk, metrics, preparing, now)
        try:
            yield {TRANSPORTS: {}, LIMITS: settings.limits}
        finally:
            for threads in (preparing, bodies.parsing):
                threads.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(desk.runner.stop)

    app = Starlette(
        lifespan=lifespan,
        exception_handlers={HTTPException: not_served, Exception: failed},
        routes=[
            Route("/v1/completions", Calls("cmpl", CompletionBody, completion_jobs, Completions), methods=["POST"]),
            Route("/v1/chat/completions", Calls("chatcmpl", ChatBody, chat_jobs, Chats), methods=["POST"]),
            Route("/v1/models", plain(models)),
            Route("/v1/models/{name:path}", plain(one_model)),
            Route("/tokenize", plain(tokenize), methods=["POST"]),
            Route("/detokenize", plain(detokenize), methods=["POST"]),
            Route("/tokenizer_info", plain(tokenizer_info)),
            Route("/version", plain(version)),
            Route("/metrics", plain(metrics_text)),
            Route("/health", plain(health, is_open=True)),
            Route("/openapi.json", plain(document, is_open=True)),
        ],
    )
    app.router.redirect_slashes = False  # to wherever the client says that it is
    return app


def plain(endpoint: Endpoint, is_open: bool = False) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint without the engine; one that is not open to all asks for the key."""

    @wraps(endpoint)
    async def answered(request: Request) -> Response:
        service: Service = request.app.state.service
        try:
            if not is_open:
                require_access(request, service.settings)
            reply = await endpoint(service, request)
        except Left:
            reply = Response(status_code=LEFT)
        except (Refusal, Lfm2npError) as problem:
            refusal = refusal_for(problem, service.settings.limits.request_seconds)
            body = error_reply(refusal.status, refusal.message, refusal.param)
            reply = JSONResponse(body, refusal.status, refusal.headers)
        LOG.info("%s %d", request.url.path[:200], reply.status_code)
        return reply

    return answered


async def models(service: Service, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [model_told(service)]})


async def one_model(service: Service, request: Request) -> Response:
    service.require_model(request.path_params["name"])
    return JSONResponse(model_told(service))


def model_told(service: Service) -> ModelTold:
    return {
        "id": service.settings.name,
        "object": "model",
        "created": service.created,
        "owned_by": "lfm2np",
        "max_model_len": min(service.model.config.max_position_embeddings, service.capacity),
        "numerics": service.model.numerics.name,
        "checkpoint_sha256": service.model.sha256,
    }


async def tokenize(service: Service, request: Request) -> Response:
    body = await read_body(request, TokenizeBody, service.settings.limits)
    service.require_model(body.model)
    ids = await service.beside(lambda: tokens_of(service, body))
    fields: Tokenized = {"count": len(ids), "max_model_len": model_told(service)["max_model_len"], "tokens": ids}
    if body.return_token_strs:
        fields["token_strs"] = [token_name(service.model, token_id) for token_id in ids]
    return JSONResponse(fields)


def tokens_of(service: Service, body: TokenizeBody) -> list[int]:
    """Refusal unless there is either a text or a conversation."""
    if body.prompt is not None and body.messages is None:
        return prompt_ids(service.model, body.prompt, body.add_special_tokens)
    if body.messages is not None and body.prompt is None and body.add_special_tokens is not False:
        return chat_ids(service.model, body.messages)
    raise Refusal(400, "prompt, messages: expected one of them; messages have their special tokens", "prompt")


async def detokenize(service: Service, request: Request) -> Response:
    body = await read_body(request, DetokenizeBody, service.settings.limits)
    service.require_model(body.model)
    require_tokenizer(service.model)
    text = await service.beside(lambda: service.model.tokenizer.decode(body.tokens))
    return JSONResponse(Detokenized(prompt=text))


async def tokenizer_info(service: Service, request: Request) -> Response:
    """As vLLM's; lm-evaluation-harness then uses the server's tokenizer."""
    require_tokenizer(service.model)
    eos = [token_name(service.model, eos_token_id) for eos_token_id in service.model.config.eos_token_ids]
    chat = service.model.tokenizer.chat
    bos = chat.special_tokens["bos_token"] or None
    fields: TokenizerTold = {"bos_token": bos, "eos_token": next(iter(eos), None), "chat_template": chat.template}
    return JSONResponse(fields)


async def version(service: Service, request: Request) -> Response:
    return JSONResponse({"version": lfm2np.__version__, "system_fingerprint": service.fingerprint})


async def metrics_text(service: Service, request: Request) -> Response:
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def health(service: Service, request: Request) -> Response:
    broken = service.desk.runner.broken
    if broken is not None:
        raise Refusal(503, f"the engine ended: {broken}")
    return JSONResponse({"status": "ok"})


async def document(service: Service, request: Request) -> Response:
    return JSONResponse(openapi())


async def not_served(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {problem.detail.lower()}; /openapi.json tells what is served"
    status = problem.status_code if problem.status_code in TYPES else 400
    return JSONResponse(error_reply(status, message), status, problem.headers)


async def failed(request: Request, problem: Exception) -> Response:
    LOG.error("%s: %s: %s", request.url.path, type(problem).__name__, problem)
    return JSONResponse(error_reply(500, f"{type(problem).__name__}: a defect of the server"), 500)
