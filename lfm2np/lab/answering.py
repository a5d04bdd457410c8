"""From a link to a page: all that happens in the child process, as a function."""

from __future__ import annotations

from urllib.parse import parse_qsl

from lfm2np.lab.checks import Again
from lfm2np.lab.compute import Outcome, compute, compute_plainly
from lfm2np.lab.lessons import LESSONS
from lfm2np.lab.models import Models, fitting_problems, understand
from lfm2np.lab.page import lab_page
from lfm2np.lab.settings import Problems, Settings, query_of, typed_of


def answer(query: str, models: Models) -> tuple[int, str]:
    """The status and the page: 400 where the link says what can't be."""
    pairs = parse_qsl(query, keep_blank_values=True)  # bytes that are no UTF-8 become U+FFFD
    if len(pairs) == 1 and pairs[0][0] == "lesson" and pairs[0][1] in {str(number) for number in LESSONS}:
        pairs = parse_qsl(query_of(LESSONS[int(pairs[0][1])].start))
    typed = typed_of(pairs)
    try:
        settings = understand(pairs, models)
    except Problems as problem:
        return 400, lab_page(typed, None, problem.fields, None, None)

    outcome = compute(settings, models)
    problems = {"fault": outcome.stopped} if outcome.stopped and settings.fault else {}
    lesson = LESSONS.get(settings.lesson)
    verdict = lesson.check(settings, outcome, again_with(models)) if lesson else None
    return 200, lab_page(typed, outcome, problems, verdict, models.still)


def again_with(models: Models) -> Again:
    def again(settings: Settings) -> Outcome:
        problems = fitting_problems(settings, models)
        if problems:
            raise Problems(problems)
        return compute_plainly(settings, models)

    return again
