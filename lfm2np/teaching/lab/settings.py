"""What a learner may choose, and the link that says it: every setting is in the query of a GET.

A link holds all of a run, so the same link is the same run. What a link leaves out has its default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from lfm2np.errors import Lfm2npError
from lfm2np.oracle.report.markup import counted
from lfm2np.values import show
from scheduler import POLICIES

MODELS = ("trained", "paper")
ON_OFF = ("on", "off")
MOST_REQUESTS, MOST_CHARACTERS, MOST_TOKENS, MOST_ARRIVAL = 8, 200, 48, 60
MOST_BLOCK_SIZE, MOST_BLOCKS, MOST_BUDGET, MOST_SLOTS, MOST_DRAFTS, MOST_LESSON = 32, 128, 256, 8, 4, 6
MOST_FIELDS = 64  # of a query; a form has fewer
GUESSES = ("guess-1", "guess-2")  # of a lesson's predictions; no settings, so that they change no run
NAMES = "abcdefgh"  # of the requests, in order

# What each fault does, for someone who has read the first lessons. The catalogue has more.
TEACHING_FAULTS: Mapping[str, str] = {
    "convolution-crosses-requests": "The first rows of a prompt are convolved with the last rows of the request before "
    "it in the step.",
    "attention-crosses-requests": "A request attends to the rows of all requests before it in the step, too.",
    "previous-tenants-state-is-read": "A new request begins with the state of the last one in its slot, not with "
    "zeros.",
    "single-token-step-has-no-state": "A share of one row, as a decode has, is convolved with zeros, as if nothing "
    "stood before it.",
    "chunk-ignores-the-past-state": "A share of several rows (a later chunk of a prompt, what is behind a prefix hit, "
    "a decode with drafts) is convolved as if nothing stood before it.",
    "prefix-hit-without-its-state": "A prefix hit brings keys and values, but a state of zeros.",
    "rejected-drafts-stay-in-the-state": "A draft that was rejected stays in the convolution's state; it shows with "
    "drafts.",
    "preempted-request-loses-its-output": "What a request said before it was preempted is missing in its answer; it "
    "shows where blocks are few and a request is preempted while it decodes.",
    "positions-are-rows-of-the-batch": "A token is rotated by its row in the step, not by its position in its own "
    "sequence.",
    "full-cache-raises-instead-of-evicting": "When all free blocks hold cached prefixes, none is given up, and the "
    "engine ends with an error.",
}


class Problems(Lfm2npError):
    """What can't be of a link: field -> one sentence. A field of a row has its number: `prompt-0`; "" is the form."""

    exit_code = 2

    def __init__(self, fields: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name or 'the form'}: {text}" for name, text in fields.items()))
        self.fields = dict(fields)


@dataclass(frozen=True)
class Asked:
    prompt: str
    arrival: int = 0
    max_tokens: int = 8


TRAINED_REQUESTS = (
    Asked("copy: tivu zo sa mi ->", 0, 8),
    Asked("add: 34 + 58 ->", 0, 6),
    Asked("sort: 7 2 9 4 1 ->", 1, 10),
    Asked("copy: tivu zo sa mi ->", 3, 10),
    Asked("count: 23 to 27 ->", 4, 14),
    Asked("recall: f = 7, r = 2; f ->", 6, 6),
)
PAPER_REQUESTS = (
    Asked("<start> the cat sees", 0, 6),
    Asked("<start> a red ball", 0, 4),
    Asked("<start> the dog sees a", 2, 5),
)


@dataclass(frozen=True)
class Settings:
    """One run. `chunked` off: the budget is as large as all that a step could ever compute, so no prompt is cut."""

    model: str = "trained"
    requests: tuple[Asked, ...] = TRAINED_REQUESTS
    policy: str = "fcfs"
    block_size: int = 4
    num_blocks: int = 8
    budget: int = 12  # max_num_batched_tokens
    slots: int = 4  # max_num_seqs
    chunked: bool = True
    prefix_caching: bool = True
    drafts: int = 0  # of a request in a step; 0: no speculation
    fault: str = ""  # "": none
    lesson: int = 0  # 0: none


