"""The page of the laboratory: lessons, the form with what was typed and what came of it, and the views of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from urllib.parse import parse_qsl, urlencode

from lfm2np.oracle.report.markup import Markup, counted, element, joined
from lfm2np.teaching.drawings.all_views import views_of
from lfm2np.teaching.drawings.demo import Paper
from lfm2np.teaching.drawings.page.run_page import Panel, page
from lfm2np.teaching.drawings.page.view import View
from lfm2np.teaching.drawings.runs.recorded_run import Run
from lfm2np.teaching.drawings.views.ragged import ragged
from lfm2np.teaching.lab.compute import Outcome, compute
from lfm2np.teaching.lab.form import Problem, form, hidden, kept_guesses, text_input, told_problem
from lfm2np.teaching.lab.lessons import LESSONS, Lesson
from lfm2np.teaching.lab.models import Models, fitting_problems, understand
from lfm2np.teaching.lab.predictions import Again, Prediction, Unreadable, Verdict
from lfm2np.teaching.lab.settings import (
    DEFAULT,
    GUESSES,
    TEACHING_FAULTS,
    Problems,
    Settings,
    Typed,
    pairs_of,
    query_of,
    typed_of,
)

TITLE = "A laboratory of continuous batching"
INTRODUCTION = (
    "Change prompts, scheduler, memory, or break the engine; press Run. A real LFM2 engine computes the run in exact "
    "arithmetic, and the views below draw what it did. New here? Begin with lesson 1."
)
Judged = Mapping[str, Verdict | Unreadable]  # by the name of a guess
SOURCES = "connect-src 'self'; form-action 'self'; img-src data:"
FAILED, NO_MEMORY = 500, 507  # statuses of a reply


@dataclass(frozen=True)
class Host:
    """What computes the pages: a server, or the browser itself (lab/static).

    scripts     files beside this one: what asks the host for a run, and begins the page
    above       stands before the laboratory
    constants   JavaScript before the scripts
    sources     directives of the page's policy beside those of every page
    """

    scripts: tuple[str, ...]
    above: Markup | None = None
    constants: str = ""
    sources: str = SOURCES


SERVER = Host(("lab.js", "server.js"))


def lab_page(
    typed: Typed,
    outcome: Outcome | None,
    problems: Problem,
    verdict: Verdict | None,
    paper: Paper | None,
    judged: Judged | None = None,
    host: Host = SERVER,
) -> str:
    """Without an outcome there are no views and no judged guesses; without problems `paper` is there."""
    lesson = LESSONS.get(lesson_of(typed))
    run = outcome.run if outcome else None
    untouched = outcome is not None and outcome.settings in (lesson.start if lesson else None, DEFAULT)
    is_open = bool(problems) or run is None or untouched
    above = element(
        "section",
        host.above,
        element("p", INTRODUCTION) if lesson is None else None,
        lesson_links(lesson),
        lesson_text(lesson, typed, outcome, judged or {}) if lesson else None,
        verdict_text(verdict) if verdict and not untouched else None,
        element(
            "details",
            element("summary", summary(outcome)),
            form(typed, problems, outcome),
            class_="settings",
            open=is_open,
        ),
        told_problem("run", {"run": outcome.stopped}) if outcome and outcome.stopped and not problems else None,
        result(outcome) if outcome else None,
        class_="lab",
        aria_label="Laboratory",
    )
    script = host.constants + "".join(
        (resources.files("lfm2np.teaching.lab") / name).read_text(encoding="utf-8") for name in host.scripts
    )
    shown = views(outcome, run, paper) if outcome and run and paper else []
    return page(TITLE, about(), shown, Panel(above, script, host.sources), lesson.view if lesson else "")


def views(outcome: Outcome, run: Run, paper: Paper) -> list[View]:
    """As on the page of `draw`."""
    whose = "A step of these requests, without prefix cache and drafts"
    return views_of(run, paper, ragged(run, outcome.leaking, whose, outcome.settings.fault))


def about() -> Markup:
    return joined(
        element(
            "p",
            "Every number comes from the engine, which ran on this machine just now, in exact arithmetic: the same "
            "link gives the same page again, here and anywhere. Arrow keys step the run of the view in sight.",
        ),
        element(
            "p",
            "The trained model solves small tasks (copy, add, sort, count, recall). The paper model, of which the "
            "worksheet is, has ten words and whole numbers as weights.",
        ),
    )


# --- lessons


def lesson_of(typed: Typed) -> int:
    text = typed.values.get("lesson", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def lesson_links(chosen: Lesson | None) -> Markup:
    links = [("Free play", "./", chosen is None)]
    links += [
        (f"Lesson {lesson.number}: {lesson.title}", f"?{query_of(lesson.start)}", lesson is chosen)
        for lesson in LESSONS.values()
    ]
    items = [
        element("li", element("a", text, href=link, aria_current="page" if here else None))
        for text, link, here in links
    ]
    return element("nav", element("ul", items, role="list"), aria_label="Lessons", class_="lessons")


def lesson_text(lesson: Lesson, typed: Typed, outcome: Outcome | None, judged: Judged) -> Markup:
    is_drawn = outcome is not None and outcome.run is not None
    predictions = zip(GUESSES, lesson.predictions, strict=True)
    return element(
        "section",
        element("h2", f"Lesson {lesson.number}: {lesson.title}"),
        [element("p", text) for text in lesson.text],
        [
            exercise(number, name, prediction, typed, outcome, judged.get(name))
            for number, (name, prediction) in enumerate(predictions, start=1)
        ],
        element("p", element("strong", f"Exercise {len(GUESSES) + 1}. "), lesson.question, class_="question"),
        element(
            "p",
            "Change the settings below and run: the engine says whether it is so. ",
            [element("a", "The view to look at", href=f"#{lesson.view}"), "."] if is_drawn else None,
        ),
        element("details", element("summary", "A hint"), element("p", lesson.hint)),
        class_="lesson-text",
    )


def exercise(
    number: int,
    name: str,
    prediction: Prediction,
    typed: Typed,
    outcome: Outcome | None,
    judged: Verdict | Unreadable | None,
) -> Markup:
    """A form of its own, which sends the settings of this page again, and last the guess."""
    wrong = {name: str(judged)} if isinstance(judged, Unreadable) else {}
    verdict = judged if isinstance(judged, Verdict) else None
    kind = "letters, or none" if prediction.of_requests else "a number"
    more = {"inputmode": None if prediction.of_requests else "numeric", "size": 8, "maxlength": 40}
    more |= {"autofocus": judged is not None and typed.checked == name}  # what came of it is where the keyboard goes on
    if name not in wrong:  # else the problem describes it
        more |= {"aria_describedby": f"question-{name}{f' verdict-{name}' if verdict else ''}"}
    return element(
        "form",
        [hidden(field, text) for field, text in pairs_of(typed)],
        kept_guesses(typed, but=name),
        element("p", element("strong", f"Exercise {number}. "), prediction.question, id=f"question-{name}"),
        element(
            "p",
            [element("label", f"Your guess ({kind})", for_=name), " "],
            [text_input(name, name, typed.guesses.get(name, ""), wrong, **more), " "],
            element("button", "Check", type="submit"),
            class_="question",
        ),
        told_problem(name, wrong),
        verdict_text(verdict, f"verdict-{name}") if verdict else None,
        seen_run(number, verdict, prediction, typed, outcome.settings) if verdict and outcome else None,
        method="get",
        action="./",
        class_="exercise",
        aria_label=f"Exercise {number}",
    )


def seen_run(number: int, verdict: Verdict, prediction: Prediction, typed: Typed, settings: Settings) -> Markup | None:
    """The way to the run that was asked about, unless it is the one on this page: it shows the answer."""
    changed = prediction.change(settings)
    if changed == settings:
        return None
    guesses = {name: text for name, text in typed.guesses.items() if text.strip()}
    link = f"?{urlencode(guesses)}&{query_of(changed)}"  # none of them last: nothing is checked by going there
    words = f"See the run that exercise {number} is about"
    return element(
        "p",
        "Guess again. " if not verdict.right else None,
        element("a", words, href=link),
        None if verdict.right else " (it shows the answer)",
    )


def verdict_text(verdict: Verdict, identity: str = "verdict") -> Markup:
    word = element("strong", "Right. " if verdict.right else "Not yet. ")
    kind = "right" if verdict.right else "wrong"
    return element("p", word, verdict.sentence, class_=f"verdict {kind}", id=identity, role="status")


# --- the result


def summary(outcome: Outcome | None) -> str:
    """The run in a line, so that the form can stay closed."""
    if outcome is None:
        return "The run"
    settings = outcome.settings
    budget = f"a budget of {counted(settings.budget, 'token')}" if settings.chunked else "prompts whole"
    drafts = f", {counted(settings.drafts, 'draft')}" if settings.drafts else ""
    cache = "" if settings.prefix_caching else ", no prefix cache"
    fault = f", broken: {settings.fault}" if settings.fault else ""
    blocks = f"{settings.num_blocks} blocks of {settings.block_size}"
    return (
        f"The run: {counted(len(settings.requests), 'request')}, {settings.policy}, {blocks}, {budget}, "
        f"{counted(settings.slots, 'slot')}{drafts}{cache}{fault}"
    )


def result(outcome: Outcome) -> Markup:
    parts: list[object] = []
    if outcome.counts:
        counts = outcome.counts
        figures = (
            (counts.steps, "step", f", {counts.idle} of them idle" if counts.idle else ""),
            (counts.rows, "row", " computed"),
            (counts.preemptions, "preemption", ""),
            (counts.prefix_hit_tokens, "token", " from the prefix cache"),
            (counts.wasted, "cell", " of padding, were each step a rectangle"),
        )
        parts.append(
            element(
                "ul", [element("li", element("strong", counted(count, noun)), more) for count, noun, more in figures]
            )
        )
    if outcome.settings.fault:
        parts.append(
            element("p", element("strong", "Broken: ", class_="changed"), TEACHING_FAULTS[outcome.settings.fault])
        )
    return element("section", parts, id="result", aria_label="Result")


# --- from a link to a page


def reply(query: str, models: Models, host: Host = SERVER) -> tuple[int, str]:
    """The answer; or a status beyond it and a sentence, where the run fails."""
    try:
        return answer(query, models, host)
    except MemoryError:
        return NO_MEMORY, "the run needed more memory than it may have"
    except Exception as problem:
        return FAILED, f"{type(problem).__name__}: a defect of the laboratory"


def answer(query: str, models: Models, host: Host = SERVER) -> tuple[int, str]:
    """The status and the page: 400 where the link says what can't be."""
    pairs = read_link(query)
    typed = typed_of(pairs)
    try:
        settings = understand(pairs, models)
    except Problems as problem:
        return 400, lab_page(typed, None, problem.fields, None, None, host=host)

    outcome = compute(settings, models)
    problems = {"fault": outcome.stopped} if outcome.stopped and settings.fault else {}
    lesson = LESSONS.get(settings.lesson)
    verdict = lesson.check(settings, outcome, again_with(models)) if lesson else None
    judged = judge_guesses(lesson, typed, outcome, again_with(models)) if lesson else {}
    return 200, lab_page(typed, outcome, problems, verdict, models.paper, judged, host)


