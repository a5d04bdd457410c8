"""What a learner may choose: one table, from which the link, the form and what is refused are made.

Every setting is in the query of a GET, so the same link is the same run. What a link leaves out has its default.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from lfm2np.errors import Lfm2npError
from lfm2np.oracle.report.markup import counted
from lfm2np.values import show
from scheduler import POLICIES

NAMES = "abcdefgh"  # of the requests, in order: as many as there may be
MOST_CHARACTERS = 200  # of a prompt
MOST_FIELDS = 64  # of a link; a form has fewer
ON_OFF = ("on", "off")

WORDS: Mapping[str, Any] = tomllib.loads((resources.files(__package__) / "lessons.toml").read_text(encoding="utf-8"))
# What each fault does, for someone who has read the first lessons. The catalogue has more.
TEACHING_FAULTS: Mapping[str, str] = WORDS["faults"]


class Field(NamedTuple):
    """A setting: its name in a link, in Settings and in the form; what it may be; its words in the form."""

    name: str
    may: range | tuple[str, ...]
    label: str
    about: str = ""

    def problem(self, text: str) -> str:
        """What is wrong with a text that was typed; "": nothing."""
        if isinstance(self.may, tuple):
            choices = ", ".join(choice or "nothing" for choice in self.may)
            return "" if text in self.may else f"{show(text)}: expected {choices}."
        if text.isascii() and text.isdigit() and len(text) < 10 and int(text) in self.may:
            return ""
        return f"{show(text)}: expected a whole number, {self.may[0]} to {self.may[-1]}."

    def value(self, text: str) -> str | int:
        return text if isinstance(self.may, tuple) else int(text)


FIELDS = (
    Field("model", ("trained", "paper"), "Model", "paper: ten words"),
    # no request here has a priority
    Field("policy", tuple(name for name in POLICIES if name != "priority"), "Policy", "who goes first"),
    Field("budget", range(1, 257), "Budget", "most tokens of a step"),
    Field("chunked", ON_OFF, "Chunks", "on: long prompts in pieces"),
    Field("slots", range(1, 9), "Slots", "requests that run at once"),
    Field("blocks", range(1, 129), "Blocks", "of the pool"),
    Field("block_size", range(1, 33), "Block size", "in tokens"),
    Field("prefix_cache", ON_OFF, "Prefix cache", "find equal prefixes"),
    Field("drafts", range(5), "Drafts", "tokens guessed ahead; 0: none"),
    Field("fault", ("", *TEACHING_FAULTS), "Break it", "a bug that engines had"),
    Field("lesson", ("", *"123456"), "Lesson"),  # no field of the form
)
OF_ROWS = (
    Field("prompt", (), "Prompt", "prompt"),
    Field("arrival", range(61), "Step at which it comes", "comes at step"),
    Field("tokens", range(1, 49), "Most new tokens", "most new tokens"),
)


@dataclass(frozen=True)
class Asked:
    """A request: its prompt, the step in which it comes, and how many tokens it may get."""

    prompt: str
    arrival: int = 0
    tokens: int = 8


DEFAULT_REQUESTS = {
    "trained": (
        Asked("copy: tivu zo sa mi ->", 0, 8),
        Asked("add: 34 + 58 ->", 0, 6),
        Asked("sort: 7 2 9 4 1 ->", 1, 10),
        Asked("copy: tivu zo sa mi ->", 3, 10),
        Asked("count: 23 to 27 ->", 4, 14),
        Asked("recall: f = 7, r = 2; f ->", 6, 6),
    ),
    "paper": (
        Asked("<start> the cat sees", 0, 6),
        Asked("<start> a red ball", 0, 4),
        Asked("<start> the dog sees a", 2, 5),
    ),
}


@dataclass(frozen=True)
class Settings:
    """One run. `chunked` off: the budget is as large as all that a step could ever compute, so no prompt is cut."""

    requests: tuple[Asked, ...] = DEFAULT_REQUESTS["trained"]
    model: str = "trained"
    policy: str = "fcfs"
    budget: int = 12  # max_num_batched_tokens
    chunked: str = "on"
    slots: int = 4  # max_num_seqs
    blocks: int = 8
    block_size: int = 4
    prefix_cache: str = "on"
    drafts: int = 0  # of a request in a step; 0: no speculation
    fault: str = ""  # "": none
    lesson: str = ""


DEFAULT = Settings()


class Problems(Lfm2npError):
    """What can't be of a link: field -> one sentence. A field of a row has its number: `prompt-0`; "" is the form."""

    exit_code = 2

    def __init__(self, fields: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name or 'the form'}: {text}" for name, text in fields.items()))
        self.fields = dict(fields)