DEFAULT = Settings()
NUMBERS = {  # name in a link -> name here, least and most
    "block-size": ("block_size", 1, MOST_BLOCK_SIZE),
    "blocks": ("num_blocks", 1, MOST_BLOCKS),
    "budget": ("budget", 1, MOST_BUDGET),
    "slots": ("slots", 1, MOST_SLOTS),
    "drafts": ("drafts", 0, MOST_DRAFTS),
    "lesson": ("lesson", 0, MOST_LESSON),
}
CHOICES = {  # name in a link -> name here, and what it may be
    "model": ("model", MODELS),
    "policy": ("policy", tuple(name for name in POLICIES if name != "priority")),  # no request here has one
    "fault": ("fault", ("", *TEACHING_FAULTS)),
    "chunked": ("chunked", ON_OFF),
    "prefix-cache": ("prefix_caching", ON_OFF),
}
ROW_NUMBERS = {"arrival": ("arrival", 0, MOST_ARRIVAL), "tokens": ("max_tokens", 1, MOST_TOKENS)}
OWN = {name: number[0] for name, number in NUMBERS.items()} | {name: choice[0] for name, choice in CHOICES.items()}
SINGLE, ROWS = tuple(OWN), ("prompt", *ROW_NUMBERS)


@dataclass(frozen=True)
class Row:
    """A request as it was typed; None is what the link does not say."""

    prompt: str
    arrival: str | None
    tokens: str | None


@dataclass(frozen=True)
class Typed:
    """A link as it was typed, right or wrong: the rows that have a prompt, and the last value of each other name."""

    rows: tuple[Row, ...]
    values: Mapping[str, str]  # of settings
    guesses: Mapping[str, str]
    checked: str  # the guess that is the link's last field: its form was sent; "": none


def examine(query: Sequence[tuple[str, str]]) -> tuple[Settings, dict[str, str]]:
    """The run, with a default for each value that is wrong, and what is wrong by field."""
    if len(query) > MOST_FIELDS:
        return DEFAULT, {"": f"The link has {len(query)} fields, expected at most {MOST_FIELDS}."}
    problems: dict[str, str] = {}
    form = form_problems(query)
    if form:
        problems[""] = " ".join(form)
    typed = typed_of(query)
    problems |= repeated(query, SINGLE)
    values: dict[str, object] = {}
    for name, text in typed.values.items():
        field, value, wrong = value_of(name, text)
        if wrong:
            problems.setdefault(name, wrong)
        else:
            values[field] = value
    model = str(values.get("model", DEFAULT.model))
    values["requests"] = requests_of(query, typed, model, problems)
    return Settings(**values), problems  # type: ignore[arg-type]


def form_problems(query: Sequence[tuple[str, str]]) -> list[str]:
    """What is wrong and of no field: names that are not known, and rows that do not fit together."""
    problems = []
    unknown = sorted({key for key, _ in query} - {*SINGLE, *ROWS, *GUESSES})
    if unknown:
        names = ", ".join(map(show, unknown[:3])) + (" and more" if len(unknown) > 3 else "")
        problems.append(f"{names}: no name of a setting, expected {', '.join((*ROWS, *SINGLE))}.")
    problems += repeated(query, GUESSES).values()
    counts = Counter(key for key, _ in query)
    for name in ROW_NUMBERS:
        if counts[name] not in (0, counts["prompt"]):
            problems.append(f"{name}: {counted(counts[name], 'value')} for {counted(counts['prompt'], 'prompt')}.")
    filled = sum(key == "prompt" and bool(text.strip()) for key, text in query)
    if filled > MOST_REQUESTS:
        problems.append(f"{filled} requests, expected at most {MOST_REQUESTS}.")
    return problems


def repeated(query: Sequence[tuple[str, str]], names: Sequence[str]) -> dict[str, str]:
    """By name what is wrong with one that stands there more than once."""
    counts = Counter(key for key, _ in query)
    return {name: f"{name} stands more than once in the link." for name in names if counts[name] > 1}


