"""The laboratory over HTTP, on this machine only: one page, whose query is the run; and whether the server lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from lfm2np.commands.serve.access import require_host
from lfm2np.commands.serve.settings import LEFT, LOCAL, Refusal
from lfm2np.teaching.lab.lab_page import lab_page
from lfm2np.teaching.lab.settings import typed_of
from lfm2np.teaching.lab.worker import KEPT, SECONDS, Reply, Worker

HOST = "127.0.0.1"
MOST_QUERY = 16 * 2**10  # bytes
MOST_WAITING = 8  # runs that are computed or wait for it
DRAIN_SECONDS = SECONDS * (MOST_WAITING + 1)  # a run waits for at most all others
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page's own policy can't say this
}


def make_app(worker: Worker) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.one_at_a_time, app.state.waiting = asyncio.Lock(), 0
        yield

    async def run_page(request: Request) -> Response:
        refused = refused_host(request)
        return refused or await answered(request, worker)

    async def health(request: Request) -> Response:
        return refused_host(request) or JSONResponse({"status": "ok"}, headers=HEADERS)

    app = Starlette(
        lifespan=lifespan,
        exception_handlers={HTTPException: not_served, Exception: failed},
        routes=[Route("/", run_page), Route("/health", health)],
    )
    app.router.redirect_slashes = False  # to wherever the client says that it is
    return app


def refused_host(request: Request) -> Response | None:
    """A page elsewhere, whose name is made to mean this machine, is not answered."""
    try:
        require_host(request, LOCAL)
    except Refusal as refusal:
        return sentence(refusal.status, refusal.message)
    # A link elsewhere may lead here; what a page elsewhere loads by itself would only keep the engine busy.
    asks = [request.headers.get(f"sec-fetch-{name}") for name in ("site", "mode", "dest")]
    if asks[0] in ("cross-site", "same-site") and asks[1:] != ["navigate", "document"]:
        return sentence(403, "a page of another site asks: expected the laboratory's own, or a link")
    return None


async def answered(request: Request, worker: Worker) -> Response:
    """The run's page. Who has gone while others were computed is not computed."""
    content: bytes = request.scope["query_string"]
    if len(content) > MOST_QUERY:
        return sentence(414, f"the link has {len(content)} bytes of settings, expected at most {MOST_QUERY}")
    query, state = content.decode("latin-1"), request.app.state
    kept = worker.kept(query)
    if kept is not None:
        return page_of(query, kept)
    if state.waiting >= MOST_WAITING:
        return sentence(503, f"{MOST_WAITING} runs wait already: ask again when they are done")
    state.waiting += 1
    try:
        async with state.one_at_a_time:
            if await request.is_disconnected():
                return Response(status_code=LEFT)
            return page_of(query, await asyncio.to_thread(worker.reply, query))
    finally:
        state.waiting -= 1


def page_of(query: str, reply: Reply) -> Response:
    """Errors are shown on a page too, above the form, so that another run is a click away."""
    text = reply.text
    if reply.status not in KEPT:
        typed = typed_of(parse_qsl(query, keep_blank_values=True))
        text = lab_page(typed, None, {"": f"{text[:1].upper()}{text[1:]}."}, None, None)
    return HTMLResponse(text, reply.status, headers=HEADERS)


def sentence(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status, headers=HEADERS)


async def not_served(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    message = sentence(problem.status_code, f"{request.method} {request.url.path[:200]!r}: the page is at /")
    message.headers.update(problem.headers or {})
    return message


async def failed(request: Request, problem: Exception) -> Response:
    return sentence(500, f"{type(problem).__name__}: a defect of the laboratory")
