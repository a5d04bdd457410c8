"""Predictions: right ones are right, wrong ones are told why, nothing is given away before a guess, and links stay."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from urllib.parse import urlencode

import lessons as solutions  # fixtures/lessons.py
import pytest
from forms import Forms

from lfm2np.teaching.lab.lessons import LESSONS, Again, Unreadable, judge_guesses, read_number, read_requests
from lfm2np.teaching.lab.page import compute, lab_page, typed_of
from lfm2np.teaching.lab.run import Outcome, Verdict
from lfm2np.teaching.lab.settings import GUESSES, Asked, Settings, link_of, read_link, settings_of

pytestmark = pytest.mark.slow

TEACHING = Path(__file__).parents[3] / "docs" / "learn" / "laboratory.md"
Change = dict[str, object]
EXERCISES = [(number, place) for number in map(int, LESSONS) for place in (1, 2)]


def read(link: str) -> Settings:
    return settings_of(read_link(link))


def judged(number: int, place: int, guess: str, again: Again, settings: Settings | None = None) -> Verdict:
    return (
        LESSONS[str(number)].predictions[place - 1].judge(guess, again(settings or LESSONS[str(number)].start), again)
    )


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
def test_a_guess_is_judged(number: int, place: int, right: str, wrong: str, why: str, again: Again) -> None:
    assert judged(number, place, right, again).right
    verdict = judged(number, place, wrong, again)
    assert not verdict.right and why in verdict.sentence, verdict


@pytest.mark.parametrize(("number", "place"), EXERCISES)
def test_a_wrong_guess_gets_a_hint_and_not_the_answer(number: int, place: int, again: Again) -> None:
    """Of all numbers up to 70, and all sets of requests: neither the number nor a request that was not named."""
    prediction, now = LESSONS[str(number)].predictions[place - 1], again(LESSONS[str(number)].start)
    then = again(prediction.change(now.settings))
    answer = prediction.answer(now, then)
    names = sorted(then.tokens)
    chosen = ["".join(each) for size in range(len(names) + 1) for each in combinations(names, size)]
    for guess in chosen if prediction.is_of_requests else [str(each) for each in range(71)]:
        verdict = prediction.judge(guess or "none", now, lambda _: then)
        hidden = set(answer.right) - set(guess) if isinstance(answer.right, frozenset) else {str(answer.right)}
        said = re.findall(r"[Rr]equest (\w+)" if prediction.is_of_requests else r"\w+", verdict.sentence)
        assert verdict.right or not hidden & set(said) - set(prediction.question.split()), verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "place", "change", "right", "told"),
    [
        (1, 1, {"budget": 2}, "10", "2 steps for the prompt"),
        (1, 1, {"requests": (Asked("<start> the dog sees a red ball"),), "budget": 2}, "12", "4 steps for the prompt"),
        (1, 1, {"requests": (Asked("<start> the dog sees a red ball", 3, 2), Asked("a"))}, "9", "8 decodes"),
        (2, 1, {"requests": LESSONS["2"].start.requests[:3], "policy": "fcfs"}, "6", "request c alone says 6 tokens"),
        (2, 2, {"requests": LESSONS["4"].start.requests}, "32", "Step 5 is a rectangle of 3 rows and 17 columns"),
        (3, 1, {"requests": LESSONS["3"].start.requests[:1], "fault": ""}, "none", "begins behind another"),
        (4, 1, {"requests": LESSONS["2"].start.requests[1:]}, "3", "goes in as 5 and 4 in steps 2 and 3"),
        (4, 2, {"requests": LESSONS["4"].start.requests[:2]}, "none", "A slot is free whenever one comes."),
        (5, 2, {"requests": LESSONS["5"].start.requests[:2]}, "none", "No request is preempted"),
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
    number: int, place: int, change: Change, right: str, told: str, again: Again
) -> None:
    verdict = judged(number, place, right, again, replace(LESSONS[str(number)].start, **{"fault": "", **change}))  # type: ignore[arg-type]
    assert verdict.right and told in verdict.sentence, verdict


@pytest.mark.parametrize(
    ("number", "place", "change", "told"),
    [
        (2, 2, {"requests": (Asked("copy: red ->"),)}, "No step computes the prompt of request e"),
        (4, 1, {"requests": (Asked("copy: red ->"),)}, "There is no request c"),
        (5, 1, {"blocks": 3}, "With your settings it can't be run. 3 blocks of 4 tokens: request a alone needs 4."),
    ],
)
def test_a_run_without_an_answer_is_said(
    number: int, place: int, change: dict[str, object], told: str, again: Again
) -> None:
    start = LESSONS[str(number)].start
    settings = replace(start, **change)  # type: ignore[arg-type]
    now = replace(again(start), settings=settings)  # what it did is not asked for
    verdict = LESSONS[str(number)].predictions[place - 1].judge("3", now, again)
    assert not verdict.right and told in verdict.sentence, verdict


@pytest.mark.parametrize(("number", "place"), EXERCISES)
def test_a_run_that_broke_before_its_first_token_can_still_be_asked_about(
    number: int, place: int, again: Again
) -> None:
    """A fault may end the engine at once. The question is about a changed run, which may be sound."""
    now = replace(again(LESSONS[str(number)].start), run=None, tokens={}, stopped="It broke.")
    guess = "none" if LESSONS[str(number)].predictions[place - 1].is_of_requests else "1"
    verdict = LESSONS[str(number)].predictions[place - 1].judge(guess, now, again)
    assert not verdict.right and "broke" not in verdict.sentence, verdict


@pytest.mark.parametrize(("number", "place"), EXERCISES)
def test_who_goes_to_the_run_of_a_question_finds_the_same_question_there(number: int, place: int) -> None:
    prediction, start = LESSONS[str(number)].predictions[place - 1], LESSONS[str(number)].start
    changed = prediction.change(start)
    assert changed != start and prediction.change(changed) == changed and changed.lesson == str(number)


def never(settings: Settings) -> Outcome:
    raise AssertionError("nothing is to be run")


def test_the_run_that_is_asked_about_is_not_computed_before_a_guess(again: Again) -> None:
    """So no page can hold its answer. What can't be read is no guess either."""
    for lesson in LESSONS.values():
        now = again(lesson.start)
        assert judge_guesses(lesson, read_link(link_of(lesson.start)), now, never) == {}
        verdicts = judge_guesses(lesson, read_link(urlencode([(name, " x") for name in GUESSES])), now, never)
        assert list(verdicts) == list(GUESSES) and all(
            isinstance(prediction, Unreadable) for prediction in verdicts.values()
        )


