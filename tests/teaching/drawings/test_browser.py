"""The page in a real browser: pytest -m browser tests/teaching/drawings; the extra `browser`, chromium.

Nothing here has a time limit but the browser's own.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import drawn
import pytest
from page_checks import CONTRAST, Opened, each_view, go

import lfm2np
from lfm2np.oracle.report.markup import visible
from lfm2np.teaching.drawings import demo
from lfm2np.teaching.drawings.all_views import draw
from lfm2np.teaching.drawings.page.view import fullest
from lfm2np.teaching.drawings.runs.derive import LETTERS, moments, num_kept
from lfm2np.teaching.drawings.runs.expert_choices import routes
from lfm2np.teaching.drawings.runs.recorded_run import read_run

pytestmark = pytest.mark.browser

VIEWS = ("batching", "ragged", "pool", "schedule", "speculation", "worksheet")
SPARSE = Path(__file__).parents[3] / "fixtures" / "torture" / "moe_published"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(drawn.demo_page(), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Opened]:
    """A page as it is loaded."""
    fresh = Opened(browser, file)
    yield fresh
    assert fresh.complaints == []
    assert {url.partition("#")[0] for url in fresh.requests} == {file.as_uri()}
    fresh.context.close()


@pytest.fixture(scope="module")
def shared(browser: Any, file: Path) -> Iterator[Opened]:
    """One page for all that does not ask how it begins."""
    tab = Opened(browser, file)
    yield tab
    assert tab.complaints == []
    tab.context.close()


def test_every_view_renders(opened: Opened) -> None:
    page = opened.page
    assert [one.get_attribute("id") for one in page.query_selector_all(".view")] == list(VIEWS)
    for view in each_view(page):
        section = page.query_selector(f"#{view}")
        assert section.bounding_box()["height"] > 100
        assert section.query_selector("h2").inner_text()
    for step in range(len(drawn.demo_run().steps)):
        go(page, "main", step)
    page.eval_on_selector_all("details", "all => all.forEach(each => each.open = true)")


def test_numbers_are_those_of_the_trace(shared: Opened) -> None:
    page, run, compared = shared.page, drawn.demo_run(), 0
    states = moments(run)
    rows = page.eval_on_selector_all(
        "#schedule details:first-of-type table tbody tr",
        "rows => rows.map(row => [...row.children].map(one => one.textContent))",
    )
    for step, cells in zip(run.steps, rows, strict=True):
        shares = [
            f"{LETTERS[state[step.number].state]}{state[step.number].tokens or ''}"
            if state[step.number].state in LETTERS
            else ""
            for state in states.values()
        ]
        assert cells == [
            str(one) for one in (step.number, step.num_tokens, *shares, step.waiting, step.running, step.free_blocks)
        ]
        compared += len(cells)
    for step in run.steps:
        tables = page.query_selector_all(f'#pool .at[data-step="{step.number}"] tbody tr')
        in_tables = [table.evaluate("row => [...row.children].map(one => one.textContent)") for table in tables]
        for entry, cells in zip(step.entries, in_tables, strict=True):
            blocks = ", ".join(map(str, entry.block_table))
            written = f"{entry.start} to {entry.start + num_kept(step, entry) - 1}"
            assert cells == [visible(entry.request_id), blocks, written, str(entry.slot)]
            compared += len(cells)
    assert compared >= 200


def test_slider_buttons_keys_and_the_address_step(opened: Opened) -> None:
    page, last = opened.page, len(drawn.demo_run().steps) - 1
    page.evaluate("location.hash = 'schedule'")
    page.wait_for_selector("#player-main:not([hidden])")  # not wait_for_function: the page's policy forbids eval

    def shown() -> list[int]:
        parts = page.query_selector_all("#schedule .at:not([hidden])")
        return [int(part.get_attribute("data-step")) for part in parts]

    assert shown() == [fullest(drawn.demo_run())]
    page.keyboard.press("End")
    assert shown() == [last]
    page.keyboard.press("ArrowLeft")
    assert shown() == [last - 1]
    page.keyboard.press("Home")
    assert shown() == [0]
    page.keyboard.press("ArrowRight")
    assert shown() == [1]
    assert page.evaluate("location.hash") == "#schedule:1"
    page.click("#player-main .on")
    assert shown() == [2]
    page.click("#player-main .back")
    page.click("#player-main .first")
    assert shown() == [0]
    page.fill("#player-main input", "5")
    assert shown() == [5]
    assert page.inner_text("#player-main output") == f"step 5 of {last}"
    page.keyboard.press("End")
    page.click("#player-main .play")
    page.wait_for_selector('#schedule .at[data-step="2"]:not([hidden])')
    page.click("#player-main .play")
    marked = page.query_selector_all("#schedule .mark.now")
    assert {element.get_attribute("data-step") for element in marked} == {str(shown()[0])}
    page.evaluate("location.hash = 'pool:3'")
    page.wait_for_selector("#pool.current")
    page.click("#pool .at:not([hidden]) .scroll")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("location.hash") == "#pool:4"
    page.reload()
    assert shown() == [4]


def test_a_leak_is_shown_when_it_is_chosen(shared: Opened) -> None:
    page = shared.page
    page.click('.side a[href="#ragged"]')
    assert len([element for element in page.query_selector_all("#ragged .choice") if element.is_visible()]) == 1
    page.check('input[name=leak][value="1"]')
    assert "WRONG: it should be" in page.inner_text("#ragged")
    assert page.query_selector("#ragged .choice:not([hidden]) .leak").is_visible()


def test_every_control_has_a_name(shared: Opened) -> None:
    session = shared.context.new_cdp_session(shared.page)
    roles = ("button", "slider", "checkbox", "radio", "link", "img", "region", "DisclosureTriangle")
    count = 0
    for view in each_view(shared.page):
        root = session.send("DOM.getDocument")["root"]["nodeId"]
        nodes = [session.send("Accessibility.queryAXTree", {"nodeId": root, "role": role})["nodes"] for role in roles]
        controls = [node for of_role in nodes for node in of_role if not node.get("ignored")]
        assert len(controls) > 8, view
        for control in controls:
            assert control.get("name", {}).get("value", "").strip(), json.dumps(control)[:300]
        count += len(controls)
    assert count > 90


def test_text_has_contrast(shared: Opened) -> None:
    page = shared.page
    for view in each_view(page):
        page.eval_on_selector_all(
            f"#{view} .at:not([hidden]) details, #{view} > details", "all => all.forEach(each => each.open = true)"
        )
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(CONTRAST) == [], (view, scheme)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [channel / 12.92 if channel <= 0.03928 else ((channel + 0.055) / 1.055) ** 2.4 for channel in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_letters_on_owners_colours_have_contrast() -> None:
    css = (Path(lfm2np.__file__).parent / "teaching" / "drawings" / "assets" / "page.css").read_text()
    ink = luminance(re.search(r"--ink: (#\w+)", css)[1])  # type: ignore[index]
    grounds = re.findall(r"--ground\d: (#\w+)", css)
    assert len(grounds) == 8
    for ground in grounds:
        dimmed = luminance(ground) * 0.8  # under a stripe
        assert (dimmed + 0.05) / (ink + 0.05) >= 4.5, ground


def test_nothing_is_wider_than_the_page(shared: Opened) -> None:
    require_narrow(shared.page, 360, 768, 1280, 1920)


def require_narrow(page: Any, *widths: int) -> None:
    for width in widths:  # to lay out all anew for each view takes three times as long
        page.set_viewport_size({"width": width, "height": 900})
        for view in each_view(page):
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (view, width)


def test_paper_has_every_view_at_its_end_and_no_controls(opened: Opened) -> None:
    go(opened.page, "batching", 3)
    opened.page.emulate_media(media="print")
    assert len([view for view in opened.page.query_selector_all(".view") if view.is_visible()]) == len(VIEWS)
    controls = ".player, nav, button"
    assert opened.page.eval_on_selector_all(controls, "all => all.some(each => each.checkVisibility())") is False
    assert opened.page.eval_on_selector(".played", "one => getComputedStyle(one).clipPath") == "none"
    require_at_its_end(opened.page)


def test_without_the_script_the_last_step_stands(browser: Any, file: Path) -> None:
    opened, last = Opened(browser, file, java_script_enabled=False), len(drawn.demo_run().steps) - 1
    page = opened.page
    assert not any(element.is_visible() for element in page.query_selector_all(".player"))
    assert page.is_visible(f'#schedule .at[data-step="{last}"]')
    assert not page.is_visible('#schedule .at[data-step="0"]')
    assert page.is_visible("#ragged .choice >> nth=2")
    assert not any(element.is_visible() for element in page.query_selector_all(".needs-script"))
    assert page.get_attribute("#reach rect", "width") == page.get_attribute(".plays", "data-full")
    require_at_its_end(page)
    opened.context.close()


def require_at_its_end(page: Any) -> None:
    """The moving picture, as on paper."""
    last = int(page.get_attribute(".plays", "data-steps") or 0) - 1
    shown = [element for element in page.query_selector_all("#batching .at") if element.is_visible()]
    assert {element.get_attribute("data-step") for element in shown} == {str(last)}
    assert not page.is_visible("#batching .playhead")


def test_experts_are_shown_step_by_step(browser: Any, tmp_path: Path) -> None:
    """What their tables say: test_experts.py."""
    run, file = read_run(demo.main_lines(lfm2np.load(SPARSE))), tmp_path / "experts.html"
    file.write_text(draw(run, lfm2np.load(), "the demo", "lfm2np draw --demo --model ..."), encoding="utf-8")
    opened = Opened(browser, file)
    page = opened.page
    ids = [view.get_attribute("id") for view in page.query_selector_all(".view")]
    assert ids == [*VIEWS[:-1], "experts", VIEWS[-1]]
    page.click('.side a[href="#experts"]')
    for step in run.steps[::4]:
        go(page, "main", step.number)
        (part,) = page.query_selector_all("#experts .at:not([hidden])")
        assert part.get_attribute("data-step") == str(step.number)
        squares = part.query_selector_all("svg .cell")
        assert len(squares) == step.num_tokens + routes(step)[0].num_choices
        assert all(square.is_visible() for square in squares)
    assert page.evaluate(CONTRAST) == []
    require_narrow(page, 360, 1920)
    assert opened.complaints == []
    opened.context.close()


# --- the moving picture

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
    for speed, seconds in (("0.5", 1.7), ("4", 0.0)):  # of a step, at least: a busy machine takes longer
        page.select_option("#player-batching .speed", speed)
        go(page, "batching", 0)
        began = time.monotonic()
        page.click("#player-batching .play")
        page.evaluate(PLACES, 1)
        assert time.monotonic() - began >= seconds
        page.click("#player-batching .play")
    assert set(page.eval_on_selector_all(".speed", "all => all.map(select => select.value)")) == {"4"}, "of all views"


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_time_moves_smoothly_only_for_who_wants_it(browser: Any, file: Path, motion: str) -> None:
    opened = Opened(browser, file, reduced_motion=motion)
    page = opened.page
    go(page, "batching", 0)
    page.select_option("#player-batching .speed", "2")
    # In one script, so that a busy machine does not play a step before the first look.
    played = PLACES.replace("{", """{ document.querySelector("#player-batching .play").click();""", 1)
    places = {tuple(place) for place in page.evaluate(played, 2)}
    steps = {step for step, _ in places}
    assert 0 in steps and steps <= {0, 1}
    assert len(places) == len(steps) if motion == "reduce" else len(places) > len(steps)
    opened.context.close()
