"""A link says all of a run, and what can't be is told at its field, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from urllib.parse import parse_qsl

import pytest
from faults import by_name
from hypothesis import given
from hypothesis import strategies as st
from links import read_settings

from lfm2np.teaching.drawings.demo import hand_model
from lfm2np.teaching.lab.lessons import LESSONS
from lfm2np.teaching.lab.models import Models, token_ids, understand
from lfm2np.teaching.lab.settings import (
    CHOICES,
    MOST_FIELDS,
    MOST_LESSON,
    MOST_REQUESTS,
    NUMBERS,
    ON_OFF,
    PAPER_REQUESTS,
    TEACHING_FAULTS,
    Asked,
    Problems,
    Settings,
    query_of,
    typed_of,
)

Query = Sequence[tuple[str, str]]
PRINTABLE = st.characters(exclude_categories=("C", "Z"))
PROMPTS = st.text(st.one_of(PRINTABLE, st.just(" ")), min_size=1, max_size=200).filter(lambda text: text.strip())
ASKED = st.builds(Asked, PROMPTS.filter(str.isprintable), st.integers(0, 60), st.integers(1, 48))
SETTINGS = st.builds(
    Settings,
    requests=st.lists(ASKED, min_size=1, max_size=8).map(tuple),
    **{setting: st.integers(least, most) for setting, least, most in NUMBERS.values()},
    **{setting: st.booleans() if known == ON_OFF else st.sampled_from(known) for setting, known in CHOICES.values()},
)


@given(SETTINGS)
def test_a_link_is_read_back_as_the_run_it_was_made_of(settings: Settings):
    assert read_settings(parse_qsl(query_of(settings))) == settings
    assert read_settings(parse_qsl(query_of(settings), keep_blank_values=True)) == settings


def test_a_link_names_every_setting():
    names = {key for key, _ in parse_qsl(query_of(Settings()), keep_blank_values=True)}
    assert len(names) == len(fields(Settings)) - 1 + 3  # requests are three names


def test_what_a_link_leaves_out_has_its_default():
    assert read_settings([]) == Settings()
    assert read_settings([("slots", "2")]) == Settings(slots=2)
    assert read_settings([("model", "paper")]) == Settings(model="paper", requests=PAPER_REQUESTS)
    assert read_settings([("prompt", "a")]).requests == (Asked("a"),)


def test_rows_without_a_prompt_are_left_out():
    query = [("prompt", ""), ("prompt", "a"), ("prompt", " "), ("arrival", "x"), ("arrival", "3"), ("arrival", "")]
    assert read_settings(query).requests == (Asked("a", 3),)


def problems_of(query: Query) -> dict[str, str]:
    with pytest.raises(Problems) as caught:
        read_settings(query)
    return caught.value.fields


@pytest.mark.parametrize(
    ("query", "field", "told"),
    [
        ([("blokcs", "3")], "", "'blokcs': no name of a setting, expected prompt, arrival,"),
        ([("prompt", "")], "prompt-0", "There is no prompt"),
        ([("prompt", "a"), ("prompt", "a\0b")], "prompt-1", "Character 2 of the prompt is U+0000"),
        ([("prompt", "\ud800")], "prompt-0", "U+D800"),
        ([("prompt", "a\u202eb")], "prompt-0", "U+202E"),
        ([("prompt", "a" * 201)], "prompt-0", "201 characters, expected at most 200"),
        ([("prompt", "a"), ("arrival", "61")], "arrival-0", "'61': expected a whole number, 0 to 60"),
        ([("prompt", "a"), ("arrival", "0"), ("arrival", "1")], "", "arrival: 2 values for 1 prompt."),
        ([("prompt", "a"), ("tokens", "0")], "tokens-0", "'0': expected a whole number, 1 to 48"),
        ([("prompt", "a"), ("tokens", "9" * 5000)], "tokens-0", "expected a whole number"),
        ([("prompt", "a")] * (MOST_REQUESTS + 1), "", "9 requests, expected at most 8"),
        ([("x", "")] * 10_000, "", f"10000 fields, expected at most {MOST_FIELDS}"),
        ([("model", "gpt")], "model", "'gpt': expected trained, paper"),
        ([("policy", "")], "policy", "'': expected fcfs"),
        ([("fault", "nothing")], "fault", "'nothing': expected nothing, convolution"),
        ([("chunked", "1")], "chunked", "'1': expected on, off"),
        ([("prefix-cache", "\ud800")], "prefix-cache", "expected on, off"),
        ([("blocks", "129")], "blocks", "1 to 128"),
        ([("block-size", "33")], "block-size", "1 to 32"),
        ([("budget", "257")], "budget", "1 to 256"),
        ([("slots", "9")], "slots", "1 to 8"),
        ([("drafts", "-1")], "drafts", "0 to 4"),
        ([("drafts", "\u0663")], "drafts", "0 to 4"),
        ([("lesson", "7")], "lesson", "0 to 6"),
        ([("slots", "1"), ("slots", "2")], "slots", "stands more than once"),
    ],
)
def test_what_can_not_be_is_one_sentence_at_its_field(query: Query, field: str, told: str):
    problems = problems_of(query)
    assert list(problems) == [field] and told in problems[field]
    assert problems[field].endswith(".") and len(problems[field]) < 500


def test_all_problems_are_told_at_once(models: Models):
    query = [("prompt", "the fish"), ("prompt", "\0"), ("model", "paper"), ("slots", "0"), ("blocks", "many")]
    with pytest.raises(Problems) as caught:
        understand(query, models)
    assert caught.value.fields.keys() == {"prompt-0", "prompt-1", "slots", "blocks"}
    assert "'fish': no word of the paper model" in caught.value.fields["prompt-0"]


def test_an_unknown_word_is_told_with_all_that_are_known(models: Models):
    with pytest.raises(Problems) as caught:
        understand([("model", "paper"), ("prompt", "a fish")], models)
    assert "<start> the cat dog sees a red ball and ." in caught.value.fields["prompt-0"]


def test_the_start_is_put_in_front_of_words_where_it_is_missing(models: Models):
    words = hand_model()[1]
    for text in ("the cat", "<start> the  cat"):
        assert token_ids(text, models.by_name["paper"]) == [words.index(word) for word in ("<start>", "the", "cat")]


def test_more_than_the_context_is_told_at_the_prompt(models: Models):
    whole = [("model", "paper"), ("prompt", "a " * 59), ("tokens", "5"), ("blocks", "128")]
    with pytest.raises(Problems) as caught:
        understand(whole, models)
    assert caught.value.fields == {
        "prompt-0": "The prompt has 60 tokens and may get 5 more, expected at most 64 together."
    }
    understand([*whole[:2], ("tokens", "4"), whole[3]], models)


def test_a_pool_that_is_too_small_is_told_with_what_is_needed(models: Models):
    # nine tokens and 24 more, of which the last is never computed: 32 places
    query = [("prompt", "copy: red ->"), ("prompt", "count: 23 to 31 ->"), ("tokens", "8"), ("tokens", "24")]
    with pytest.raises(Problems) as caught:
        understand([*query, ("blocks", "7")], models)
    assert caught.value.fields == {"blocks": "7 blocks of 4 tokens: request b alone needs 8."}
    understand([*query, ("blocks", "8")], models)


def test_every_fault_is_one_of_the_catalogue_and_explained():
    assert 8 <= len(TEACHING_FAULTS) <= 10
    for name, text in TEACHING_FAULTS.items():
        assert by_name(name) and text.endswith(".")


def test_every_lesson_can_be_named(models: Models):
    assert sorted(LESSONS) == list(range(1, MOST_LESSON + 1))
    for number, lesson in LESSONS.items():
        assert lesson.start.lesson == lesson.number == number
        assert understand(parse_qsl(query_of(lesson.start)), models) == lesson.start


@given(
    st.lists(st.tuples(st.one_of(st.sampled_from(["prompt", "arrival", "model", "blocks", ""]), st.text()), st.text()))
)
def test_whatever_a_link_holds_is_a_run_or_problems(query: Query):
    typed_of(query)
    try:
        settings = read_settings(query)
    except Problems as problems:
        assert problems.fields and all(text.endswith(".") for text in problems.fields.values())
    else:
        assert read_settings(parse_qsl(query_of(settings))) == settings


def test_what_was_typed_stays_as_it_was():
    typed = typed_of([("prompt", "a"), ("arrival", "soon"), ("blocks", "many"), ("prompt", " "), ("x", "y")])
    assert [(row.prompt, row.arrival, row.tokens) for row in typed.rows] == [("a", "soon", None)]
    assert typed.values == {"blocks": "many"}


def test_settings_that_differ_have_links_that_differ():
    for name, other in (
        ("chunked", False),
        ("prefix_caching", False),
        ("fault", "convolution-crosses-requests"),
        ("drafts", 1),
    ):
        assert query_of(replace(Settings(), **{name: other})) != query_of(Settings())
