"""The endpoints of one server, as an ASGI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import lfm2np
from lfm2np.engine.engine import Engine
from lfm2np.errors import Lfm2npError
from lfm2np.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from lfm2np.serve.calls import LOG, Calls
from lfm2np.serve.desk import Desk
from lfm2np.serve.http_bodies import Left, read_body, require_key
from lfm2np.serve.jobs import chat_jobs, completion_jobs, plain_messages, prompt_ids
from lfm2np.serve.metrics import Metrics
from lfm2np.serve.refusals import Refusal
from lfm2np.serve.replies.chats import Chats
from lfm2np.serve.replies.completions import Completions
from lfm2np.serve.replies.openapi import openapi
from lfm2np.serve.replies.shared import TYPES, Detokenized, ModelTold, Tokenized, TokenizerTold, error_reply
from lfm2np.serve.replies.token_texts import token_name
from lfm2np.serve.runner import Job
from lfm2np.serve.service import Service, Settings

Endpoint = Callable[[Service, Request], Awaitable[Response]]
LEFT = 499  # as nginx logs it; nobody reads it


def make_app(engine: Engine, settings: Settings) -> Starlette:
    """The application of one engine, which no one else may touch while it runs; `app.state.service` is there then."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        desk = Desk(engine, settings.limits)
        sizes, metrics = engine.scheduler.config, Metrics(lambda: desk.runner.state)
        app.state.service = Service(
            engine.model, settings, sizes.num_blocks * sizes.block_size, desk, metrics, int(time.time())
        )
        try:
            yield
        finally:
            await asyncio.to_thread(desk.runner.stop)

    return Starlette(
        lifespan=lifespan,
        exception_handlers={HTTPException: not_served, Exception: failed},
        routes=[
            Route("/v1/completions", Calls("cmpl", CompletionBody, jobs_of_completion, Completions), methods=["POST"]),
            Route("/v1/chat/completions", Calls("chatcmpl", ChatBody, jobs_of_chat, Chats), methods=["POST"]),
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


def jobs_of_completion(service: Service, body: CompletionBody, name: str) -> list[Job]:
    return completion_jobs(service.model, body, name)


def jobs_of_chat(service: Service, body: ChatBody, name: str) -> list[Job]:
    return chat_jobs(service.model, body, name, service.capacity)


def plain(endpoint: Endpoint, is_open: bool = False) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint without the engine; one that is not open to all asks for the key."""

    @wraps(endpoint)
    async def answered(request: Request) -> Response:
        service: Service = request.app.state.service
        try:
            if not is_open:
                require_key(request, service.settings.key)
            return await endpoint(service, request)
        except Left:
            return Response(status_code=LEFT)
        except Lfm2npError as problem:
            return JSONResponse(error_reply(400, str(problem)), 400)
        except Refusal as refusal:
            return JSONResponse(
                error_reply(refusal.status, refusal.message, refusal.param), refusal.status, refusal.headers
            )

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
    ids = await asyncio.to_thread(tokens_of, service, body)
    told: Tokenized = {"count": len(ids), "max_model_len": model_told(service)["max_model_len"], "tokens": ids}
    if body.return_token_strs:
        told["token_strs"] = [token_name(service.model, one) for one in ids]
    return JSONResponse(told)


def tokens_of(service: Service, body: TokenizeBody) -> list[int]:
    """Refusal unless there is either a text or a conversation."""
    if body.prompt is not None and body.messages is None:
        return prompt_ids(service.model, body.prompt, body.add_special_tokens)
    if body.messages is not None and body.prompt is None:
        return service.model.tokenizer.encode_chat(plain_messages(body.messages))
    raise Refusal(400, "prompt, messages: expected one of them", "prompt")


async def detokenize(service: Service, request: Request) -> Response:
    body = await read_body(request, DetokenizeBody, service.settings.limits)
    service.require_model(body.model)
    text = await asyncio.to_thread(service.model.tokenizer.decode, body.tokens)
    return JSONResponse(Detokenized(prompt=text))


async def tokenizer_info(service: Service, request: Request) -> Response:
    """As vLLM's; lm-evaluation-harness takes a server's own tokenizer if it is told this."""
    eos = [token_name(service.model, one) for one in service.model.config.eos_token_ids]
    chat = service.model.tokenizer.chat
    told = TokenizerTold(
        bos_token=chat.special_tokens["bos_token"] or None, eos_token=next(iter(eos), None), chat_template=chat.template
    )
    return JSONResponse(told)


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
    """A path or a method that is not there."""
    assert isinstance(problem, HTTPException)
    told = f"{request.method} {request.url.path[:200]}: {problem.detail.lower()}; /openapi.json tells what is served"
    status = problem.status_code if problem.status_code in TYPES else 400
    return JSONResponse(error_reply(status, told), status, problem.headers)


async def failed(request: Request, problem: Exception) -> Response:
    """A defect of the server: this call ends."""
    LOG.error("%s: %s: %s", request.url.path, type(problem).__name__, problem)
    return JSONResponse(error_reply(500, f"{type(problem).__name__}: a defect of the server"), 500)
