"""Each lesson is failed by what it starts from, passed by a solution, and says what it saw where an answer is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import lessons as solutions  # fixtures/lessons.py
import pytest

from lfm2np.teaching.lab import lessons
from lfm2np.teaching.lab.lessons import LESSONS, Again
from lfm2np.teaching.lab.page import compute
from lfm2np.teaching.lab.run import Verdict
from lfm2np.teaching.lab.settings import Asked, Problems, link_of

pytestmark = pytest.mark.slow

Change = Mapping[str, Any]
COPIES = (Asked("copy: tivu zo sa ->", 0, 8), Asked("copy: zo sa zo sa zo sa zo sa ->", 0, 24))
EASY = {"budget": 8, "policy": "prefill-first", "slots": 6}
CROSSING = "convolution-crosses-requests"


@pytest.fixture(scope="module")
def again() -> Again:
    """Runs without drawings, each once."""
    return cache(lessons.again)


def judged(number: int, change: Change, again: Again) -> Verdict:
    lesson = LESSONS[str(number)]
    settings = replace(lesson.start, **change)
    return lesson.check(again(settings), again)


def prompts_of(number: int, count: int, **change: Any) -> tuple[Asked, ...]:
    return tuple(replace(asked, **change) for asked in LESSONS[str(number)].start.requests[:count])


APART = tuple(replace(asked, arrival=20 * index) for index, asked in enumerate(prompts_of(3, 2)))
RIGHT = [
    (1, {"budget": 2}, "chunks of 2 and 2 rows"),
    (1, {"budget": 3}, "chunks of 3 and 1 rows"),
    (2, {"policy": "waiting-served"}, "23 steps and wastes 4 cells"),
    (3, {"slots": 1}, "would never find the bug"),
    (3, {"requests": APART}, "never find"),
    (4, EASY, "request e has its first token 3 steps after it came"),
    (5, {"blocks": 14}, "and with 13 request d is preempted in step 9"),
    (6, {"drafts": 4, "requests": COPIES}, "take 3 steps with drafts and 9 without"),
]
WRONG = [  # {}: what the lesson starts from
    (1, {}, "The run took 6 steps, 1 for the prompt and 5 for decodes; expected 7 steps."),
    (1, {"budget": 1}, "The run took 9 steps, 4 for the prompt"),
    (1, {"requests": prompts_of(1, 1, tokens=7)}, "number of tokens of request a is 7, and has to stay 6"),
    (1, {"requests": prompts_of(1, 1, prompt="the cat")}, "The prompt of request a is 'the cat', and has to stay"),
    (2, {}, "static takes 25 steps and wastes 57 cells: expected at most 19 cells"),
    (2, {"policy": "fcfs"}, "wastes 68 cells: expected at most 19 cells; a step that takes a prompt beside"),
    (2, {"slots": 1}, "static takes 38 steps and wastes 0 cells: expected at most 25 steps"),
    (2, {"requests": prompts_of(2, 1)}, "There is 1 request; the lesson has 6."),
    (3, {}, "Request b has other logits, though the same tokens, than without the fault: in step 0 it begins behind "),
    (3, {"fault": ""}, "The fault is gone"),
    (3, {"requests": prompts_of(3, 1)}, "At least two requests"),
    (3, {"budget": 4}, "Request b has other logits, though the same tokens, than without the fault: in step 1"),
    (4, {}, "Step 3 has 20 rows, expected at most 8."),
    (4, {"budget": 8}, "but request f has its first token 5 steps after it came, expected at most 3"),
    (4, {"budget": 8, "requests": prompts_of(4, 6, arrival=9)}, "The arrival of request a is 9, and has to stay 0"),
    (4, EASY | {"fault": CROSSING}, f"fault is {CROSSING}, and has to stay none"),
    (5, {}, "With 9 blocks request c is preempted in step 4."),
    (5, {"blocks": 15}, "With 15 blocks nobody is preempted, but neither is with 14."),
    (5, {"blocks": 13}, "With 13 blocks request d is preempted in step 9."),
    (5, {"blocks": 14, "prefix_cache": "off"}, "prefix cache is off, and has to stay on"),
    (6, {}, "There are no drafts"),
    (6, {"drafts": 4}, "take 17 steps with drafts and 19 without: expected at most 12 with drafts"),
    (6, {"drafts": 4, "requests": COPIES[:1]}, "There is 1 request, expected at least two"),
    (6, {"drafts": 4, "requests": (Asked("copy: red ->", 0, 2),) * 2}, "expected at least 6 without"),
]


@pytest.mark.parametrize(
    ("number", "change", "right", "sentence"),
    [(*row[:2], right, row[2]) for rows, right in ((RIGHT, True), (WRONG, False)) for row in rows],
)
def test_an_answer_is_judged_by_what_was_seen(
    number: int, change: Change, right: bool, sentence: str, again: Again
) -> None:
    verdict = judged(number, change, again)
    assert verdict.right == right and sentence in verdict.sentence, verdict


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
    settings = replace(LESSONS["6"].start, drafts=1, requests=long, slots=1, budget=8, blocks=128)
    outcome = again(settings)
    assert outcome.run is not None and len(outcome.run.steps) == 20
    verdict = LESSONS["6"].check(outcome, again)
    assert not verdict.right and verdict.sentence.startswith("The run was stopped after 20 steps")


def test_a_lesson_is_on_its_page_with_a_short_text_its_view_and_the_verdict_on_what_was_tried() -> None:
    _, page = compute(link_of(replace(LESSONS["3"].start, lesson="")))
    for lesson in LESSONS.values():
        assert 2 <= len(lesson.text) <= 4 and f'<section id="{lesson.view}"' in page
    lesson = LESSONS["1"]
    tried: list[tuple[dict[str, Any], str]] = [({}, ""), ({"block_size": 4}, "Not yet."), ({"budget": 2}, "Right.")]
    for change, said in tried:
        status, page = compute(link_of(replace(lesson.start, **change)))
        assert status == 200 and lesson.hint.split("?")[0][:40] in page and f'href="#{lesson.view}"' in page
        assert [word for word in ("Not yet.", "Right.") if word in page] == ([said] if said else [])


def test_the_teachers_page_has_each_right_answer_as_the_engine_judges_it(again: Again) -> None:
    text = (Path(__file__).parents[3] / "docs" / "learn" / "laboratory.md").read_text(encoding="utf-8")
    written = text.partition(solutions.FIRST)[2].partition(solutions.LAST)[0].strip("\n")
    assert written == solutions.right_answers(again), "python fixtures/lessons.py --write"
