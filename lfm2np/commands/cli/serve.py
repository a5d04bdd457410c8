"""`lfm2np serve`: the engine behind OpenAI's protocol."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TextIO, cast

from lfm2np.commands.cli.options import add_engine_options, engine_options, make_drafter, seed_of
from lfm2np.commands.cli.shared.parser import Commands, add, add_command, option
from lfm2np.commands.cli.shared.prompts import add_arithmetic_options, load_model
from lfm2np.commands.serve.extra import require_extra
from lfm2np.engine.engine import Engine
from lfm2np.errors import RequestError
from lfm2np.oracle.engines.http_client import KEY_VARIABLE

LOG = logging.getLogger("lfm2np.commands.serve")
LIMITS = {  # fields of Settings: the option's value, and its help
    "max_requests": ("N", "most prompts times samples in progress, beyond which 429 (256)"),
    "max_body_bytes": ("N", "most bytes of a request's body (2 MiB)"),
    "request_seconds": ("S", "time to complete a response (600)"),
}
EXAMPLE = """lfm2np serve --model LFM2-350M --port 8000
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "sort: 7 2 9 ="}'"""


def run_serve(arguments: argparse.Namespace) -> None:
    require_extra("serve")
    from lfm2np.commands.serve.answers import fingerprint_of
    from lfm2np.commands.serve.app import make_app
    from lfm2np.commands.serve.server import is_loopback, listen, serve, url_of
    from lfm2np.commands.serve.settings import LOCAL, Settings

    key = os.environ.get(KEY_VARIABLE)
    if key == "":
        raise RequestError(f"{KEY_VARIABLE}: set to an empty text, expected a key, or the variable unset for none")
    given = {name: getattr(arguments, name) for name in LIMITS if getattr(arguments, name) is not None}
    settings = Settings(name="", key=key, **given)
    listening = listen(arguments.host, arguments.port, settings.write_seconds)
    model = load_model(arguments)
    if model.has_tokenizer:
        model.tokenizer  # noqa: B018 - a corrupt one shows now, not in a client's request
    name, hosts = arguments.name or model.path.resolve().name, None
    if is_loopback(listening):
        hosts = (*LOCAL, arguments.host)
    settings = replace(settings, name=name, hosts=hosts)
    logging.basicConfig(format="lfm2np: %(message)s", level=logging.INFO if arguments.verbose else logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if key is None and hosts is None:
        LOG.warning("warning: %s: anyone who reaches it may send requests; %s sets a key", arguments.host, KEY_VARIABLE)
    url, fingerprint = url_of(listening), fingerprint_of(model)

    def on_start() -> None:
        as_json = json.dumps({"url": url, "model": name, "system_fingerprint": fingerprint})
        print(as_json if arguments.json else f"{url}: {name} ({fingerprint})", flush=True)

    options = engine_options(arguments) | {"seed": seed_of(arguments), "drafter": make_drafter(model, arguments)}
    # Written line by line: a server has no end at which a whole file could appear.
    lines = contextlib.nullcontext() if arguments.trace is None else contextlib.closing(Lines(arguments.trace))
    with lines as trace:
        engine = Engine(model, trace=cast(TextIO | None, trace), **options)
        drain_seconds = settings.body_seconds + settings.request_seconds + 1
        if not serve(make_app(engine, settings), listening, drain_seconds, on_start):
            raise KeyboardInterrupt
        if engine.trace:
            engine.trace.end()


class Lines(io.TextIOBase):
    """A file of lines that ends, with a warning, where it can't be written: no request fails for it."""

    def __init__(self, name: str) -> None:
        self._name = name
        try:
            self._file: TextIO | None = Path(name).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115
        except OSError as problem:
            raise RequestError(f"--trace {name}: can't be written: {problem}") from None

    def write(self, text: str) -> int:
        if self._file is not None:
            try:
                return self._file.write(text)
            except OSError as problem:
                LOG.warning("warning: --trace %s: can't be written, and ends here: %s", self._name, problem)
                self.close()
        return len(text)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def add_serve(commands: Commands) -> None:
    text = "serve the model over HTTP, with OpenAI's API"
    parser = add_command(commands, "serve", run_serve, text, EXAMPLE, tokenizer=True)
    add(parser, "--host NAME", "address to listen on (127.0.0.1)", default="127.0.0.1")
    add(parser, "--port N", "0 takes a free one (8000)", default=8000)
    add(parser, "--name NAME", "model name for clients (the checkpoint's)")
    add(parser, "--verbose", "log each HTTP request to standard error")
    limits = parser.add_argument_group("limits")
    for name, (value, text) in LIMITS.items():
        add(limits, f"{option(name)} {value}", text)
    add_engine_options(parser)
    add_arithmetic_options(parser)
