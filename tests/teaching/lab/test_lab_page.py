"""A link says all of a run, what can't be is told at its field, all at once; the form is what a browser sends back
without any script: the run that it shows, or what was typed."""

from __future__ import annotations

import re
from dataclasses import fields
from html.parser import HTMLParser
from urllib.parse import urlencode

import pytest
from faults import by_name
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.teaching.drawings.demo import hand_model
from lfm2np.teaching.lab.lessons import LESSONS
from lfm2np.teaching.lab.page import compute, lab_page
from lfm2np.teaching.lab.run import chosen, require_fits, token_ids
from lfm2np.teaching.lab.settings import (
    DEFAULT_REQUESTS,
    FIELDS,
    NAMES,
    TEACHING_FAULTS,
    Asked,
    Problems,
    Settings,
    link_of,
    read_link,
    settings_of,
)

PRINTABLE = st.characters(exclude_categories=("C", "Z"))
PROMPTS = st.text(st.one_of(PRINTABLE, st.just(" ")), min_size=1, max_size=200).filter(lambda text: text.strip())
ASKED = st.builds(Asked, PROMPTS.filter(str.isprintable), st.integers(0, 60), st.integers(1, 48))
assert {field.name for field in FIELDS} == {field.name for field in fields(Settings)} - {"requests"}
SETTINGS = st.builds(
    Settings,
    requests=st.lists(ASKED, min_size=1, max_size=8).map(tuple),
    **{field.name: st.sampled_from(field.may) for field in FIELDS},
)


def read(link: str) -> Settings:
    return settings_of(read_link(link))


def fit(link: str) -> None:
    require_fits(read(link))


def problems_of(link: str) -> dict[str, str]:
    with pytest.raises(Problems) as caught:
        fit(link)
    return caught.value.fields


@pytest.mark.slow
@given(SETTINGS)
def test_a_link_is_read_back_as_the_run_it_was_made_of(settings: Settings) -> None:
    assert read(link_of(settings)) == settings


def test_what_a_link_leaves_out_has_its_default() -> None:
    assert read("") == Settings()
    assert read("slots=2") == Settings(slots=2)
    assert read("model=paper") == Settings(model="paper", requests=DEFAULT_REQUESTS["paper"])
    assert read("prompt=a").requests == (Asked("a"),)


def test_rows_without_a_prompt_are_left_out() -> None:
    link = "prompt=&prompt=a&prompt=+&arrival=x&arrival=3&arrival="
    assert read(link).requests == (Asked("a", 3),)


TWO = "prompt=copy:+red+->&prompt=count:+23+to+31+->&tokens=8&tokens=24"
PROBLEMS = [
    ("blokcs=3", "", "'blokcs': no name of a setting, expected prompt, arrival,"),
    ("prompt=", "prompt-0", "There is no prompt"),
    ("prompt=a&prompt=a%00b", "prompt-1", "Character 2 of the prompt is U+0000"),
    ("prompt=%ED%A0%80", "prompt-0", "no UTF-8"),
    ("prompt=a%E2%80%AEb", "prompt-0", "U+202E"),
    (f"prompt={'a' * 201}", "prompt-0", "201 characters, expected at most 200"),
    ("prompt=a&arrival=61", "arrival-0", "'61': expected a whole number, 0 to 60"),
    ("prompt=a&arrival=0&arrival=1", "", "arrival: 2 values for 1 prompt."),
    ("arrival=1", "", "arrival: 1 value for 0 prompts."),
    ("prompt=a&tokens=0", "tokens-0", "'0': expected a whole number, 1 to 48"),
    (f"prompt=a&tokens={'9' * 5000}", "tokens-0", "expected a whole number"),
    ("&".join(["prompt=a"] * 9), "", "9 requests, expected at most 8"),
    ("&".join(["x="] * 10_000), "", "more than 64 fields"),
    ("model=gpt", "model", "'gpt': expected trained, paper"),
    ("policy=", "policy", "'': expected fcfs"),
    ("fault=nothing", "fault", "'nothing': expected nothing, convolution"),
    ("chunked=1", "chunked", "'1': expected on, off"),
    ("blocks=129", "blocks", "1 to 128"),
    ("block_size=33", "block_size", "1 to 32"),
    ("budget=257", "budget", "1 to 256"),
    ("slots=9", "slots", "1 to 8"),
    ("drafts=-1", "drafts", "0 to 4"),
    ("drafts=%D9%A3", "drafts", "0 to 4"),
    ("lesson=7", "lesson", "expected nothing, 1, 2"),
    ("slots=1&slots=2", "", "slots stands more than once"),
    ("model=paper&prompt=a+fish", "prompt-0", "'fish': no word of the paper model, expected <start> the cat dog sees"),
    (
        f"model=paper&tokens=5&blocks=128&prompt={'a+' * 59}",
        "prompt-0",
        "The prompt has 60 tokens and may get 5 more, expected at most 64 together.",
    ),
    # nine tokens and 24 more, of which the last is never computed: 32 places
    (f"{TWO}&blocks=7", "blocks", "7 blocks of 4 tokens: request b alone needs 8."),
]


@pytest.mark.parametrize(("link", "field", "told"), PROBLEMS)
def test_what_can_not_be_is_one_sentence_at_its_field(link: str, field: str, told: str) -> None:
    problems = problems_of(link)
    assert list(problems) == [field] and told in problems[field]
    assert problems[field].endswith(".") and len(problems[field]) < 500


