"""The laboratory in a browser, with a server of ours or the plainest of all: what its tests share."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lfm2np.teaching.lab.settings import Settings, read_link, settings_of

Fill = Mapping[str, str]  # field -> what is typed or chosen


class Tab:
    """A tab, with what it complained of and where its requests went."""

    def __init__(self, context: Any, address: str, query: str = "", patience: int = 20_000) -> None:
        self.address, self.context = address, context
        self.page = context.new_page()
        self.page.set_default_timeout(patience)
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        context.on("request", lambda request: self.noted(request.url))
        self.page.goto(address + query)

    def noted(self, url: str) -> None:
        if not url.startswith((self.address, "data:")):
            self.elsewhere.append(url)

    @property
    def settings(self) -> Settings:
        return settings_of(read_link(urlsplit(self.page.url).query))

    def open_form(self) -> None:
        opening = "all => all.forEach(details => details.open = true)"
        self.page.eval_on_selector_all(".settings, .more-settings", opening)

    def fill(self, fields: Fill) -> None:
        """Types or chooses, each in a form that is open."""
        self.open_form()
        for name, text in fields.items():
            field = self.page.locator(f"#{name}")
            if field.evaluate("field => field.tagName") == "SELECT":
                field.select_option(text)
            else:
                while not field.is_visible():
                    self.page.click(".more")
                field.fill(text)

    def run(self, fields: Fill) -> None:
        """Fills fields, and runs; the answer is there when this returns."""
        raise NotImplementedError

    def open_lesson(self, number: int) -> None:
        with self.page.expect_navigation():
            self.page.click(f".lessons li:nth-child({number + 1}) a")

    def close(self) -> None:
        assert self.complaints == []
        assert self.elsewhere == []
        self.context.close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """What `python -m http.server` does, without its log; a file named in `cut` ends in its middle."""

    cut: str = ""

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def copyfile(self, source: object, outputfile: object) -> None:
        content = source.read()  # type: ignore[attr-defined]
        is_cut = self.cut and self.path.endswith(self.cut)
        with contextlib.suppress(OSError):  # a browser that has gone
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
