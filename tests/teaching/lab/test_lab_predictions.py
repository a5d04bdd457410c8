"""Predictions: right ones are right, wrong ones are told why, nothing is given away before a guess, and links stay."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

import lessons as solutions  # fixtures/lessons.py
import pytest

from lfm2np.teaching.lab.compute import Outcome
from lfm2np.teaching.lab.lab_page import answer, judge_guesses, lab_page, read_link
from lfm2np.teaching.lab.lessons import LESSONS
from lfm2np.teaching.lab.models import Models, understand
from lfm2np.teaching.lab.predictions import Again, Unreadable, Verdict, read_number, read_requests
from lfm2np.teaching.lab.settings import GUESSES, Asked, Settings, examine, query_of, typed_of

TEACHING = Path(__file__).parents[3] / "docs" / "learn" / "laboratory.md"
EXERCISES = [(number, place) for number in LESSONS for place in (1, 2)]


def judged(number: int, place: int, guess: str, again: Again, settings: Settings | None = None) -> Verdict:
    return LESSONS[number].predictions[place - 1].judge(guess, again(settings or LESSONS[number].start), again)


@pytest.mark.parametrize(
    ("number", "place", "right", "wrong", "why"),
    [
        (1, 1, "9", "10", "10 would be right if the last token went in as well."),
        (1, 1, "9", "12", "12 is the number of rows."),
        (1, 1, "9", "7", "It is more. Count a step for the prompt"),
        (1, 2, "9", "6", "It takes 6 steps now."),
        (2, 1, "19", "13", "13 would be right if twice the slots halved the steps."),
        (2, 1, "19", "24", "Request d may say 24 tokens, but it ends before"),
        (2, 2, "32", "34", "34 counts the rows beside the prompt whole."),
        (2, 2, "32", "68", "68 cells are empty in all steps together."),
        (3, 1, "b c", "a b c", "Request a does not belong to the answer: in no step does it begin behind another."),
        (3, 1, "C and B", "c", "At least one request is missing. The first rows of a prompt"),
        (3, 2, "abc", "b c", "At least one request is missing. Which requests have a step with a single row?"),
        (4, 1, "3", "2", "In step 2 its prompt is not whole: 8 of 9 rows are computed"),
        (4, 1, "3", "4", "4 would be right if steps were counted from 1."),
        (4, 2, "c,d,e,f", "d e f", "At least one request is missing. Two run at a time."),
        (5, 1, "4", "5", "5 would be right if the last token went in as well"),
        (5, 2, "d", "c", "this one came earlier, in step 2. It is preempted later, in step 6."),
        (5, 2, "D", "none", "At least one request is missing. The blocks run out."),
        (6, 1, "b", "a b", "nothing of it comes twice, so nothing is guessed."),
        (6, 2, "5", "6", "6 would be right if a step gave 2 tokens."),
    ],
)
def test_a_guess_is_judged(number: int, place: int, right: str, wrong: str, why: str, again: Again):
    assert judged(number, place, right, again).right
    verdict = judged(number, place, wrong, again)
    assert not verdict.right and why in verdict.sentence, verdict


@pytest.mark.parametrize(("number", "place"), EXERCISES)
def test_a_wrong_guess_gets_a_hint_and_not_the_answer(number: int, place: int, again: Again):
    """Of all numbers up to 70, and all sets of requests: neither the number nor a request that was not named."""
    prediction, now = LESSONS[number].predictions[place - 1], again(LESSONS[number].start)
    then = again(prediction.change(now.settings))
    answer = prediction.answer(now, then)
    names = sorted(then.tokens)
    chosen = ["".join(each) for size in range(len(names) + 1) for each in combinations(names, size)]
    for guess in chosen if prediction.of_requests else [str(each) for each in range(71)]:
        verdict = prediction.judge(guess or "none", now, lambda _: then)
        hidden = set(answer.right) - set(guess) if prediction.of_requests else {str(answer.right)}
        said = re.findall(r"[Rr]equest (\w+)" if prediction.of_requests else r"\w+", verdict.sentence)
        assert verdict.right or not hidden & set(said) - set(prediction.question.split()), verdict


@pytest.mark.parametrize(
    ("number", "place", "change", "right", "told"),
    [
        (1, 1, {"budget": 2}, "10", "2 steps for the prompt"),
        (1, 1, {"requests": (Asked("<start> the dog sees a red ball"),), "budget": 2}, "12", "4 steps for the prompt"),
        (1, 1, {"requests": (Asked("<start> the dog sees a red ball", 3, 2), Asked("a"))}, "9", "8 decodes"),
        (2, 1, {"requests": LESSONS[2].start.requests[:3], "policy": "fcfs"}, "6", "request c alone says 6 tokens"),
        (2, 2, {"requests": LESSONS[4].start.requests}, "32", "Step 5 is a rectangle of 3 rows and 17 columns"),
        (3, 1, {"requests": LESSONS[3].start.requests[:1], "fault": ""}, "none", "begins behind another"),
        (4, 1, {"requests": LESSONS[2].start.requests[1:]}, "3", "goes in as 5 and 4 in steps 2 and 3"),
        (4, 2, {"requests": LESSONS[4].start.requests[:2]}, "none", "A slot is free whenever one comes."),
        (5, 2, {"requests": LESSONS[5].start.requests[:2]}, "none", "No request is preempted"),
        (
            6,
            1,
            {"requests": (Asked("copy: zo sa zo sa ->"),), "fault": "convolution-crosses-requests"},
            "a",
            "drafts are right",
        ),
    ],
)
def test_the_answer_follows_from_the_settings_of_the_page(
    number: int, place: int, change: dict[str, object], right: str, told: str, again: Again
):
    verdict = judged(number, place, right, again, replace(LESSONS[number].start, **{"fault": "", **change}))  # type: ignore[arg-type]
    assert verdict.right and told in verdict.sentence, verdict


@pytest.mark.parametrize(
    ("number", "place", "change", "told"),
    [
        (2, 2, {"requests": (Asked("copy: red ->"),)}, "No step computes the prompt of request e"),
        (4, 1, {"requests": (Asked("copy: red ->"),)}, "There is no request c"),
        (5, 1, {"num_blocks": 3}, "With your settings it can't be run. 3 blocks of 4 tokens: request a alone needs 4."),
    ],
)
def test_a_run_without_an_answer_is_said(
    number: int, place: int, change: dict[str, object], told: str, again: Again, models: Models
):
    start = LESSONS[number].start
    settings = replace(start, **change)  # type: ignore[arg-type]
    now = replace(again(start), settings=settings)  # what it did is not asked for
    verdict = LESSONS[number].predictions[place - 1].judge("3", now, again)
    assert not verdict.right and told in verdict.sentence, verdict


@pytest.mark.parametrize(("number", "place"), EXERCISES)
def test_a_run_that_broke_before_its_first_token_can_still_be_asked_about(number: int, place: int, again: Again):
    """A fault may end the engine at once. The question is about a changed run, which may be sound."""
    now = replace(again(LESSONS[number].start), run=None, counts=None, tokens={}, stopped="It broke.")
    guess = "none" if LESSONS[number].predictions[place - 1].of_requests else "1"
    verdict = LESSONS[number].predictions[place - 1].judge(guess, now, again)
    assert not verdict.right and "broke" not in verdict.sentence, verdict


@pytest.mark.parametrize(("number", "place"), EXERCISES)
def test_who_goes_to_the_run_of_a_question_finds_the_same_question_there(number: int, place: int):
    prediction, start = LESSONS[number].predictions[place - 1], LESSONS[number].start
    changed = prediction.change(start)
    assert changed != start and prediction.change(changed) == changed and changed.lesson == number


def never(settings: Settings) -> Outcome:
    raise AssertionError("nothing is to be run")


def test_the_run_that_is_asked_about_is_not_computed_before_a_guess(again: Again):
    """So no page can hold its answer. What can't be read is no guess either."""
    for lesson in LESSONS.values():
        now = again(lesson.start)
        assert judge_guesses(lesson, typed_of(parse_qsl(query_of(lesson.start))), now, never) == {}
        verdicts = judge_guesses(lesson, typed_of([(name, " x") for name in GUESSES]), now, never)
        assert list(verdicts) == list(GUESSES) and all(
            isinstance(prediction, Unreadable) for prediction in verdicts.values()
        )


