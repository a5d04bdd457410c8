"""The page of the laboratory: a lesson, the form with what was typed and what came of it, and the views of the run.

The form is a GET that works without a script, every field with what was typed and what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from lfm2np.oracle.report.markup import Markup, counted, element, joined, raw
from lfm2np.teaching.drawings.all_views import views_of
from lfm2np.teaching.drawings.demo import paper
from lfm2np.teaching.drawings.page.run_page import Panel, page
from lfm2np.teaching.drawings.page.view import View, cell
from lfm2np.teaching.drawings.runs.derive import prefix_hit_tokens
from lfm2np.teaching.drawings.views.ragged import ragged
from lfm2np.teaching.lab.lessons import LESSONS, Lesson
from lfm2np.teaching.lab.run import Outcome, Verdict, leaking_step, play, require_fits
from lfm2np.teaching.lab.settings import (
    DEFAULT,
    FIELDS,
    MOST_CHARACTERS,
    NAMES,
    OF_ROWS,
    TEACHING_FAULTS,
    Asked,
    Field,
    Problems,
    Typed,
    link_of,
    read_link,
    rows_of,
    settings_of,
)

TITLE = "A laboratory of continuous batching"
INTRODUCTION = (
    "Change prompts, scheduler, memory, or break the engine; press Run. A real LFM2 engine computes the run in exact "
    "arithmetic, and the views below draw what it did. New here? Begin with lesson 1."
)
ABOUT = (
    "Every number comes from the engine, which ran on this machine just now, in exact arithmetic: the same link gives "
    "the same page again, here and anywhere. Arrow keys step the run of the view in sight.",
    "The trained model solves small tasks (copy, add, sort, count, recall). The paper model, of which the worksheet "
    "is, has ten words and whole numbers as weights.",
)
CHANGED = {"": "yes, bit for bit", "tokens": "other tokens", "logits": "other logits", "cut": "cut off, right so far"}
END = "<|im_end|>"  # it ends an answer, and is no part of it
SOURCES = "connect-src 'self'; form-action 'self'; img-src data:"
Wrong = Mapping[str, str]  # by field, what can't be


@dataclass(frozen=True)
class Host:
    """What computes the pages: a server of this machine, or the browser itself (lab/static).

    scripts     files beside this one: what asks the host for a run, and begins the page
    above       stands before the laboratory
    constants   JavaScript before the scripts
    sources     directives of the page's policy beside those of every page
    """

    scripts: Sequence[str]
    above: Markup | None = None
    constants: str = ""
    sources: str = SOURCES


SERVER = Host(("lab.js", "server.js"))


def compute(link: str, host: Host = SERVER) -> tuple[int, str]:
    """The status and the page of a link, which are the same whenever it is asked: 400 where it says what can't be.

    A lesson alone is a link to where the lesson starts.
    """
    typed = typed_of(link)
    try:
        settings = settings_of(typed)
        require_fits(settings)
    except Problems as problem:
        return 400, lab_page(typed, None, problem.fields, host=host)
    outcome = play(settings, is_detailed=True)
    problems = {"fault": outcome.stopped} if outcome.stopped and settings.fault else {}
    lesson = LESSONS.get(settings.lesson)
    if lesson is None:
        return 200, lab_page(typed, outcome, problems, host=host)
    return 200, lab_page(typed, outcome, problems, lesson.check(outcome), host)


def typed_of(link: str) -> Typed:
    typed = read_link(link)
    lesson = LESSONS.get(typed.values.get("lesson", ""))
    is_alone = not typed.has_rows and typed.values.keys() == {"lesson"}
    return read_link(link_of(lesson.start)) if lesson and is_alone else typed


def lab_page(
    typed: Typed,
    outcome: Outcome | None,
    problems: Wrong,
    verdict: Verdict | None = None,
    host: Host = SERVER,
) -> str:
    """Without an outcome there are no views."""
    lesson, run = LESSONS.get(typed.values.get("lesson", "")), outcome.run if outcome else None
    untouched = outcome is not None and outcome.settings in (lesson.start if lesson else None, DEFAULT)
    above = element(
        "section",
        host.above,
        element("p", INTRODUCTION) if lesson is None else None,
        lesson_links(lesson),
        lesson_text(lesson, run is not None) if lesson else None,
        verdict_text(verdict) if verdict and not untouched else None,
        element(
            "details",
            element("summary", summary(outcome)),
            form(typed, problems, outcome),
            class_="settings",
            open=bool(problems) or run is None or untouched,
        ),
        said({"run": outcome.stopped}, "run") if outcome and outcome.stopped and not problems else None,
        result(outcome) if outcome else None,
        class_="lab",
        aria_label="Laboratory",
    )
    folder = resources.files("lfm2np.teaching.lab")
    script = host.constants + "".join((folder / name).read_text(encoding="utf-8") for name in host.scripts)
    about = joined([element("p", text) for text in ABOUT])
    return page(TITLE, about, views(outcome), Panel(above, script, host.sources), lesson.view if lesson else "")


def views(outcome: Outcome | None) -> list[View]:
    """As on the page of `draw`."""
    if outcome is None or outcome.run is None:
        return []
    whose = "A step of these requests, without prefix cache and drafts"
    leaks = ragged(outcome.run, leaking_step(outcome.settings), whose, outcome.settings.fault)
    return views_of(outcome.run, paper(), leaks)


# --- the lesson


def lesson_links(chosen: Lesson | None) -> Markup:
    links = [("Free play", "./", chosen is None)]
    links += [
        (f"Lesson {lesson.number}: {lesson.title}", f"?{link_of(lesson.start)}", lesson is chosen)
        for lesson in LESSONS.values()
    ]
    items = [
        element("li", element("a", text, href=link, aria_current="page" if here else None))
        for text, link, here in links
    ]
    return element("nav", element("ul", items, role="list"), aria_label="Lessons", class_="lessons")


def lesson_text(lesson: Lesson, is_drawn: bool) -> Markup:
    return element(
        "section",
        element("h2", f"Lesson {lesson.number}: {lesson.title}"),
        [element("p", text) for text in lesson.text],
        element("p", element("strong", "Exercise. "), lesson.question, class_="question"),
        element(
            "p",
            "Change the settings below and run: the engine says whether it is so. ",
            [element("a", "The view to look at", href=f"#{lesson.view}"), "."] if is_drawn else None,
        ),
        element("details", element("summary", "A hint"), element("p", lesson.hint)),
        class_="lesson-text",
    )


def verdict_text(verdict: Verdict) -> Markup:
    word = element("strong", "Right. " if verdict.right else "Not yet. ")
    kind = "right" if verdict.right else "wrong"
    return element("p", word, verdict.sentence, class_=f"verdict {kind}", id="verdict", role="status")


# --- the form


def form(typed: Typed, problems: Wrong, outcome: Outcome | None) -> Markup:
    rows = [*typed.rows, *rows_of([Asked("")] * (len(NAMES) - len(typed.rows)))]
    heads = [*(field.about for field in OF_ROWS), "answer"]
    heads += ["is it right?"] if outcome and outcome.settings.fault else []
    single = [field for field in FIELDS if field.name != "lesson"]
    is_open = any(field.name in problems or given(field, typed) != given(field, None) for field in single)
    return element(
        "form",
        said(problems, ""),
        element(
            "table",
            element("thead", element("tr", element("td"), [element("th", head, scope="col") for head in heads])),
            element("tbody", [row_of(index, row, problems, outcome) for index, row in enumerate(rows)]),
            class_="requests",
        ),
        element(
            "details",
            element("summary", "Scheduler, memory, drafts, a bug"),
            element("div", [single_field(field, given(field, typed), problems) for field in single], class_="fields"),
            class_="more-settings",
            open=is_open,
        ),
        element("input", type="hidden", name="lesson", value=raw(typed.values.get("lesson", ""))),
        said(problems, "lesson"),
        element(
            "p",
            element("button", "Run", type="submit", class_="run"),
            " ",
            element("button", "Another request", type="button", class_="more needs-script", hidden=True),
            " ",
            element("output", class_="state", aria_live="polite"),
        ),
        method="get",
        action="./",
        id="settings",
    )


def given(field: Field, typed: Typed | None) -> str:
    """As it was typed, else the default."""
    default = str(getattr(DEFAULT, field.name))
    return typed.values.get(field.name, default) if typed else default


def row_of(index: int, row: Sequence[str], problems: Wrong, outcome: Outcome | None) -> Markup:
    name = NAMES[index]
    swatch = element("svg", cell(1, 1, 16, 16, index, name), viewBox="0 0 18 18", class_="swatch", aria_hidden="true")
    cells = []
    for field, text in zip(OF_ROWS, row, strict=True):
        identity = f"{field.name}-{index}"
        more: dict[str, object] = numeric(field) if field.may else {"maxlength": 4 * MOST_CHARACTERS}
        more |= {"aria_label": f"{field.label}, request {name}", "spellcheck": "false"}
        narrow = element("span", f"{field.about} ", class_="narrow", aria_hidden="true")
        control = text_input(identity, field.name, text, problems, **more)
        cells.append(element("td", narrow, control, said(problems, identity)))
    cells += [element("td", text) for text in answer_of(name, outcome)]
    return element("tr", element("th", swatch, scope="row", aria_label=f"request {name}"), cells, class_="asked")


def answer_of(name: str, outcome: Outcome | None) -> Sequence[str]:
    """What the request said, and, of a broken run, what is other than it should be."""
    if outcome is None or outcome.run is None or name not in outcome.names:
        return [""]
    words = [outcome.run.word(token) for token in outcome.tokens.get(name, ())]
    answer = (" " if outcome.settings.model == "paper" else "").join(word for word in words if word != END).strip()
    return [answer, CHANGED[outcome.changed[name]]] if outcome.changed else [answer]


def single_field(field: Field, text: str, problems: Wrong) -> Markup:
    """Of choices; a value that is not known stays, as a choice of its own: it is what was typed."""
    name = field.name
    if isinstance(field.may, range):
        control = text_input(name, name, text, problems, **numeric(field))
    else:
        options = [
            element("option", choice or "nothing is broken", value=choice, selected=choice == text)
            for choice in (field.may if text in field.may else (text, *field.may))
        ]
        control = element("select", options, id=name, name=name, **marks(name, problems))
    label, about = element("label", field.label, for_=name), element("small", field.about)
    return element("div", label, control, about, said(problems, name), class_="field")


def numeric(field: Field) -> dict[str, object]:
    return {"inputmode": "numeric", "size": 3, "title": f"{field.may[0]} to {field.may[-1]}"}


def text_input(identity: str, name: str, text: str, problems: Wrong, **more: object) -> Markup:
    fields = {"type": "text", "id": identity, "name": name, "value": raw(text), "autocomplete": "off"}
    return element("input", **fields, **more, **marks(identity, problems))


def marks(identity: str, problems: Wrong) -> dict[str, object]:
    return {"aria_invalid": "true", "aria_describedby": f"problem-{identity}"} if identity in problems else {}


def said(problems: Wrong, identity: str) -> Markup | None:
    if identity not in problems:
        return None
    return element("p", problems[identity], class_="problem", id=f"problem-{identity or 'form'}", role="alert")


# --- the result


def summary(outcome: Outcome | None) -> str:
    """The run in a line, so that the form can stay closed."""
    if outcome is None:
        return "The run"
    settings = outcome.settings
    budget = f"a budget of {counted(settings.budget, 'token')}" if settings.chunked == "on" else "prompts whole"
    drafts = f", {counted(settings.drafts, 'draft')}" if settings.drafts else ""
    cache = "" if settings.prefix_cache == "on" else ", no prefix cache"
    fault = f", broken: {settings.fault}" if settings.fault else ""
    blocks = f"{settings.blocks} blocks of {settings.block_size}"
    return (
        f"The run: {counted(len(settings.requests), 'request')}, {settings.policy}, {blocks}, {budget}, "
        f"{counted(settings.slots, 'slot')}{drafts}{cache}{fault}"
    )


def result(outcome: Outcome) -> Markup:
    parts: list[Markup] = []
    if outcome.run:
        steps = outcome.run.steps
        idle = sum(not step.entries for step in steps)
        figures = (
            (len(steps), "step", f", {idle} of them idle" if idle else ""),
            (sum(step.num_tokens for step in steps), "row", " computed"),
            (sum(len(step.preempted) for step in steps), "preemption", ""),
            (prefix_hit_tokens(outcome.run), "token", " from the prefix cache"),
            (outcome.wasted, "cell", " of padding, were each step a rectangle"),
        )
        items = [element("li", element("strong", counted(count, noun)), more) for count, noun, more in figures]
        parts.append(element("ul", items))
    if outcome.settings.fault:
        broken = element("strong", "Broken: ", class_="changed")
        parts.append(element("p", broken, TEACHING_FAULTS[outcome.settings.fault]))
    return element("section", parts, id="result", aria_label="Result")
