"""Each lesson is failed by what it starts from, passed by a solution, and says what it saw where an answer is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from lfm2np.teaching.lab.lessons import LESSONS, Again
from lfm2np.teaching.lab.page import compute
from lfm2np.teaching.lab.run import Verdict
from lfm2np.teaching.lab.settings import Asked, Problems, link_of

Change = Mapping[str, Any]
COPIES = (Asked("copy: tivu zo sa ->", 0, 8), Asked("copy: zo sa zo sa zo sa zo sa ->", 0, 24))
EASY = {"budget": 8, "policy": "prefill-first", "slots": 6}


def judged(number: int, change: Change, again: Again) -> Verdict:
    lesson = LESSONS[str(number)]
    settings = replace(lesson.start, **change)
    return lesson.check(again(settings), again)


def prompts_of(number: int, count: int, **change: Any) -> tuple[Asked, ...]:
    return tuple(replace(asked, **change) for asked in LESSONS[str(number)].start.requests[:count])


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (1, "The run took 6 steps, 1 for the prompt and 5 for decodes; expected 7 steps."),
        (2, "static takes 25 steps and wastes 57 cells: expected at most 19 cells"),
        (3, "Request b has other logits, though the same tokens, than without the fault: in step 0 it begins behind "),
        (4, "Step 3 has 20 rows, expected at most 8."),
        (5, "With 9 blocks request c is preempted in step 4."),
        (6, "There are no drafts"),
    ],
)
def test_what_a_lesson_starts_from_is_not_its_answer(number: int, sentence: str, again: Again) -> None:
    verdict = judged(number, {}, again)
    assert not verdict.right and sentence in verdict.sentence


@pytest.mark.parametrize(
    ("number", "change", "sentence"),
    [
        (1, {"budget": 2}, "chunks of 2 and 2 rows"),
        (1, {"budget": 3}, "chunks of 3 and 1 rows"),
        (2, {"policy": "waiting-served"}, "23 steps and wastes 4 cells"),
        (3, {"slots": 1}, "would never find the bug"),
        (
            3,
            {"requests": tuple(replace(asked, arrival=20 * i) for i, asked in enumerate(prompts_of(3, 2)))},
            "never find",
        ),
        (4, EASY, "request e has its first token 3 steps after it came"),
        (5, {"blocks": 14}, "and with 13 request d is preempted in step 9"),
        (6, {"drafts": 4, "requests": COPIES}, "take 3 steps with drafts and 9 without"),
    ],
)
def test_a_solution_is_right(number: int, change: Change, sentence: str, again: Again) -> None:
    verdict = judged(number, change, again)
    assert verdict.right and sentence in verdict.sentence, verdict


@pytest.mark.parametrize(
    ("number", "change", "sentence"),
    [
        (1, {"budget": 1}, "The run took 9 steps, 4 for the prompt"),
        (1, {"requests": prompts_of(1, 1, tokens=7)}, "number of tokens of request a is 7, and has to stay 6"),
        (1, {"requests": prompts_of(1, 1, prompt="the cat")}, "The prompt of request a is 'the cat', and has to stay"),
        (2, {"policy": "fcfs"}, "wastes 68 cells: expected at most 19 cells; a step that takes a prompt beside"),
        (2, {"slots": 1}, "static takes 38 steps and wastes 0 cells: expected at most 25 steps"),
        (2, {"requests": prompts_of(2, 1)}, "There is 1 request; the lesson has 6."),
        (3, {"fault": ""}, "The fault is gone"),
        (3, {"requests": prompts_of(3, 1)}, "At least two requests"),
        (3, {"budget": 4}, "Request b has other logits, though the same tokens, than without the fault: in step 1"),
        (4, {"budget": 8}, "but request f has its first token 5 steps after it came, expected at most 3"),
        (4, {"budget": 8, "requests": prompts_of(4, 6, arrival=9)}, "The arrival of request a is 9, and has to stay 0"),
        (
            4,
            EASY | {"fault": "convolution-crosses-requests"},
            "fault is convolution-crosses-requests, and has to stay none",
        ),
        (5, {"blocks": 15}, "With 15 blocks nobody is preempted, but neither is with 14."),
        (5, {"blocks": 13}, "With 13 blocks request d is preempted in step 9."),
        (5, {"blocks": 14, "prefix_cache": "off"}, "prefix cache is off, and has to stay on"),
        (6, {"drafts": 4}, "take 17 steps with drafts and 19 without: expected at most 12 with drafts"),
        (6, {"drafts": 4, "requests": COPIES[:1]}, "There is 1 request, expected at least two"),
        (6, {"drafts": 4, "requests": (Asked("copy: red ->", 0, 2),) * 2}, "expected at least 6 without"),
    ],
)
def test_a_wrong_answer_is_told_what_was_seen(number: int, change: Change, sentence: str, again: Again) -> None:
    verdict = judged(number, change, again)
    assert not verdict.right and sentence in verdict.sentence, verdict


SOLUTIONS: dict[str, Change] = {
    "1": {"budget": 1},  # a wrong one, whose first steps need no token
    "2": {"policy": "waiting-served"},
    "3": {"slots": 1},
    "4": EASY,
    "5": {"blocks": 14},
    "6": {"drafts": 4, "requests": COPIES},
}


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=() if number in ("1", "3") else pytest.mark.slow) for number in LESSONS]
)
def test_an_answer_is_drawn_with_the_view_to_look_at(number: str) -> None:
    status, page = compute(link_of(replace(LESSONS[number].start, **SOLUTIONS[number])))
    assert status == 200
    assert f'<section id="{LESSONS[number].view}"' in page
    assert ("Not yet." if number == "1" else "Right.") in page


def test_the_smallest_pool_is_the_smallest_of_all(again: Again) -> None:
    """One fewer is checked; none of those below it is without a preemption either."""
    start = LESSONS["5"].start
    for blocks in range(1, 14):
        settings = replace(start, blocks=blocks)
        with contextlib.suppress(Problems):
            run = again(settings).run
            assert run is not None and any(step.preempted for step in run.steps), blocks


def test_a_run_that_was_stopped_is_no_answer(again: Again, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lfm2np.teaching.lab.run.MOST_STEPS", 20)
    long = tuple(Asked(f"copy: {name} red blue cat dog red blue cat dog red blue ->", 0, 48) for name in "abcdefgh")
    verdict = judged(6, {"drafts": 1, "requests": long, "slots": 1, "budget": 8, "blocks": 128}, again)
    assert not verdict.right and verdict.sentence.startswith("The run was stopped after 20 steps")


def test_a_lesson_is_on_its_page_with_its_verdict_and_a_view_that_is_there() -> None:
    lesson = LESSONS["1"]
    status, page = compute(link_of(lesson.start))
    assert status == 200 and "Not yet." not in page and lesson.hint.split("?")[0][:40] in page
    changed = replace(lesson.start, block_size=2 * lesson.start.block_size)
    assert "Not yet." in compute(link_of(changed))[1], "only what was tried is judged"
    assert f'<section id="{lesson.view}"' in page and f'href="#{lesson.view}"' in page


def test_every_lesson_has_a_short_text_and_names_a_view() -> None:
    _, page = compute(link_of(replace(LESSONS["3"].start, lesson="")))
    for lesson in LESSONS.values():
        assert 2 <= len(lesson.text) <= 4 and f'<section id="{lesson.view}"' in page