def read_link(query: str) -> list[tuple[str, str]]:
    """The fields of a link; a lesson and its guesses alone are a link to where the lesson starts."""
    pairs = parse_qsl(query, keep_blank_values=True)  # bytes that are no UTF-8 become U+FFFD
    guesses = [pair for pair in pairs if pair[0] in GUESSES]
    for number, lesson in LESSONS.items():
        if [pair for pair in pairs if pair not in guesses] == [("lesson", str(number))]:
            return parse_qsl(query_of(lesson.start), keep_blank_values=True) + guesses
    return pairs


def judge_guesses(lesson: Lesson, typed: Typed, outcome: Outcome, again: Again) -> Judged:
    """Runs only what was guessed about. What is no guess is said at its field, and costs no run."""
    judged: dict[str, Verdict | Unreadable] = {}
    for name, prediction in zip(GUESSES, lesson.predictions, strict=True):
        if name in typed.guesses:
            try:
                judged[name] = prediction.judge(typed.guesses[name], outcome, again)
            except Unreadable as unreadable:
                judged[name] = unreadable
    return judged


def again_with(models: Models) -> Again:
    def again(settings: Settings) -> Outcome:
        problems = fitting_problems(settings, models)
        if problems:
            raise Problems(problems)
        return compute(settings, models, is_drawn=False)

    return again