def test_what_just_fits_is_no_problem() -> None:
    fit(f"model=paper&tokens=4&blocks=128&prompt={'a+' * 59}")
    fit(f"{TWO}&blocks=8")


def test_all_problems_are_told_at_once() -> None:
    assert problems_of("prompt=a&prompt=%00&slots=0&blocks=many&x=1").keys() == {"", "prompt-1", "slots", "blocks"}
    assert problems_of("model=paper&prompt=a+fish&prompt=a&tokens=9&tokens=40&blocks=1").keys() == {
        "prompt-0",
        "blocks",
    }


def test_the_start_is_put_in_front_of_words_where_it_is_missing() -> None:
    words = hand_model()[1]
    for text in ("the cat", "<start> the  cat"):
        assert token_ids(text, chosen("paper")) == [words.index(word) for word in ("<start>", "the", "cat")]


def test_every_fault_is_one_of_the_catalogue_and_explained() -> None:
    assert 8 <= len(TEACHING_FAULTS) <= 10
    for name, text in TEACHING_FAULTS.items():
        assert by_name(name) and text.endswith(".")


def test_every_lesson_can_be_named() -> None:
    assert ("", *LESSONS) == next(field.may for field in FIELDS if field.name == "lesson")
    for number, lesson in LESSONS.items():
        assert lesson.start.lesson == lesson.number == number
        assert read(link_of(lesson.start)) == lesson.start
        fit(link_of(lesson.start))


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.one_of(st.sampled_from(["prompt", "arrival", "model", "blocks", ""]), st.text()), st.text()))
)
def test_whatever_a_link_holds_is_a_run_or_problems(pairs: list[tuple[str, str]]) -> None:
    link = urlencode(pairs, errors="replace")
    try:
        settings = read(link)
    except Problems as problems:
        assert problems.fields and all(text.endswith(".") for text in problems.fields.values())
    else:
        assert read(link_of(settings)) == settings


def test_what_was_typed_stays_as_it_was() -> None:
    typed = read_link("prompt=a&arrival=soon&blocks=many&prompt=+&arrival=&x=y")
    assert typed.rows == [("a", "soon", "8")] and typed.values == {"blocks": "many"}


# --- the form


class Forms(HTMLParser):
    """What a browser would send of a page's forms, and what belongs to what.

    sent       the fields of each form, by its id or label
    described  what describes the field of each name
    fields     ids of what can be typed or chosen; `labelled` those that have a label
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sent: dict[str, list[tuple[str, str]]] = {}
        self.described: dict[str, str] = {}
        self.ids: list[str] = []
        self.fields: set[str] = set()
        self.labelled: set[str] = set()
        self._form = self._select = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {key: value or "" for key, value in attrs}
        name = attributes.get("name", "")
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag == "form":
            self._form = attributes.get("id", attributes.get("aria-label", ""))
            self.sent[self._form] = []
        if tag == "label":
            self.labelled.add(attributes["for"])
        if tag in ("input", "select") and name and attributes.get("type") != "hidden":
            self.fields.add(attributes["id"])
            self.labelled |= {attributes["id"]} if attributes.get("aria-label") else set()
            self.described[attributes["id"]] = attributes.get("aria-describedby", "")
        if tag == "input" and name:
            self.sent[self._form].append((name, attributes["value"]))
        if tag == "select":
            self._select = name  # the player's has none, and is in no form
        if tag == "option" and "selected" in attributes and self._select:
            self.sent[self._form].append((self._select, attributes["value"]))


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


@pytest.mark.parametrize("link", [*map(link_of, RUNS), "", "model=paper"])
def test_the_form_sends_the_run_that_it_shows(link: str) -> None:
    assert read(urlencode(form_of(link))) == read(link)


def test_a_row_can_be_added() -> None:
    sent = form_of(link_of(Settings(requests=(Asked("a"),))))
    assert sum(key == "prompt" for key, _ in sent) == 8
    second = [place for place, (key, _) in enumerate(sent) if key == "prompt"][1]
    sent[second] = ("prompt", "b")
    assert [asked.prompt for asked in read(urlencode(sent)).requests] == ["a", "b"]


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


@pytest.mark.slow
def test_a_broken_engine_is_not_shown_as_sound() -> None:
    page = compute("lesson=3")[1]
    checked = re.search(r'name="leak"[^>]* checked[^>]*>([^<]*)', page)
    assert "Broken: </strong>" in page and checked and checked[1].strip() == "the convolution crosses requests"


@pytest.mark.slow
def test_a_run_that_wastes_nothing_shows_no_hatched_cells() -> None:
    page = compute("lesson=1")[1]
    assert "hatched" not in page[page.index('id="batching"') : page.index('id="ragged"')]


@pytest.mark.slow
def test_the_prefix_cache_has_the_same_tokens_above_and_below_and_one_menu_has_numbers() -> None:
    """One request is preempted, and finds again what it has computed."""
    page = compute("")[1]
    above = re.search(r"<strong>(\d+) tokens</strong> from the prefix cache", page)
    below = re.search(r"without the (\d+) tokens that the prefix cache has", page)
    assert above and below and above[1] == below[1] and "Look at the hatched cells" in page
    assert "Lesson 1: " in page and 'class="num"' not in page and "press Run" in page
