"""The form is what a browser sends back without any script: the run that it shows, or what was typed."""

from __future__ import annotations

import re
from urllib.parse import urlencode

import pytest
from forms import Forms

from lfm2np.teaching.lab.lessons import LESSONS
from lfm2np.teaching.lab.page import compute, lab_page
from lfm2np.teaching.lab.settings import (
    DEFAULT_REQUESTS,
    NAMES,
    TEACHING_FAULTS,
    Asked,
    Problems,
    Settings,
    link_of,
    read_link,
    settings_of,
)

pytestmark = pytest.mark.slow


def read(pairs: list[tuple[str, str]]) -> Settings:
    return settings_of(read_link(urlencode(pairs)))


def form_of(query: str) -> list[tuple[str, str]]:
    """The fields that a browser would send of the settings."""
    return Forms(lab_page(read_link(query), None, {})).sent["settings"]


RUNS = [
    Settings(),
    Settings(model="paper", requests=DEFAULT_REQUESTS["paper"], chunked="off", prefix_cache="off"),
    Settings(requests=tuple(Asked(f"<\"&'> {name} \u00e9\u4e2d", 3, 9) for name in NAMES), drafts=2, policy="static"),
    Settings(fault=next(iter(TEACHING_FAULTS)), requests=(Asked("a"),)),
    *(lesson.start for lesson in LESSONS.values()),
]


@pytest.mark.parametrize("settings", RUNS)
def test_the_form_sends_the_run_that_it_shows(settings: Settings) -> None:
    assert read(form_of(link_of(settings))) == settings


@pytest.mark.parametrize(("query", "model"), [("", "trained"), ("model=paper", "paper")])
def test_an_empty_link_shows_the_defaults(query: str, model: str) -> None:
    expected = Settings() if model == "trained" else Settings(model="paper", requests=DEFAULT_REQUESTS["paper"])
    assert read(form_of(query)) == expected


def test_a_row_can_be_added() -> None:
    sent = form_of(link_of(Settings(requests=(Asked("a"),))))
    assert sum(key == "prompt" for key, _ in sent) == 8
    second = [place for place, (key, _) in enumerate(sent) if key == "prompt"][1]
    sent[second] = ("prompt", "b")
    assert [asked.prompt for asked in read(sent).requests] == ["a", "b"]


def test_every_field_has_a_label_and_every_description_is_there() -> None:
    query = urlencode([("prompt", ""), ("slots", "0"), ("policy", "x"), ("lesson", "9"), ("z", "1")])
    with pytest.raises(Problems) as caught:
        settings_of(read_link(query))
    problems = caught.value.fields
    assert problems.keys() == {"", "prompt-0", "slots", "policy", "lesson"}
    form = Forms(lab_page(read_link(query), None, problems))
    assert form.fields <= form.labelled
    assert (
        {each for text in form.described.values() for each in text.split()}
        == {"problem-prompt-0", "problem-slots", "problem-policy"}
        <= set(form.ids)
    )
    assert {"problem-form", "problem-lesson"} <= set(form.ids)
    assert len(form.ids) == len(set(form.ids))


def test_what_was_typed_is_sent_again_also_where_it_is_wrong() -> None:
    query = urlencode([("prompt", "a"), ("arrival", "soon"), ("slots", ""), ("policy", "lifo"), ("blocks", "<b>")])
    sent = form_of(query)
    assert {("arrival", "soon"), ("slots", ""), ("policy", "lifo"), ("blocks", "<b>")} <= set(sent)


@pytest.mark.parametrize(
    ("query", "problems", "is_open"),
    [("", {}, False), ("prompt=a&policy=fcfs", {}, False), ("budget=3", {}, True), ("", {"slots": "0"}, True)],
)
def test_the_form_is_short_until_a_setting_is_changed(query: str, problems: dict[str, str], is_open: bool) -> None:
    """Pinned: it took more than half of the first screen."""
    page = lab_page(read_link(query), None, problems)
    (opened,) = re.findall(r'<details class="more-settings"( open)?>', page)
    assert bool(opened) == is_open
    for help_ in ("most tokens of a step", "on: long prompts in pieces", "tokens guessed ahead; 0: none"):
        assert f"<small>{help_}</small>" in page


def test_lessons_are_links() -> None:
    page = lab_page(read_link(""), None, {})
    for lesson in LESSONS.values():
        assert link_of(lesson.start).replace("&", "&amp;") in page


def test_a_broken_engine_is_not_shown_as_sound() -> None:
    page = compute("lesson=3")[1]
    checked = re.search(r'name="leak"[^>]* checked[^>]*>([^<]*)', page)
    assert "Broken: </strong>" in page and checked and checked[1].strip() == "the convolution crosses requests"


def test_a_run_that_wastes_nothing_shows_no_hatched_cells() -> None:
    page = compute("lesson=1")[1]
    assert "hatched" not in page[page.index('id="batching"') : page.index('id="ragged"')]


def test_the_prefix_cache_has_the_same_tokens_above_and_below_and_one_menu_has_numbers() -> None:
    """One request is preempted, and finds again what it has computed."""
    page = compute("")[1]
    above = re.search(r"<strong>(\d+) tokens</strong> from the prefix cache", page)
    below = re.search(r"without the (\d+) tokens that the prefix cache has", page)
    assert above and below and above[1] == below[1] and "Look at the hatched cells" in page
    assert "Lesson 1: " in page and 'class="num"' not in page and "press Run" in page
