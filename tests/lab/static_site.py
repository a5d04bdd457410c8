"""The laboratory without a server, for tests in a browser: written once, served by the plainest of servers."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path


class Quiet(http.server.SimpleHTTPRequestHandler):
    """What `python -m http.server` does, without its log; a file named in `cut` ends in its middle."""

    cut: str = ""

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def copyfile(self, source: object, outputfile: object) -> None:
        content = source.read()  # type: ignore[attr-defined]
        is_cut = self.cut and self.path.endswith(self.cut)
        outputfile.write(content[: len(content) // 2] if is_cut else content)  # type: ignore[attr-defined]


@contextlib.contextmanager
def served(folder: Path, cut: str = "") -> Iterator[str]:
    """The address of a folder's server, which ends with the block."""
    handler = type("Handler", (Quiet,), {"cut": cut})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
