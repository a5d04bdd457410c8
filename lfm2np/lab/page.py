"""The page of the laboratory: the form with what was typed, what is wrong with it, and the views of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lfm2np.drawings.draw import Still, views_of
from lfm2np.drawings.page.markup import Markup, counted, element, joined, table, visible
from lfm2np.drawings.page.page import page
from lfm2np.drawings.page.view import View
from lfm2np.lab.checks import Verdict
from lfm2np.lab.compute import Outcome
from lfm2np.lab.lessons import LESSONS, Lesson
from lfm2np.lab.settings import (
    CHOICES,
    DEFAULT,
    MOST_CHARACTERS,
    MOST_REQUESTS,
    NAMES,
    NUMBERS,
    ON_OFF,
    ROW_NUMBERS,
    SWITCHES,
    Row,
    Typed,
    default_requests,
    query_of,
    told,
)

TITLE = "A laboratory of continuous batching"
LABELS = {
    "model": "Model",
    "policy": "Policy",
    "block-size": "Tokens of a block",
    "blocks": "Blocks",
    "budget": "Most tokens of a step (budget)",
    "slots": "Most requests of a step (slots)",
    "chunked": "Prompts may be cut into chunks",
    "prefix-cache": "Prefix cache",
    "drafts": "Drafts of a request in a step",
    "fault": "Fault",
}
ROW_LABELS = {"prompt": "Prompt", "arrival": "Comes at step", "tokens": "Most new tokens"}
Problem = Mapping[str, str]


def lab_page(
    typed: Typed, outcome: Outcome | None, problems: Problem, verdict: Verdict | None, beside: Still | None
) -> str:
    """Without an outcome there are no views; without problems `beside` is there."""
    lesson = LESSONS.get(lesson_of(typed))
    about = joined(
        [
            element("nav", lesson_links(), aria_label="Lessons"),
            lesson_text(lesson) if lesson else None,
            form(typed, problems),
            result(outcome) if outcome else None,
            verdict_text(verdict) if verdict else None,
        ]
    )
    return page(TITLE, about, views(outcome, beside) if outcome and beside else [])


def views(outcome: Outcome, beside: Still) -> list[View]:
    if outcome.run is None:
        return []
    found = views_of(outcome.run, beside, outcome.leaking)
    return [replace(view, title=f"{index}. {view.title}") for index, view in enumerate(found, start=1)]


# --- lessons


def lesson_of(typed: Typed) -> int:
    text = typed.values.get("lesson", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def lesson_links() -> Markup:
    links = [
        element("li", element("a", f"{one.number}. {one.title}", href=f"/?{query_of(one.start)}"))
        for one in LESSONS.values()
    ]
    return element("ul", element("li", element("a", "Free play", href="/")), links)


def lesson_text(lesson: Lesson) -> Markup:
    return element(
        "section",
        element("h2", f"Lesson {lesson.number}: {lesson.title}"),
        [element("p", text) for text in lesson.text],
        element("p", element("strong", lesson.question)),
        element("details", element("summary", "A hint"), element("p", lesson.hint)),
        element("p", element("a", "Look at this view", href=f"#{lesson.view}")),
        class_="lesson-text",
    )


def verdict_text(verdict: Verdict) -> Markup:
    word = "Right." if verdict.right else "Not yet."
    return element("p", element("strong", word), " ", verdict.sentence, class_="verdict", id="verdict")


# --- the form


def form(typed: Typed, problems: Problem) -> Markup:
    model = typed.values.get("model", DEFAULT.model)
    rows = typed.rows or tuple(
        Row(one.prompt, str(one.arrival), str(one.max_tokens)) for one in default_requests(model)
    )
    rows = (*rows, *(Row("", None, None) for _ in range(MOST_REQUESTS - len(rows))))
    return element(
        "form",
        [told_problem("", problems)],
        [row_fields(index, row, problems) for index, row in enumerate(rows)],
        [single_field(name, typed, problems) for name in LABELS],
        element("input", type="hidden", name="lesson", value=typed.values.get("lesson", "0")),
        told_problem("lesson", problems),
        element("button", "Run", type="submit"),
        method="get",
        action="/",
        id="settings",
    )


def row_fields(index: int, row: Row, problems: Problem) -> Markup:
    fields = []
    for name, label in ROW_LABELS.items():
        text = getattr(row, name)
        if name == "prompt":
            made = text_input(name, index, text, problems, maxlength=MOST_CHARACTERS, size=40)
        else:
            own, least, most = ROW_NUMBERS[name]
            default = {"arrival": 0, "max_tokens": 8}[own]
            given = str(default) if text is None else text
            made = text_input(name, index, given, problems, inputmode="numeric", size=3, title=f"{least} to {most}")
        identity = f"{name}-{index}"
        fields.append([element("label", label, for_=identity), made, told_problem(identity, problems)])
    return element("fieldset", element("legend", f"Request {NAMES[index]}"), fields)


def text_input(name: str, index: int, text: str, problems: Problem, **more: object) -> Markup:
    identity = f"{name}-{index}"
    return element("input", type="text", id=identity, name=name, value=text, **more, **marks(identity, problems))


def single_field(name: str, typed: Typed, problems: Problem) -> Markup:
    if name in NUMBERS:
        own, least, most = NUMBERS[name]
        given = typed.values.get(name, str(getattr(DEFAULT, own)))
        made = element(
            "input",
            type="text",
            inputmode="numeric",
            size=4,
            id=name,
            name=name,
            value=given,
            title=f"{least} to {most}",
            **marks(name, problems),
        )
    else:
        own, known = CHOICES.get(name) or (SWITCHES[name], ON_OFF)
        given = typed.values.get(name, told(getattr(DEFAULT, own)))
        made = select(name, known, given, problems)
    return element("p", element("label", LABELS[name], for_=name), " ", made, told_problem(name, problems))


def select(name: str, known: Sequence[str], given: str, problems: Problem) -> Markup:
    """A value that is not known stays, as a choice of its own: it is what was typed."""
    choices = known if given in known else (given, *known)
    options = [element("option", one or "none", value=one, selected=one == given) for one in choices]
    return element("select", options, id=name, name=name, **marks(name, problems))


def marks(identity: str, problems: Problem) -> dict[str, object]:
    if identity not in problems:
        return {}
    return {"aria_invalid": "true", "aria_describedby": f"problem-{identity}"}


def told_problem(identity: str, problems: Problem) -> Markup | None:
    if identity not in problems:
        return None
    return element("p", problems[identity], class_="problem", id=f"problem-{identity or 'form'}", role="alert")


# --- the result


def result(outcome: Outcome) -> Markup:
    parts: list[object] = []
    if outcome.counts:
        counts = outcome.counts
        parts.append(
            element(
                "p",
                f"{counted(counts.steps, 'step')}, {counted(counts.rows, 'row')} computed, "
                f"{counted(counts.preemptions, 'preemption')}, {counted(counts.prefix_hit_tokens, 'token')} from the "
                f"prefix cache; as rectangles {counted(counts.wasted, 'cell')} would be wasted, "
                f"{counts.wasted_static:,} under static.",
            )
        )
    if outcome.stopped and not outcome.settings.fault:  # else it stands at the fault
        parts.append(element("p", outcome.stopped, class_="problem", id="problem-run"))
    if outcome.run is not None:
        parts.append(answers_table(outcome))
    return element("section", parts, id="result", aria_label="Result")


def answers_table(outcome: Outcome) -> Markup:
    run = outcome.run
    assert run is not None
    rows = []
    for index, asked in enumerate(outcome.settings.requests):
        name = NAMES[index]
        words = [run.word(token) for token in outcome.tokens.get(name, ())]
        rows.append([name, visible(asked.prompt), visible(joined_words(words, outcome)), compared(outcome, name)])
    return table("What each request said", ["request", "prompt", "answer", "with the fault"], rows)


def joined_words(words: Sequence[str], outcome: Outcome) -> str:
    return (" " if outcome.settings.model == "paper" else "").join(words)


def compared(outcome: Outcome, name: str) -> str:
    if name not in outcome.changed:
        return "no fault"
    changed = outcome.changed[name]
    if changed.tokens:
        return "other tokens"
    return "other logits, the same tokens" if changed.logits else "nothing changed"
