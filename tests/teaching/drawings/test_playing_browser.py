"""The moving picture and slides: pytest -m browser tests/teaching/drawings; the extra `browser`, chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import drawn
import pytest
from page_checks import CONTRAST, Opened, go

pytestmark = pytest.mark.browser

# The places of the playhead from frame to frame, until the step of the picture is `last` or 300 frames have gone.
PLACES = """async (last) => {
  const head = document.querySelector(".playhead"), slider = document.querySelector("#player-batching input");
  const places = [];
  for (let frame = 0; frame < 300 && slider.value < last; frame++) {
    places.push([+slider.value, head.getAttribute("transform")]);
    await new Promise(requestAnimationFrame);
  }
  return places;
}"""
SHOWN = """() => {  // what is in sight of the picture, up to which place, and what was spoken
  const part = document.querySelector("[data-player=batching] .at:not([hidden])");
  return [+part.dataset.step, +document.querySelector("#reach rect").getAttribute("width"),
          document.querySelector("#player-batching .spoken").textContent];
}"""

FITS = "all => all.every(one => one.scrollWidth <= one.clientWidth && one.scrollHeight <= one.clientHeight)"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(drawn.demo_page(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def slides_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slides") / "slides.html"
    path.write_text(drawn.demo_slides(), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Any, page_file: Path) -> Iterator[Opened]:
    """A page as it is loaded."""
    fresh = Opened(browser, page_file)
    yield fresh
    assert fresh.complaints == []
    fresh.context.close()


@pytest.fixture
def deck(browser: Any, slides_file: Path) -> Iterator[Opened]:
    fresh = Opened(browser, slides_file, 1280)
    yield fresh
    assert fresh.complaints == []
    assert fresh.requests == [slides_file.as_uri()]
    fresh.context.close()


# --- the picture that plays


def test_nothing_plays_by_itself_and_play_pauses(opened: Opened) -> None:
    page = opened.page
    begun = page.evaluate(SHOWN)
    assert len({tuple(place) for place in page.evaluate(PLACES.replace("300", "20"), 99)}) == 1
    assert page.evaluate(SHOWN) == begun
    page.select_option("#player-batching .speed", "4")
    page.click("#player-batching .play")
    assert page.inner_text("#player-batching .play") == "Pause"
    page.evaluate(PLACES, 2)
    assert page.evaluate(SHOWN)[2] == "", "steps that play are not spoken"
    page.keyboard.press("p")
    assert page.inner_text("#player-batching .play") == "Play"
    step, reach, spoken = page.evaluate(SHOWN)
    assert spoken.startswith(f"Step {step}. By requests, ")
    page.evaluate(PLACES.replace("300", "20"), 99)
    assert page.evaluate(SHOWN) == [step, reach, spoken]


def test_cells_appear_as_time_reaches_them_at_the_speed_that_is_chosen(opened: Opened) -> None:
    """At each step as far as its end; at the last all of the picture."""
    page = opened.page
    picture = page.eval_on_selector(".plays", "one => ({...one.dataset})")
    last = int(picture["steps"]) - 1
    for step in range(last + 1):
        go(page, "batching", step)
        shown, reach, spoken = page.evaluate(SHOWN)
        end = float(picture["left"]) + float(picture["wide"]) * (step + 1)
        assert (shown, reach) == (step, float(picture["full"]) if step == last else end)
        assert spoken == page.inner_text(f'#batching .at[data-step="{step}"] .says')
    page.click("#player-batching .back")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(SHOWN)[0] == last - 2
    times = {}
    for speed in ("0.5", "4"):
        page.select_option("#player-batching .speed", speed)
        go(page, "batching", 0)
        page.click("#player-batching .play")
        times[speed] = len(page.evaluate(PLACES, 1))
        page.click("#player-batching .play")
    assert times["0.5"] > 2 * times["4"], "frames of a step; eight times as many, but for a machine that is busy"
    assert set(page.eval_on_selector_all(".speed", "all => all.map(select => select.value)")) == {"4"}, "of all views"


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_time_moves_smoothly_only_for_who_wants_it(browser: Any, page_file: Path, motion: str) -> None:
    opened = Opened(browser, page_file, reduced_motion=motion)
    page = opened.page
    go(page, "batching", 0)
    page.select_option("#player-batching .speed", "2")
    page.click("#player-batching .play")
    places = {tuple(place) for place in page.evaluate(PLACES, 2)}
    assert {step for step, _ in places} == {0, 1}
    assert len(places) == 2 if motion == "reduce" else len(places) > 6
    opened.context.close()


@pytest.mark.parametrize("how", ["print", "without the script"])
def test_on_paper_and_without_the_script_all_is_at_its_end(browser: Any, page_file: Path, how: str) -> None:
    opened = Opened(browser, page_file, java_script_enabled=how == "print")
    page = opened.page
    if how == "print":
        go(page, "batching", 3)
        page.emulate_media(media="print")
        assert page.eval_on_selector(".played", "one => getComputedStyle(one).clipPath") == "none"
    else:
        assert page.get_attribute("#reach rect", "width") == page.get_attribute(".plays", "data-full")
    last = int(page.get_attribute(".plays", "data-steps") or 0) - 1
    shown = [element for element in page.query_selector_all("#batching .at") if element.is_visible()]
    assert {element.get_attribute("data-step") for element in shown} == {str(last)}
    assert not page.is_visible("#batching .playhead")
    opened.context.close()


# --- slides


def number_of(page: Any) -> int:
    (shown,) = [view for view in page.query_selector_all(".view") if view.is_visible()]
    assert page.evaluate("location.hash").partition(":")[0] in ("", f"#{shown.get_attribute('id')}")
    return int(shown.get_attribute("id"))


def test_keys_and_edges_turn_slides(deck: Opened) -> None:
    page = deck.page
    count = len(page.query_selector_all(".view"))
    assert number_of(page) == 1
    for key, number in (
        *(("ArrowRight", 2), (" ", 3), ("PageDown", 4), ("ArrowLeft", 3), ("PageUp", 2), ("Shift+Space", 1)),
        *(("ArrowLeft", 1), ("End", count), ("ArrowRight", count), ("Home", 1)),
    ):
        page.keyboard.press(key)
        assert number_of(page) == number, key
    page.keyboard.press("PageDown")
    assert page.evaluate("document.activeElement.id") == "2-title", "which a screen reader reads"
    page.keyboard.press("PageUp")
    page.click(".edge.on")
    page.click(".edge.on")
    page.click(".edge.back")
    assert number_of(page) == 2
    assert page.inner_text(".view.current .number") == f"2/{count}"
    page.evaluate("location.hash = '3:5'")
    page.wait_for_selector('.view.current[id="3"]')
    assert page.evaluate(SHOWN)[0] == 5
    page.keyboard.press("Shift+ArrowRight")
    assert page.evaluate(SHOWN)[0] == 6
    page.keyboard.press("p")
    page.evaluate(PLACES, 7)
    page.keyboard.press("p")
    assert number_of(page) == 3
    assert page.evaluate(SHOWN)[0] >= 7


def test_notes_and_full_screen_have_keys(deck: Opened) -> None:
    page = deck.page
    page.keyboard.press("End")
    notes = page.locator(".view.current .notes")
    assert not notes.is_visible()
    page.keyboard.press("n")
    assert notes.is_visible()
    page.keyboard.press("n")
    assert not notes.is_visible()
    page.keyboard.press("f")
    page.wait_for_selector(".full[aria-pressed=true]")


def test_every_slide_fits_its_screen(deck: Opened) -> None:
    page = deck.page
    for width, height, scheme in ((360, 740, "light"), (1280, 720, "dark"), (1920, 1080, "light")):
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        page.keyboard.press("Home")
        for number in range(1, 1 + len(page.query_selector_all(".view"))):
            assert number_of(page) == number
            assert page.eval_on_selector_all("html, .current .drawn", FITS), (number, width)
            assert page.evaluate(CONTRAST) == [], (number, width)
            page.keyboard.press("ArrowRight")


def test_each_slide_is_a_sheet_with_its_notes(deck: Opened) -> None:
    page = deck.page
    count = len(page.query_selector_all(".view"))
    go(page, "batching", 2)
    sheets = page.pdf(prefer_css_page_size=True)
    assert sheets.count(b"/Type /Page\n") == count
    widths = {tuple(map(float, box)) for box in re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", sheets)}
    assert all(width > height for width, height in widths)
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert len([view for view in page.query_selector_all(".view") if view.is_visible()]) == count
    assert page.eval_on_selector_all(".drawn", FITS)
    assert page.is_visible(f'[id="{count}"] .notes')
    assert not page.is_visible(".desk")
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert number_of(page) == 1


def test_without_the_script_slides_stand_one_below_the_other(browser: Any, slides_file: Path) -> None:
    deck = Opened(browser, slides_file, java_script_enabled=False)
    tops = deck.page.eval_on_selector_all(".view", "all => all.map(view => view.getBoundingClientRect().y)")
    assert len(tops) > 9
    assert tops == sorted(set(tops))
    assert deck.page.locator("button:visible, .player:visible").count() == 0
    deck.context.close()
