"""The moving picture: pytest -m browser tests/teaching/drawings; the extra `browser`, chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import drawn
import pytest
from page_checks import Opened, go

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


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(drawn.demo_page(), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Any, page_file: Path) -> Iterator[Opened]:
    """A page as it is loaded."""
    fresh = Opened(browser, page_file)
    yield fresh
    assert fresh.complaints == []
    fresh.context.close()


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