@pytest.mark.parametrize(
    "text",
    ["", " ", "eight", "-1", "+1", "1.5", "1e3", "NaN", "inf", "\u0663", "\uff13", "9" * 5000, "\0", "1 2", "0x3"],
)
def test_what_is_no_number_is_said(text: str):
    with pytest.raises(Unreadable) as caught:
        read_number(text)
    assert "expected a whole number, such as 3." in str(caught.value) and len(str(caught.value)) < 200
    assert read_number(" 007 ") == 7


@pytest.mark.parametrize(
    "text", ["", " , ", "x", "3", "d", "none a", "NaN", "\uff41", "\u0430", "a" * 5000 + "!", "\0"]
)
def test_what_is_no_letter_of_a_request_is_said(text: str):
    with pytest.raises(Unreadable) as caught:
        read_requests(text, "abc")
    assert "expected letters of requests, a to c, or none." in str(caught.value) and len(str(caught.value)) < 200
    assert read_requests(" B;a and\tc", "abc") == {"a", "b", "c"} and read_requests("None", "abc") == set()


# --- links and pages


class Forms(HTMLParser):
    """What a browser would send of each form, and what describes the field of each name."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sent: dict[str, list[tuple[str, str]]] = {}
        self.described: dict[str, str] = {}
        self.focused: list[str] = []
        self._form = self._select = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        attributes = {key: value or "" for key, value in attrs}
        if tag == "form":
            self._form = attributes.get("id", attributes.get("aria-label", ""))
            self.sent[self._form] = []
        if tag == "input" and "name" in attributes:
            self.sent[self._form].append((attributes["name"], attributes["value"]))
            if attributes.get("type") != "hidden":
                self.described[attributes["name"]] = attributes.get("aria-describedby", "")
            self.focused += [attributes["name"]] if "autofocus" in attributes else []
        if tag == "select":
            self._select = attributes.get("name", "")  # the player's has none, and is in no form
        if tag == "option" and "selected" in attributes and self._select:
            self.sent[self._form].append((self._select, attributes["value"]))


def test_a_guess_is_judged_where_it_was_entered_and_stays(models: Models):
    status, page = answer("lesson=1&guess-2=eight&guess-1=10", models)
    assert status == 200
    assert re.search(r'id="verdict-guess-1" role="status"><strong>Not yet. </strong>10 would be right if', page)
    assert re.search(r'id="problem-guess-2" role="alert">&#x27;eight&#x27;: expected a whole number', page)
    assert '<p class="verdict' in page and 'id="verdict"' not in page, "the settings were not touched"
    forms = Forms(page)
    assert forms.described["guess-1"] == "question-guess-1 verdict-guess-1"
    assert forms.described["guess-2"] == "problem-guess-2" and forms.focused == ["guess-1"]

    assert [pair for pair in forms.sent["settings"] if pair[0] in GUESSES] == [("guess-2", "eight"), ("guess-1", "10")]
    for form, kept in (
        ("settings", []),
        ("Exercise 1", ["guess-2", "guess-1"]),
        ("Exercise 2", ["guess-1", "guess-2"]),
    ):
        sent = parse_qsl(urlencode(forms.sent[form]), keep_blank_values=True)
        assert understand(sent, models) == LESSONS[1].start
        assert not kept or [name for name, _ in sent[-2:]] == kept, "the guess that is checked is the link's last field"

    (link,) = re.findall(r'href="\?([^"]+)">See the run', page)
    pairs = parse_qsl(link.replace("&amp;", "&"), keep_blank_values=True)
    assert understand(pairs, models) == LESSONS[1].predictions[0].change(LESSONS[1].start)
    assert typed_of(pairs).guesses == {"guess-1": "10", "guess-2": "eight"} and not typed_of(pairs).checked


def test_a_page_without_a_guess_is_judged_of_nothing(models: Models, again: Again):
    _, page = answer("lesson=1", models)
    assert "verdict" not in re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL) and "See the run" not in page
    assert [pair for sent in Forms(page).sent.values() for pair in sent if pair[0] in GUESSES] == [
        ("guess-1", ""),
        ("guess-2", ""),
    ], "an empty field is no guess, and is not sent by another form"
    left_empty = typed_of([("lesson", "1"), ("guess-1", " "), ("guess-2", "3")])
    sent = Forms(lab_page(left_empty, None, {}, None, None)).sent
    assert [pair for pair in sent["settings"] if pair[0] in GUESSES] == [("guess-2", "3")]
    for place in (1, 2):
        for guess in ("9", "10"):
            assert judged(1, place, guess, again).sentence not in page


def test_a_guess_is_no_setting(models: Models):
    pairs = [("slots", "2"), ("lesson", "3")]
    guessed = [("guess-1", "b"), *pairs, ("guess-2", "\0")]
    assert examine(guessed) == examine(pairs) and typed_of(guessed).values == typed_of(pairs).values
    assert (
        read_link("lesson=3&guess-1=b")[:-1]
        == read_link("lesson=3")
        == parse_qsl(query_of(LESSONS[3].start), keep_blank_values=True)
    )
    assert read_link("lesson=3&slots=2&guess-1=b") == [("lesson", "3"), ("slots", "2"), ("guess-1", "b")]
    assert "stands more than once" in examine([("guess-1", "1"), ("guess-1", "2")])[1][""]
    assert "'guess-3': no name of a setting" in examine([("guess-3", "1")])[1][""]


def test_a_guess_stays_where_the_settings_are_wrong(models: Models):
    status, page = answer(f"{urlencode({'lesson': 1, 'slots': 0})}&guess-1=%22%3E%3Cb%3E", models)
    assert status == 400 and "verdict-guess-1" not in page and "<b>" not in page
    assert ("guess-1", '"><b>') in Forms(page).sent["settings"]


# --- the teacher's page


def test_the_teachers_page_has_each_right_answer_as_the_engine_judges_it(again: Again):
    text = TEACHING.read_text(encoding="utf-8")
    written = text.partition(solutions.FIRST)[2].partition(solutions.LAST)[0].strip("\n")
    assert written == solutions.right_answers(again), "python fixtures/lessons.py --write"


def test_each_link_of_a_solution_is_judged_as_it_says(again: Again, models: Models):
    text = "\n".join(solutions.tables(again))
    rows = re.findall(r"^\| \[[^\n]*?\]\((http\S+)\) \| (\*\*Right\.\*\*|Not yet\.) (.+) \|$", text, re.M)
    seen = set()
    for link, word, sentence in rows:
        pairs = read_link(urlsplit(link).query)
        typed, settings = typed_of(pairs), understand(pairs, models)
        lesson, now = LESSONS[settings.lesson], again(settings)
        verdicts = judge_guesses(lesson, typed, now, again) or {"settings": lesson.check(settings, now, again)}
        assert list(verdicts.values()) == [Verdict(word != "Not yet.", sentence)], link
        seen.add((lesson.number, *verdicts, word))
    kinds = [(number, kind) for number in LESSONS for kind in (*GUESSES, "settings")]
    assert seen == {(*kind, word) for kind in kinds for word in ("**Right.**", "Not yet.")}, "each is solved and failed"