# --- a link


@dataclass(frozen=True)
class Typed:
    """A link as it was typed, right or wrong.

    rows      prompt, arrival and tokens of each request
    values    the other settings, by name
    has_rows  whether the link has any; else they are the model's defaults
    problem   what is wrong with the link as a whole; "": nothing
    """

    rows: Sequence[tuple[str, ...]]
    values: Mapping[str, str]
    has_rows: bool = False
    problem: str = ""


def read_link(link: str) -> Typed:
    """Rows without a prompt are left out; the first of all stays where none has one."""
    single = [field.name for field in FIELDS]
    known = [*(field.name for field in OF_ROWS), *single]
    try:
        pairs = parse_qsl(link, keep_blank_values=True, max_num_fields=MOST_FIELDS)  # bytes that are no UTF-8: U+FFFD
    except ValueError:
        return Typed(rows_of(DEFAULT.requests), {}, problem=f"The link has more than {MOST_FIELDS} fields.")
    values = {name: text for name, text in pairs if name in single}
    prompts, *columns = ([text for name, text in pairs if name == field.name] for field in OF_ROWS)
    count, default = len(prompts), rows_of([Asked("")])[0][1:]
    wrong = [
        f"{show(name)}: no name of a setting, expected {', '.join(known)}." for name, _ in pairs if name not in known
    ]
    counts = Counter(name for name, _ in pairs)
    wrong += [f"{name} stands more than once in the link." for name in values if counts[name] > 1]
    wrong += [
        f"{field.name}: {counted(len(column), 'value')} for {counted(count, 'prompt')}."
        for field, column in zip(OF_ROWS[1:], columns, strict=True)
        if len(column) not in (0, count)
    ]
    columns = [[*column, *[text] * count][:count] for column, text in zip(columns, default, strict=True)]
    rows = list(zip(prompts, *columns, strict=True))
    rows = [row for row in rows if row[0].strip()] or rows[:1]
    if not rows:
        rows = rows_of(DEFAULT_REQUESTS.get(values.get("model", ""), DEFAULT.requests))
    if len(rows) > len(NAMES):
        wrong.append(f"{len(rows)} requests, expected at most {len(NAMES)}.")
    return Typed(rows[: len(NAMES)], values, count > 0, " ".join(wrong[:3]))


def rows_of(requests: Sequence[Asked]) -> list[tuple[str, ...]]:
    return [(asked.prompt, str(asked.arrival), str(asked.tokens)) for asked in requests]


def settings_of(typed: Typed) -> Settings:
    """Problems with all that is wrong of the link, as far as that does not need a model."""
    given = [field for field in FIELDS if field.name in typed.values]
    problems = {"": typed.problem, **{field.name: field.problem(typed.values[field.name]) for field in given}}
    for index, (prompt, *numbers) in enumerate(typed.rows):
        problems[f"prompt-{index}"] = prompt_problem(prompt)
        for field, text in zip(OF_ROWS[1:], numbers, strict=True):
            problems[f"{field.name}-{index}"] = field.problem(text)
    if any(problems.values()):
        raise Problems({name: text for name, text in problems.items() if text})
    requests = tuple(Asked(prompt, int(arrival), int(tokens)) for prompt, arrival, tokens in typed.rows)
    return Settings(requests, **{field.name: field.value(typed.values[field.name]) for field in given})  # type: ignore[arg-type]


def prompt_problem(text: str) -> str:
    if not text.strip():
        return "There is no prompt: expected at least one request."
    if len(text) > MOST_CHARACTERS:
        return f"The prompt has {len(text)} characters, expected at most {MOST_CHARACTERS}."
    if "\ufffd" in text:
        return "The prompt has bytes that are no UTF-8, expected text."
    hidden = [(place, each) for place, each in enumerate(text, start=1) if not each.isprintable()]
    if hidden:
        place, each = hidden[0]
        return f"Character {place} of the prompt is U+{ord(each):04X}, expected one that can be seen, or a blank."
    return ""


def link_of(settings: Settings) -> str:
    """With every setting, so that it means the same run whatever the defaults will be."""
    rows = [(field.name, text) for row in rows_of(settings.requests) for field, text in zip(OF_ROWS, row, strict=True)]
    return urlencode([*rows, *((field.name, str(getattr(settings, field.name))) for field in FIELDS)])
