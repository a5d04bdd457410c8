"""`lfm2np lab`: a page to change a run on, on this machine only."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import signal
import sys
import threading
import webbrowser
from pathlib import Path

from lfm2np.commands.cli.shared.parser import Commands, add, add_command
from lfm2np.commands.cli.shared.terminal import progress_bars
from lfm2np.errors import RequestError

PORT = 8321
EXAMPLE = """lfm2np lab
  lfm2np lab --port 0 --no-browser
  lfm2np lab --static site && python -m http.server --directory site"""


def run_lab(arguments: argparse.Namespace) -> None:
    if arguments.static is not None:
        return run_static(arguments)
    if arguments.pyodide is not None:
        raise RequestError("--pyodide goes with --static DIR")
    return run_server(arguments)


def run_static(arguments: argparse.Namespace) -> None:
    from lfm2np.teaching.lab.static.build import write_static

    for option, value in (("--static", arguments.static), ("--pyodide", arguments.pyodide)):
        if value == "":
            raise RequestError(f"{option}: an empty text, expected a path")
    runtime = None if arguments.pyodide is None else Path(arguments.pyodide)
    with progress_bars() as progress:
        sizes = write_static(Path(arguments.static), runtime, progress)
    if arguments.json:
        print(json.dumps({"directory": arguments.static, "bytes": sizes}))
    else:
        print(f"{arguments.static}: {len(sizes)} files, {sum(sizes.values()) / 1e6:.1f} MB")
        print(f"To look at it: python -m http.server --directory {shlex.quote(arguments.static)}")


def run_server(arguments: argparse.Namespace) -> None:
    from lfm2np.teaching.lab.server import listen, url_of

    with listen(arguments.port) as server:
        url = url_of(server)
        print(json.dumps({"url": url}) if arguments.json else url, flush=True)
        if not arguments.no_browser and sys.stdout.isatty():
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        for each in (signal.SIGTERM, signal.SIGINT):  # a shell's background job ignores interrupts
            signal.signal(each, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):  # how one ends it
            server.serve_forever()


def add_lab(commands: Commands) -> None:
    text = "learn in the browser: change a run on a page, and see what the engine does"
    parser = add_command(commands, "lab", run_lab, text, EXAMPLE, model=False)
    add(parser, "--port N", f"port of 127.0.0.1; 0 takes a free one ({PORT})", default=PORT)
    add(parser, "--no-browser", "only print the address")
    static = "write a folder that computes in the visitor's browser and needs no server but a static one"
    add(parser, "--static DIR", static)
    add(parser, "--pyodide PATH", "folder or archive of Pyodide's release, for --static (else downloaded, once)")
