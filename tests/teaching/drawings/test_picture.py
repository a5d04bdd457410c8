"""The picture of a block in a browser: what lights up, and that each sum written out gives its number."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_checks import go

from lfm2np.oracle.report.markup import Markup
from lfm2np.teaching.drawings import demo
from lfm2np.teaching.drawings.page.run_page import page as page_of
from lfm2np.teaching.drawings.runs.recorded_run import Run
from lfm2np.teaching.drawings.views.single import single

pytestmark = pytest.mark.browser

# Every number of the shown step and part: its matrix, the text beside it, and how many cells light up.
EXPLAINED = """() => [...document.querySelectorAll(".at:not([hidden]) .part:not([hidden]) [data-how] td")]
  .filter((cell) => cell.textContent)
  .map((cell) => {
    cell.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
    const count = (kind) => cell.closest(".picture").querySelectorAll(`.${kind}`).length;
    const how = cell.closest("table").dataset.how, told = document.querySelector(".readout").textContent;
    const whole = cell.title || cell.textContent, kept = cell.classList.contains("kept");
    return [how, told, count("made"), count("lit"), count("with"), whole, kept];
  })"""


def value_of(text: str) -> float:
    """A sum as the page writes it, worked out by Python."""
    written = text.replace("\u2212", "-").replace("\u00d7", "*").replace("\u00f7", "/").replace("\u00b2", "**2")
    written = re.sub(r"\u221a\(", "sqrt(", written)
    written = re.sub(r"\u221a(\d+)", r"sqrt(\1)", written)
    assert re.fullmatch(r"(?:[-+*/(). 0-9e]|sqrt|exp)*", written), written
    return float(eval(written, {"__builtins__": {}}, {"sqrt": math.sqrt, "exp": math.exp}))


@pytest.fixture(scope="module")
def runs() -> tuple[Run, Run, Any]:
    model, words, weights = demo.hand_model()
    return demo.hand_alone(model, words), demo.hand_together(model, words), weights


@pytest.fixture(params=["alone", "together"])
def picture(request: pytest.FixtureRequest, runs: tuple[Run, Run, Any], browser: Any, tmp_path: Path) -> Iterator[Any]:
    run = runs[request.param == "together"]
    file = tmp_path / "page.html"
    file.write_text(page_of("a picture", Markup(""), [single(run, runs[2])]), encoding="utf-8")
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(file.as_uri())
    yield page
    page.context.close()


def test_every_sum_gives_its_number(picture: Any) -> None:
    """But for what is not computed there: embeddings, what a block was given, what is kept, angles."""
    given = ("embed", "before", "picked", "cached", "angle")
    counts: Counter[str] = Counter()
    for step in range(int(picture.get_attribute("#player-single input", "max")) + 1):
        go(picture, "single", step)
        for button in picture.query_selector_all(".parts button"):
            button.click()
            for how, explanation, num_made, lit, other, whole, kept in picture.evaluate(EXPLAINED):
                assert num_made == 1
                left, _, right = explanation.partition(" = ")
                assert left.endswith(f": {whole}")
                counts["kept" if kept else how] += 1
                if kept or how in given:
                    assert right.isprintable() and "undefined" not in right
                else:
                    assert lit and other
                    assert value_of(right) == pytest.approx(float(whole), abs=2e-5, rel=2e-6), explanation
    assert set(counts) >= {
        "linear",
        "multiply",
        "add",
        "norm",
        "convolve",
        "swiglu",
        "rotate",
        "score",
        "softmax",
        "weigh",
    }
    assert min(counts.values()) >= 20, counts
    assert sum(counts.values()) > 3000


def test_what_lights_up_is_a_row_and_a_column(picture: Any) -> None:
    picture.click('.parts button[value="0"]')
    shown = ".at:not([hidden]) .part:not([hidden])"
    picture.hover(f'{shown} [data-m="p"] tbody tr:nth-child(2) td:nth-child(3)')
    lit = picture.eval_on_selector_all(".lit", "all => all.map(one => one.closest('table').dataset.m)")
    other = picture.eval_on_selector_all(
        ".with", "all => all.map(one => [one.closest('table').dataset.m, one.cellIndex])"
    )
    assert lit == ["n"] * 4
    assert other == [["pw", 2]] * 4


def test_a_matrix_is_one_stop_of_tab_and_arrows_go_on(picture: Any) -> None:
    picture.click('.parts button[value="0"]')
    shown = ".at:not([hidden]) .part:not([hidden])"
    stops = picture.eval_on_selector_all(
        f"{shown} [data-how]", "all => all.map(one => one.querySelectorAll('[tabindex=\"0\"]').length)"
    )
    assert set(stops) == {1}
    picture.focus(f'{shown} [data-m="p"] td[tabindex="0"]')
    before = picture.inner_text(".player:not([hidden]) output")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowLeft"):
        picture.keyboard.press(key)
    assert picture.inner_text(".readout").startswith("in_proj, row 1, column 1: ")
    assert picture.inner_text(".player:not([hidden]) output") == before
    picture.click("#player-single .on")
    assert not picture.query_selector_all(".lit")
    assert picture.inner_text(".readout").startswith("Point at a number")


def test_a_touch_lights_up_too(browser: Any, runs: tuple[Run, Run, Any], tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page_of("a picture", Markup(""), [single(runs[0], runs[2])]), encoding="utf-8")
    context = browser.new_context(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(file.as_uri())
    page.tap('.at:not([hidden]) .part:not([hidden]) [data-m="n"] tbody td >> nth=0')
    assert page.inner_text(".readout").startswith("normed, row 0, column 0: ")
    page.tap('.at:not([hidden]) .part:not([hidden]) [data-m="d"] tbody td >> nth=0')  # far down
    assert page.inner_text(".readout").startswith("w2, row 0, column 0: ")
    sides = page.eval_on_selector(".side", "one => one.getBoundingClientRect().bottom")
    readout = page.eval_on_selector(".readout", "one => one.getBoundingClientRect().top")
    assert sides - 2 <= readout < 300, "the sum stands where it can be read"
    context.close()
