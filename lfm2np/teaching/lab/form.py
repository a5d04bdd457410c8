"""The form of the laboratory: a GET that works without a script, every field with what was typed and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lfm2np.oracle.report.markup import Markup, element, raw
from lfm2np.teaching.drawings.page.view import cell
from lfm2np.teaching.lab.compute import Outcome
from lfm2np.teaching.lab.settings import (
    CHOICES,
    DEFAULT,
    MOST_CHARACTERS,
    MOST_REQUESTS,
    NAMES,
    NUMBERS,
    OWN,
    ROW_NUMBERS,
    Asked,
    Row,
    Typed,
    default_requests,
    setting_text,
)

Problem = Mapping[str, str]
LABELS = {
    "model": ("Model", "paper: ten words"),
    "policy": ("Policy", "who goes first"),
    "budget": ("Budget", "most tokens of a step"),
    "chunked": ("Chunks", "on: long prompts in pieces"),
    "slots": ("Slots", "requests that run at once"),
    "blocks": ("Blocks", "of the pool"),
    "block-size": ("Block size", "in tokens"),
    "prefix-cache": ("Prefix cache", "find equal prefixes"),
    "drafts": ("Drafts", "tokens guessed ahead; 0: none"),
    "fault": ("Break it", "a bug that engines had"),
}
END = "<|im_end|>"  # it ends an answer, and is no part of it
HEADS = ("prompt", "comes at step", "most new tokens", "answer")
ROW_LABELS = {"prompt": "Prompt", "arrival": "Step at which it comes", "tokens": "Most new tokens"}


def form(typed: Typed, problems: Problem, outcome: Outcome | None) -> Markup:
    model = typed.values.get("model", DEFAULT.model)
    rows = typed.rows or tuple(
        Row(default_request.prompt, str(default_request.arrival), str(default_request.max_tokens))
        for default_request in default_requests(model)
    )
    rows = (*rows, *(Row("", None, None) for _ in range(MOST_REQUESTS - len(rows))))
    heads = [*HEADS, "is it right?"] if outcome and outcome.settings.fault else [*HEADS]
    return element(
        "form",
        told_problem("", problems),
        kept_guesses(typed),
        element(
            "table",
            element("thead", element("tr", [element("td"), *(element("th", head, scope="col") for head in heads)])),
            element("tbody", [row_of(index, row, problems, outcome) for index, row in enumerate(rows)]),
            class_="requests",
        ),
        element(
            "details",
            element("summary", "Scheduler, memory, guesses, a bug"),
            element("div", [single_field(name, typed, problems) for name in LABELS], class_="fields"),
            class_="more-settings",
            open=any(name in problems or given(name, typed) != default(name) for name in LABELS),
        ),
        element("input", type="hidden", name="lesson", value=typed.values.get("lesson", "0")),
        told_problem("lesson", problems),
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


def kept_guesses(typed: Typed, but: str = "") -> list[Markup]:
    """What was guessed stays where another form is sent; a field that was left empty is no guess."""
    return [hidden(name, text) for name, text in typed.guesses.items() if text.strip() and name != but]


def hidden(name: str, text: str) -> Markup:
    return element("input", type="hidden", name=name, value=raw(text))


def row_of(index: int, row: Row, problems: Problem, outcome: Outcome | None) -> Markup:
    name = NAMES[index]
    swatch = element("svg", cell(1, 1, 16, 16, index, name), viewBox="0 0 18 18", class_="swatch", aria_hidden="true")
    defaults = {"arrival": Asked("").arrival, "tokens": Asked("").max_tokens}
    fields: list[Markup] = []
    for field, label in ROW_LABELS.items():
        identity, text = f"{field}-{index}", getattr(row, field)
        more: dict[str, object] = {"maxlength": 4 * MOST_CHARACTERS}
        if field != "prompt":
            _, least, most = ROW_NUMBERS[field]
            text = str(defaults[field]) if text is None else text
            more = {"inputmode": "numeric", "size": 3, "title": f"{least} to {most}"}
        more |= {"aria_label": f"{label}, request {name}", "spellcheck": "false"}
        control = text_input(identity, field, text, problems, **more)
        narrow = element("span", f"{HEADS[len(fields)]} ", class_="narrow", aria_hidden="true")
        fields.append(element("td", narrow, control, told_problem(identity, problems)))
    answers = [element("td", cell) for cell in answer_of(name, outcome)]
    return element(
        "tr", element("th", swatch, scope="row", aria_label=f"request {name}"), fields, answers, class_="asked"
    )


def answer_of(name: str, outcome: Outcome | None) -> Sequence[str]:
    """What the request said, and, of a broken run, what is other than it should be."""
    if outcome is None or outcome.run is None or NAMES.index(name) >= len(outcome.settings.requests):
        return [""]
    words = [outcome.run.word(token) for token in outcome.tokens.get(name, ())]
    said = (" " if outcome.settings.model == "paper" else "").join(word for word in words if word != END).strip()
    if not outcome.settings.fault:
        return [said]
    changed = outcome.changed[name]
    if changed.cut:
        return [said, "cut off, right so far"]
    told_ = "other tokens" if changed.tokens else "other logits" if changed.logits else "yes, bit for bit"
    return [said, told_]


def default(name: str) -> str:
    return setting_text(getattr(DEFAULT, OWN[name]))


def given(name: str, typed: Typed) -> str:
    return typed.values.get(name, default(name))


def single_field(name: str, typed: Typed, problems: Problem) -> Markup:
    label, about = LABELS[name]
    if name in NUMBERS:
        _, least, most = NUMBERS[name]
        more: dict[str, object] = {"inputmode": "numeric", "size": 4, "title": f"{least} to {most}"}
        control = text_input(name, name, given(name, typed), problems, **more)
    else:
        control = select(name, CHOICES[name][1], given(name, typed), problems)
    return element(
        "div",
        element("label", label, for_=name),
        control,
        element("small", about),
        told_problem(name, problems),
        class_="field",
    )


def select(name: str, known: Sequence[str], given: str, problems: Problem) -> Markup:
    """A value that is not known stays, as a choice of its own: it is what was typed."""
    choices = known if given in known else (given, *known)
    options = [
        element("option", choice or "nothing is broken", value=choice, selected=choice == given) for choice in choices
    ]
    return element("select", options, id=name, name=name, **marks(name, problems))


def text_input(identity: str, name: str, text: str, problems: Problem, **more: object) -> Markup:
    fields = {"type": "text", "id": identity, "name": name, "value": raw(text), "autocomplete": "off"}
    return element("input", **fields, **more, **marks(identity, problems))


def marks(identity: str, problems: Problem) -> dict[str, object]:
    if identity not in problems:
        return {}
    return {"aria_invalid": "true", "aria_describedby": f"problem-{identity}"}


def told_problem(identity: str, problems: Problem) -> Markup | None:
    if identity not in problems:
        return None
    return element("p", problems[identity], class_="problem", id=f"problem-{identity or 'form'}", role="alert")
