"""The demo's run and its page, made once for all tests of drawings."""

from __future__ import annotations

from functools import cache

import lfm2np
from lfm2np.drawings import demo
from lfm2np.drawings.draw import draw
from lfm2np.drawings.runs.run import Run, read_run
from lfm2np.loading import Model


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
