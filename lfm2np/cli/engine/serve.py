"""`lfm2np serve`: the engine behind OpenAI's protocol."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from lfm2np.cli.engine.options import add_engine_options, engine_options, make_drafter, seed_of
from lfm2np.cli.shared.parser import AddCommand
from lfm2np.cli.shared.prompts import add_arithmetic_options, load_model
from lfm2np.engine.engine import Engine
from lfm2np.errors import RequestError

KEY_VARIABLE = "LFM2NP_API_KEY"
NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client")
EXAMPLE = """lfm2np serve --model LFM2-350M --port 8000
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "sort: 7 2 9 ="}'"""
EXIT_CODES = """exit codes:
  0    drained: a first SIGTERM or interrupt waits for what is under way
  1    memory ran out, or the trace can't be written
  2    the arguments cannot be met (an address in use, unknown option, an extra that is not installed)
  3    config, weights or tokenizer are missing, corrupt or not LFM2
  130  ended by a second SIGTERM or interrupt"""


def run_serve(arguments: argparse.Namespace) -> None:
    require_extra()
    from lfm2np.serve.app import make_app
    from lfm2np.serve.limits import Limits
    from lfm2np.serve.replies.shared import fingerprint_of
    from lfm2np.serve.server import is_loopback, listen, serve, url_of
    from lfm2np.serve.service import Settings

    names = ("max_requests", "max_body_bytes", "body_seconds", "request_seconds")
    limits = Limits(**{name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None})
    listening = listen(arguments.host, arguments.port)
    model = load_model(arguments)
    if model.has_tokenizer:
        model.tokenizer  # noqa: B018 - a corrupt one shows now, not in a client's request
    settings = Settings(arguments.name or model.path.resolve().name, os.environ.get(KEY_VARIABLE) or None, limits)
    logging.basicConfig(format="lfm2np: %(message)s", level=logging.INFO if arguments.verbose else logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    options = engine_options(arguments) | {"seed": seed_of(arguments), "drafter": make_drafter(model, arguments)}
    with open_trace(arguments.trace) as trace:
        engine = Engine(model, trace=trace, **options)
        if settings.key is None and not is_loopback(listening):
            open_to_all = f"{arguments.host}: anyone who reaches it may ask; {KEY_VARIABLE} sets a key"
            print(f"lfm2np: warning: {open_to_all}", file=sys.stderr)
        url, fingerprint = url_of(listening), fingerprint_of(model)
        told = json.dumps({"url": url, "model": settings.name, "system_fingerprint": fingerprint})
        print(told if arguments.json else f"{url}: {settings.name} ({fingerprint})", flush=True)
        if not serve(make_app(engine, settings), listening):
            raise KeyboardInterrupt


def require_extra() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(
            f"{', '.join(missing)}: not installed; install the extra `serve`: pip install 'lfm2np[serve]'"
        )


@contextlib.contextmanager
def open_trace(name: str | None) -> Iterator[TextIO | None]:
    """The file, written line by line: a server has no end at which a whole one could appear."""
    if name is None:
        yield None
        return
    try:
        with Path(name).open("w", encoding="utf-8", buffering=1) as lines:
            yield lines
    except OSError as problem:
        raise RequestError(f"--trace {name}: can't be written: {problem}") from None


def add_serve(command: AddCommand) -> None:
    sub = command(
        "serve",
        run_serve,
        "answer over HTTP in OpenAI's protocol",
        EXAMPLE,
        tokenizer=True,
        exit_codes=EXIT_CODES,
    )
    sub.add_argument("--host", metavar="NAME", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    sub.add_argument("--port", metavar="N", type=int, default=8000, help="0 takes a free one (8000)")
    sub.add_argument("--name", metavar="NAME", help="of the model, for clients (the checkpoint's)")
    sub.add_argument("--verbose", action="store_true", help="a line on standard error for each call")
    limits = sub.add_argument_group("limits")
    limits.add_argument("--max-requests", metavar="N", type=int, help="prompts times samples under way, else 429 (256)")
    limits.add_argument("--max-body-bytes", metavar="N", type=int, help="of one call (8 MiB)")
    limits.add_argument("--body-seconds", metavar="S", type=float, help="until a body is there (30)")
    limits.add_argument("--request-seconds", metavar="S", type=float, help="until an answer is complete (600)")
    add_engine_options(sub)
    add_arithmetic_options(sub)
