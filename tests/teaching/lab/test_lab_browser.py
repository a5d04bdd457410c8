"""The laboratory as learners use it: pytest -m browser tests/teaching/lab; the extra `browser`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from page_checks import CONTRAST, each_view
from tabs import Fill, Tab

from lfm2np.teaching.lab.lessons import LESSONS
from lfm2np.teaching.lab.server import serving
from lfm2np.teaching.lab.settings import TEACHING_FAULTS, link_of

pytestmark = pytest.mark.browser

HOSTILE = "</script><script>document.title='x'</script><img src=x onerror=\"document.title='x'\">"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as url:
        yield url


class Laboratory(Tab):
    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        super().__init__(browser.new_context(viewport={"width": 1280, "height": 900}, **options), address)

    def run(self, fields: Fill) -> None:
        self.fill(fields)
        with self.page.expect_response(lambda response: response.request.resource_type == "fetch") as answer:
            self.page.click(".run")
        if answer.value.ok:
            self.page.wait_for_event("load")
        self.page.wait_for_selector(".run:not([aria-disabled])", state="attached")


@pytest.fixture(scope="module")
def tab(browser: Any, address: str) -> Iterator[Laboratory]:
    shared = Laboratory(browser, address)
    yield shared
    shared.context.close()


@pytest.fixture
def lab(tab: Laboratory) -> Iterator[Laboratory]:
    """The shared tab, with the default run."""
    tab.page.goto(tab.address)
    yield tab
    assert tab.elsewhere == []
    assert [each for each in tab.complaints if "status of 400" not in each] == []  # as the browser notes each of them


# --- a run


def test_every_control_changes_the_run(lab: Laboratory) -> None:
    fields = {
        "policy": "static",
        "block_size": "8",
        "blocks": "40",
        "budget": "9",
        "slots": "8",
        "chunked": "off",
        "prefix_cache": "off",
        "drafts": "1",
        "fault": "positions-are-rows-of-the-batch",
    }
    asked = {"prompt-0": "copy: red ->", "arrival-1": "2", "tokens-2": "3", "prompt-6": "copy: red ->"}  # a new row
    lab.run({**fields, **asked})
    settings = lab.settings
    requests = settings.requests
    assert (requests[0].prompt, requests[1].arrival, requests[2].tokens, len(requests)) == ("copy: red ->", 2, 3, 7)
    assert {name: str(getattr(settings, name)) for name in fields} == fields
    lab.open_form()
    for name, text in {**fields, **asked}.items():
        assert lab.page.input_value(f"#{name}") == text
    assert TEACHING_FAULTS[settings.fault] in lab.page.inner_text("#result")
    lab.run({"model": "paper", "prompt-0": "the cat", **{f"prompt-{index}": "" for index in range(1, 7)}})
    assert lab.settings.model == "paper"
    assert len(lab.settings.requests) == 1


def test_a_run_is_a_link(lab: Laboratory, browser: Any, address: str) -> None:
    lab.page.click('.side a[href="#pool"]')
    lab.run({"blocks": "11", "budget": "7"})
    assert urlsplit(lab.page.url).fragment.startswith("pool"), "the view in sight stays"
    first = lab.page.inner_html("#pool")
    other = Laboratory(browser, address)
    other.page.goto(lab.page.url)
    assert other.page.inner_html("#pool") == first
    other.context.close()
    lab.page.go_back()
    lab.page.wait_for_selector("#views")
    assert lab.page.input_value("#blocks") == "8"


# --- what can't be run


@pytest.mark.parametrize(
    ("fields", "where", "told"),
    [
        ({"prompt-0": "", **{f"prompt-{index}": "" for index in range(1, 6)}}, "prompt-0", "There is no prompt"),
        ({"blocks": "1"}, "blocks", "need"),
        ({"arrival-1": "soon", "slots": "0"}, "arrival-1", "expected a whole number, 0 to 60."),
    ],
)
def test_what_cannot_be_run_is_said_where_it_was_entered(lab: Laboratory, fields: Fill, where: str, told: str) -> None:
    before = lab.page.url
    lab.run(fields)
    problem = lab.page.locator(f"#problem-{where}")
    assert told in problem.inner_text()
    assert lab.page.get_attribute(f"#{where}", "aria-describedby") == f"problem-{where}"
    assert lab.page.evaluate("document.activeElement.id") == where
    for name, text in fields.items():
        assert lab.page.input_value(f"#{name}") == text
    assert lab.page.url == before
    assert lab.page.is_visible("#batching"), "the run before stays"
    if "blocks" in fields:  # what is mended runs
        lab.run({"blocks": "40"})
        assert lab.settings.blocks == 40
        assert not lab.page.query_selector_all(".problem")


def test_rows_below_an_emptied_one_move_up_so_that_fields_and_letters_are_right(lab: Laboratory) -> None:
    lab.run({"prompt-1": "", "arrival-2": "x"})
    assert lab.page.input_value("#arrival-1") == "x"
    assert lab.page.input_value("#prompt-1") == "sort: 7 2 9 4 1 ->"
    assert lab.page.get_attribute("#arrival-1", "aria-invalid") == "true"
    assert not lab.page.is_visible("#prompt-5")
    lab.run({"arrival-1": "1", "blocks": "3"})
    letter = lab.page.inner_text("#problem-blocks").split("request ")[1][0]
    assert lab.page.input_value(f"#prompt-{'abcdefgh'.index(letter)}").startswith("count:")


def test_a_hostile_prompt_runs_nothing(lab: Laboratory) -> None:
    lab.run({"prompt-0": HOSTILE, "blocks": "120"})
    assert lab.page.title() == "A laboratory of continuous batching"
    lab.open_form()
    assert lab.page.input_value("#prompt-0") == HOSTILE
    for view in each_view(lab.page):
        assert lab.page.title() == "A laboratory of continuous batching", view


def test_a_laboratory_that_has_ended_is_said(browser: Any) -> None:
    with serving() as url:
        lab = Laboratory(browser, url)
    lab.page.click(".run")
    lab.page.wait_for_selector("#problem-form")
    assert "does lfm2np lab still run?" in lab.page.inner_text("#problem-form")
    lab.context.close()


# --- lessons


def test_a_lesson_is_failed_and_solved(lab: Laboratory) -> None:
    """And the keyboard goes on where the answer is. What is said of other answers: test_lab_lessons.py."""
    lab.open_lesson(5)
    assert lab.page.inner_text(".lesson-text h2").startswith("Lesson 5: ")
    assert lab.page.is_visible(f"#{LESSONS['5'].view}.current")
    assert not lab.page.query_selector_all("#verdict")
    for blocks, sentence in (("13", "Not yet. With 13 blocks request d is preempted"), ("14", "Right. ")):
        lab.run({"blocks": blocks})
        assert lab.page.inner_text("#verdict").startswith(sentence)
        assert lab.page.evaluate("document.activeElement.id") == "verdict"
    lab.page.goto(lab.address)
    lab.run({"blocks": "17"})
    assert lab.page.evaluate("document.activeElement.id") == "result"


def test_the_form_works_without_a_script(browser: Any, address: str) -> None:
    lab = Laboratory(browser, address, java_script_enabled=False)
    lab.page.goto(f"{address}?lesson=5")
    for blocks, sentence in (("13", "Not yet. With 13 blocks"), ("14", "Right. ")):
        lab.page.fill("#blocks", blocks)
        with lab.page.expect_navigation():
            lab.page.keyboard.press("Enter")
        assert lab.page.inner_text("#verdict").startswith(sentence) and lab.settings.blocks == int(blocks)
        lab.page.locator("details.settings > summary").click()
    assert lab.page.is_visible("#pool") and lab.page.is_visible("#schedule")
    assert not lab.complaints
    lab.context.close()


# --- how it looks


def test_text_has_contrast_in_the_form_too(lab: Laboratory) -> None:
    lab.page.goto(f"{lab.address}?{link_of(LESSONS['3'].start)}")
    lab.run({"fault": ""})
    lab.open_form()
    for fields in ({}, {"slots": "0"}):
        if fields:
            lab.run(fields)
        for scheme in ("light", "dark"):
            lab.page.emulate_media(color_scheme=scheme)
            assert lab.page.evaluate(CONTRAST) == [], (fields, scheme)


def test_nothing_is_wider_than_the_page(browser: Any, address: str) -> None:
    lab = Laboratory(browser, address)
    for query in (f"?{link_of(LESSONS['1'].start)}", f"?{link_of(LESSONS['2'].start)}"):
        lab.page.goto(address + query)
        lab.open_form()
        for width in (1920, 1280, 768, 360):  # the views at each width: tests/teaching/drawings/test_browser.py
            lab.page.set_viewport_size({"width": width, "height": 900})
            assert lab.page.evaluate("document.documentElement.scrollWidth") <= width, (query[:20], width)
        for view in each_view(lab.page):
            assert lab.page.evaluate("document.documentElement.scrollWidth") <= 360, (query[:20], view)
    lab.context.close()


def test_every_control_has_a_name_and_is_reached_by_keys(lab: Laboratory) -> None:
    lab.page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    session = lab.context.new_cdp_session(lab.page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "slider", "checkbox", "radio", "link", "textbox", "combobox", "DisclosureTriangle")
    controls = [node for node in nodes if node.get("role", {}).get("value") in roles and not node.get("ignored")]
    assert len(controls) > 50
    for control in controls:
        assert control.get("name", {}).get("value", "").strip(), json.dumps(control)[:300]
    lab.open_form()
    lab.page.focus("#blocks")
    lab.page.keyboard.press("End")
    lab.page.keyboard.press("Backspace")
    lab.page.keyboard.type("30")
    with lab.page.expect_navigation():
        lab.page.keyboard.press("Enter")
    assert lab.settings.blocks == 30