def test_each_guess_is_judged_by_its_own_question(again: Again) -> None:
    lesson = LESSONS["2"]
    verdicts = judge_guesses(lesson, read_link("guess-1=19&guess-2=32"), again(lesson.start), again)
    assert [getattr(verdict, "right", None) for verdict in verdicts.values()] == [True, True]


@pytest.mark.parametrize(
    "text",
    ["", " ", "eight", "-1", "+1", "1.5", "1e3", "NaN", "inf", "\u0663", "\uff13", "9" * 5000, "\0", "1 2", "0x3"],
)
def test_what_is_no_number_is_said(text: str) -> None:
    with pytest.raises(Unreadable) as caught:
        read_number(text)
    assert "expected a whole number, such as 3." in str(caught.value) and len(str(caught.value)) < 200
    assert read_number(" 007 ") == 7


@pytest.mark.parametrize(
    "text", ["", " , ", "x", "3", "d", "none a", "NaN", "\uff41", "\u0430", "a" * 5000 + "!", "\0"]
)
def test_what_is_no_letter_of_a_request_is_said(text: str) -> None:
    with pytest.raises(Unreadable) as caught:
        read_requests(text, "abc")
    assert "expected letters of requests, a to c, or none." in str(caught.value) and len(str(caught.value)) < 200
    assert read_requests(" B;a and\tc", "abc") == {"a", "b", "c"} and read_requests("None", "abc") == set()


# --- links and pages


@pytest.mark.slow
def test_a_guess_is_judged_where_it_was_entered_and_stays() -> None:
    status, page = compute("lesson=1&guess-2=eight&guess-1=10")
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
        assert read(urlencode(forms.sent[form])) == LESSONS["1"].start
        assert not kept or [name for name, _ in forms.sent[form][-2:]] == kept, (
            "the guess that is checked is the link's last field"
        )

    (link,) = re.findall(r'href="\?([^"]+)">See the run', page)
    typed = read_link(link.replace("&amp;", "&"))
    assert settings_of(typed) == LESSONS["1"].predictions[0].change(LESSONS["1"].start)
    assert typed.guesses == {"guess-1": "10", "guess-2": "eight"} and not typed.checked


@pytest.mark.slow
def test_a_page_without_a_guess_is_judged_of_nothing(again: Again) -> None:
    _, page = compute("lesson=1")
    assert "verdict" not in re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL) and "See the run" not in page
    assert [pair for sent in Forms(page).sent.values() for pair in sent if pair[0] in GUESSES] == [
        ("guess-1", ""),
        ("guess-2", ""),
    ], "an empty field is no guess, and is not sent by another form"
    left_empty = read_link("lesson=1&guess-1=+&guess-2=3")
    sent = Forms(lab_page(left_empty, None, {})).sent
    assert [pair for pair in sent["settings"] if pair[0] in GUESSES] == [("guess-2", "3")]
    for place in (1, 2):
        for guess in ("9", "10"):
            assert judged(1, place, guess, again).sentence not in page


def test_a_guess_is_no_setting() -> None:
    link = "slots=2&lesson=3"
    assert read(f"guess-1=b&{link}&guess-2=%00") == read(link)
    start = LESSONS["3"].start
    typed = typed_of("lesson=3&guess-1=b")
    assert settings_of(typed) == settings_of(typed_of("lesson=3")) == start
    assert (typed.guesses, typed.checked) == ({"guess-1": "b"}, "guess-1")
    assert settings_of(typed_of("lesson=3&slots=2&guess-1=b")) == Settings(slots=2, lesson="3")


def test_a_guess_stays_where_the_settings_are_wrong() -> None:
    status, page = compute(f"{urlencode({'lesson': 1, 'slots': 0})}&guess-1=%22%3E%3Cb%3E")
    assert status == 400 and "verdict-guess-1" not in page and "<b>" not in page
    assert ("guess-1", '"><b>') in Forms(page).sent["settings"]


# --- the teacher's page


@pytest.mark.slow
def test_the_teachers_page_has_each_right_answer_as_the_engine_judges_it(again: Again) -> None:
    text = TEACHING.read_text(encoding="utf-8")
    written = text.partition(solutions.FIRST)[2].partition(solutions.LAST)[0].strip("\n")
    assert written == solutions.right_answers(again), "python fixtures/lessons.py --write"
