"""Six guided lessons: the engine answers their questions. lessons.toml has their words; here is what they count.

A lesson asks for settings whose run has some property; a sentence holds for a learner's settings as well as for the
lesson's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from lfm2np.oracle.report.markup import counted
from lfm2np.teaching.drawings.runs.recorded_run import Run
from lfm2np.teaching.lab.run import Outcome, Verdict, play, require_fits
from lfm2np.teaching.lab.settings import (
    FIELDS,
    NAMES,
    WORDS,
    Asked,
    Problems,
    Settings,
    read_link,
    settings_of,
)
from lfm2np.values import show

STEPS_OF_ONE = 7
MOST_WASTED, MOST_STATIC_STEPS = 19, 25
MOST_ROWS, MOST_WAIT = 8, 3
LEAST_PLAIN_STEPS = 6
OF_THE_ENGINE = ("policy", "budget", "slots", "chunked", "block_size", "blocks", "prefix_cache")
Again = Callable[[Settings], Outcome]  # runs the engine once more; Problems for what can't be


class Wrong(Exception):
    """The sentence of a run that is not what was asked for."""


def expect(condition: object, sentence: str) -> None:
    if not condition:
        raise Wrong(sentence)


def again(settings: Settings) -> Outcome:
    require_fits(settings)
    return play(settings)


def run_of(outcome: Outcome) -> Run:
    """Wrong where there is none, or it did not end by itself."""
    if outcome.stopped or outcome.run is None:
        raise Wrong(f"{outcome.stopped} So it can't be judged.")
    return outcome.run


def behind(run: Run, name: str) -> str:
    """Where a request begins right behind another one; "" where it does not."""
    for step in run.steps:
        names = [entry.request_id for entry in step.entries]
        if name in names[1:] and step.entries[names.index(name)].start == 0:
            return f"in step {step.number} it begins behind request {names[names.index(name) - 1]}"
    return ""


def harmed(outcome: Outcome) -> frozenset[str]:
    return frozenset(name for name, changed in outcome.changed.items() if changed in ("tokens", "logits"))


def first_token(run: Run, name: str) -> int:
    return next(step.number for step in run.steps if name in step.tokens)


def came(run: Run, name: str) -> int:
    return run.requests[name].arrival


# --- what a lesson asks for


@dataclass(frozen=True)
class Lesson:
    """`view` is the id of the view to look at. `check` is called for a run of at least one step."""

    number: str
    title: str
    text: Sequence[str]  # paragraphs
    start: Settings
    view: str
    question: str
    hint: str
    judge: Callable[[Settings, Outcome, Again], str]  # start, what its learner's settings came to

    def check(self, outcome: Outcome, again: Again = again) -> Verdict:
        try:
            run_of(outcome)
            return Verdict(True, self.judge(self.start, outcome, again))
        except Wrong as wrong:
            return Verdict(False, str(wrong))


def expect_moved_only(start: Settings, settings: Settings, may: Sequence[str]) -> None:
    """Wrong, where something changed that has to stay."""
    for each in FIELDS:
        old, new = getattr(start, each.name), getattr(settings, each.name)
        is_fine = old == new or each.name in (*may, "lesson")
        expect(is_fine, f"{each.name.replace('_', ' ')} is {new or 'none'}, and has to stay {old or 'none'}.")
    old_count, count = len(start.requests), len(settings.requests)
    is_or_are = "is" if count == 1 else "are"
    expect(old_count == count, f"There {is_or_are} {counted(count, 'request')}; the lesson has {old_count}.")
    for name, old, new in zip(NAMES, start.requests, settings.requests, strict=False):
        for part in fields(Asked):
            was, now = getattr(old, part.name), getattr(new, part.name)
            what = part.name.replace("tokens", "number of tokens")
            expect(was == now, f"The {what} of request {name} is {show(now)}, and has to stay {show(was)}.")


def one_request(start: Settings, outcome: Outcome, again: Again) -> str:
    expect_moved_only(start, outcome.settings, ("budget", "chunked", "block_size", "blocks", "slots", "policy"))
    steps = run_of(outcome).steps
    shares = [step.num_tokens for step in steps]
    prefill = sum(not step.tokens for step in steps) + 1
    seen = (
        f"The run took {counted(len(steps), 'step')}, {prefill} for the prompt and {len(steps) - prefill} for decodes"
    )
    expect(len(steps) == STEPS_OF_ONE, f"{seen}; expected {STEPS_OF_ONE} steps.")
    return f"{seen}: the prompt went in as chunks of {' and '.join(map(str, shares[:prefill]))} rows."


def less_waste(start: Settings, outcome: Outcome, again: Again) -> str:
    expect_moved_only(start, outcome.settings, OF_THE_ENGINE)
    run, policy = run_of(outcome), outcome.settings.policy
    seen = f"{policy} takes {counted(len(run.steps), 'step')} and wastes {counted(outcome.wasted, 'cell')}"
    expect(len(run.steps) <= MOST_STATIC_STEPS, f"{seen}: expected at most {MOST_STATIC_STEPS} steps.")
    why = why_wasted(policy, run)
    expect(outcome.wasted <= MOST_WASTED, f"{seen}: expected at most {MOST_WASTED} cells; {why}.")
    return f"{seen}: who has ended leaves, and what is long and what is short are seldom in one step."


def why_wasted(policy: str, run: Run) -> str:
    if policy == "static":
        return "members that have ended keep their rows"
    cells = {True: 0, False: 0}  # of steps with prompts only, and of others
    for step in run.steps:
        shares = [len(entry.token_ids) for entry in step.entries]
        of_prompts = all(entry.start < len(run.requests[entry.request_id].prompt) for entry in step.entries)
        cells[of_prompts] += len(shares) * max(shares, default=0) - sum(shares)
    if cells[False] >= cells[True]:
        return "a step that takes a prompt beside decodes is a rectangle as wide as the prompt"
    return "a step that takes prompts of several lengths is a rectangle as wide as the longest"


def hidden_fault(start: Settings, outcome: Outcome, again: Again) -> str:
    settings, run = outcome.settings, run_of(outcome)
    other_model = f"The model is {settings.model}; the lesson is about the model {start.model}."
    expect(settings.model == start.model, other_model)
    now = f"The fault is {settings.fault or 'gone'}"
    expect(settings.fault == start.fault, f"{now}; the question is how to hide {start.fault} while it is there.")
    known = {asked.prompt for asked in start.requests}
    too_few = "At least two requests with the lesson's prompts have to stay: who is alone can't be harmed."
    expect(sum(asked.prompt in known for asked in settings.requests) >= 2, too_few)
    for name in sorted(harmed(outcome)):
        what = "tokens" if outcome.changed[name] == "tokens" else "logits, though the same tokens,"
        where = behind(run, name)
        raise Wrong(f"Request {name} has other {what} than without the fault{where and f': {where}'}.")
    return (
        "Every token and every logit is the same with the fault and without it: in no step does a prompt begin right "
        "behind another request. A test that runs like this would never find the bug."
    )


def quick_and_even(start: Settings, outcome: Outcome, again: Again) -> str:
    expect_moved_only(start, outcome.settings, OF_THE_ENGINE)
    run = run_of(outcome)
    largest = max(run.steps, key=lambda step: step.num_tokens)
    rows = f"Step {largest.number} has {largest.num_tokens} rows, expected at most {MOST_ROWS}."
    expect(largest.num_tokens <= MOST_ROWS, rows)
    waits = {name: first_token(run, name) - came(run, name) for name in run.requests}
    slowest = max(waits, key=lambda name: waits[name])
    few = f"No step has more than {largest.num_tokens} rows"
    seen = f"request {slowest} has its first token {counted(waits[slowest], 'step')} after it came"
    expect(waits[slowest] <= MOST_WAIT, f"{few}, but {seen}, expected at most {MOST_WAIT}.")
    return f"{few}, and the slowest, {seen}."


def smallest_pool(start: Settings, outcome: Outcome, again: Again) -> str:
    expect_moved_only(start, outcome.settings, ("blocks",))
    seen, blocks = first_preemption(outcome), outcome.settings.blocks
    expect(not seen, f"With {blocks} blocks {seen}.")
    try:
        fewer = first_preemption(again(replace(outcome.settings, blocks=blocks - 1)))
    except Problems:
        fewer = "a request alone does not fit"
    expect(fewer, f"With {blocks} blocks nobody is preempted, but neither is with {blocks - 1}.")
    return f"With {blocks} blocks nobody is preempted, and with {blocks - 1} {fewer}."


def first_preemption(outcome: Outcome) -> str:
    for step in run_of(outcome).steps:
        if step.preempted:
            return f"request {step.preempted[0]} is preempted in step {step.number}"
    return ""


def steps_saved(start: Settings, outcome: Outcome, again: Again) -> str:
    settings, requests = outcome.settings, len(outcome.settings.requests)
    expect(not settings.fault, f"The fault is {settings.fault}; the lesson is about a sound engine.")
    expect(requests >= len(start.requests), f"There is {counted(requests, 'request')}, expected at least two.")
    expect(settings.drafts, "There are no drafts: every token takes a step of its request.")
    plain = again(replace(settings, drafts=0))
    steps, without = len(run_of(outcome).steps), len(run_of(plain).steps)
    expect(plain.tokens == outcome.tokens, "The tokens are not the same as without drafts.")
    seen = f"The same tokens take {counted(steps, 'step')} with drafts and {without} without"
    expect(without >= LEAST_PLAIN_STEPS, f"{seen}: expected at least {LEAST_PLAIN_STEPS} without.")
    most = without - -(-without // 3)
    expect(steps <= most, f"{seen}: expected at most {most} with drafts.")
    return f"{seen}: a third or more is saved."


CHECKS = (one_request, less_waste, hidden_fault, quick_and_even, smallest_pool, steps_saved)


# --- all of them


def read_lessons() -> dict[str, Lesson]:
    """By number. Line breaks at the ends of a text are no part of it."""
    lessons = {}
    for index, words in enumerate(stripped(WORDS["lesson"])):
        number = str(index + 1)
        start = settings_of(read_link(f"{words.pop('start')}&lesson={number}"))
        lessons[number] = Lesson(number, **words, start=start, judge=CHECKS[index])
    return lessons


def stripped(value: Any) -> Any:
    """Texts, however deep in lists and tables."""
    if isinstance(value, dict):
        return {key: stripped(each) for key, each in value.items()}
    return [*map(stripped, value)] if isinstance(value, list) else value.strip()


LESSONS: Mapping[str, Lesson] = read_lessons()
