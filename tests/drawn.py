"""The demo's run and its page, made once for all tests of drawings."""

from __future__ import annotations

from functools import cache
from html.parser import HTMLParser

import lfm2np
from lfm2np.engine.loading import Model
from lfm2np.teaching.drawings import demo
from lfm2np.teaching.drawings.all_views import draw
from lfm2np.teaching.drawings.runs.recorded_run import Run, read_run


@cache
def trained() -> Model:
    return lfm2np.load()


@cache
def demo_lines() -> list[str]:
    return demo.main_lines(trained())


@cache
def demo_run() -> Run:
    return read_run(demo_lines())


def draw_demo() -> str:
    return draw(demo_run(), trained(), "the demo", "lfm2np draw --demo -o page.html")


@cache
def demo_page() -> str:
    return draw_demo()


@cache
def hand_run() -> Run:
    return demo.paper().run


class Checked(HTMLParser):
    """Every element that was opened is closed, ids are unique, nothing is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        assert not {"src", "srcset", "data", "action"} & attributes.keys()
        assert (attributes.get("href") or "#").startswith("#")
        assert not any(name.startswith("on") for name in attributes)
        self.scripts += tag == "script"
        if attributes.get("id"):
            self.ids.append(attributes["id"] or "")
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