def typed_of(query: Sequence[tuple[str, str]]) -> Typed:
    """Rows without a prompt are left out; the first of all stays where none has one."""
    columns = {name: [text for key, text in query if key == name] for name in ROWS}

    def at(name: str, index: int) -> str | None:
        return columns[name][index] if index < len(columns[name]) else None

    rows = [Row(prompt, at("arrival", i), at("tokens", i)) for i, prompt in enumerate(columns["prompt"])]
    kept = [row for row in rows if row.prompt.strip()] or rows[:1]
    values, guesses = ({key: text for key, text in query if key in names} for names in (SINGLE, GUESSES))
    checked = query[-1][0] if query and query[-1][0] in GUESSES else ""
    return Typed(tuple(kept[:MOST_REQUESTS]), values, guesses, checked)


def pairs_of(typed: Typed) -> list[tuple[str, str]]:
    """The settings of a link as they were typed, for a form that sends them again beside a guess."""
    pairs = [("prompt", row.prompt) for row in typed.rows]
    pairs += [(name, text) for name in ROW_NUMBERS for row in typed.rows if (text := getattr(row, name)) is not None]
    return pairs + list(typed.values.items())


def requests_of(
    query: Sequence[tuple[str, str]], typed: Typed, model: str, problems: dict[str, str]
) -> tuple[Asked, ...]:
    if not any(key == "prompt" for key, _ in query):
        return default_requests(model)
    rows = []
    for index, row in enumerate(typed.rows):
        wrong = prompt_problem(row.prompt)
        if wrong:
            problems[f"prompt-{index}"] = wrong
        values: dict[str, int] = {}
        for name, (field, least, most) in ROW_NUMBERS.items():
            text = getattr(row, name)
            if text is not None and (wrong := number_problem(text, least, most)):
                problems[f"{name}-{index}"] = wrong
            elif text is not None:
                values[field] = int(text)
        rows.append(Asked(row.prompt, **values))
    return tuple(rows)


def default_requests(model: str) -> tuple[Asked, ...]:
    return PAPER_REQUESTS if model == "paper" else TRAINED_REQUESTS


def value_of(name: str, text: str) -> tuple[str, object, str]:
    """The setting's name here, its value, and what is wrong with it ("": nothing)."""
    if name in NUMBERS:
        field, least, most = NUMBERS[name]
        wrong = number_problem(text, least, most)
        return field, None if wrong else int(text), wrong
    field, known = CHOICES[name]
    return field, text == "on" if known is ON_OFF else text, choice_problem(text, known)


def number_problem(text: str, least: int, most: int) -> str:
    if text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most:
        return ""
    return f"{show(text)}: expected a whole number, {least} to {most}."


def choice_problem(text: str, known: Sequence[str]) -> str:
    if text in known:
        return ""
    return f"{show(text)}: expected {', '.join(choice or 'nothing' for choice in known)}."


def prompt_problem(text: str) -> str:
    if not text.strip():
        return "There is no prompt: expected at least one request."
    if len(text) > MOST_CHARACTERS:
        return f"The prompt has {len(text)} characters, expected at most {MOST_CHARACTERS}."
    if "\ufffd" in text:
        return "The prompt has bytes that are no UTF-8, expected text."
    for place, character in enumerate(text, start=1):
        if not character.isprintable():
            return (
                f"Character {place} of the prompt is U+{ord(character):04X}, expected one that can be seen, or a blank."
            )
    return ""


def query_of(settings: Settings) -> str:
    """The link of a run, with every setting, so that it means the same run whatever the defaults will be."""
    pairs: list[tuple[str, object]] = []
    for asked in settings.requests:
        pairs += [("prompt", asked.prompt), ("arrival", asked.arrival), ("tokens", asked.max_tokens)]
    pairs += [(name, setting_text(getattr(settings, OWN[name]))) for name in (*CHOICES, *NUMBERS)]
    return urlencode(pairs)


def query_name(field: str) -> str:
    return next(name for name, known in OWN.items() if known == field)


def setting_text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
