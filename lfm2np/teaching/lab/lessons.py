"""Six guided lessons: the engine answers their questions. lessons.toml has their words; here is what they count.

A lesson has two predictions, guesses at what a changed run would do, and asks for settings whose run has some property.
A guess is a part of the link (`guess-1`), beside the settings, and changes no run. Without one the run that the
question is about is not computed, so the page can't give the answer away. A sentence holds for a learner's settings as
well as for the lesson's; of a changed run drafts and faults are left out, but where the question is about them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from lfm2np.oracle.report.markup import counted
from lfm2np.teaching.drawings.runs.recorded_run import Run
from lfm2np.teaching.lab.run import Outcome, Verdict, play, require_fits
from lfm2np.teaching.lab.settings import (
    FIELDS,
    GUESSES,
    NAMES,
    WORDS,
    Asked,
    Problems,
    Settings,
    Typed,
    read_link,
    settings_of,
)
from lfm2np.values import show

STEPS_OF_ONE = 7
MOST_WASTED, MOST_STATIC_STEPS = 19, 25
MOST_ROWS, MOST_WAIT = 8, 3
LEAST_PLAIN_STEPS = 6
MOST_DIGITS = 6  # of a guess
OF_THE_ENGINE = ("policy", "budget", "slots", "chunked", "block_size", "blocks", "prefix_cache")
CROSSING, STATELESS = "convolution-crosses-requests", "single-token-step-has-no-state"
Again = Callable[[Settings], Outcome]  # runs the engine once more; Problems for what can't be


class Wrong(Exception):
    """The sentence of a run, or of a guess, that is not what was asked for."""


class Unreadable(Exception):
    """The sentence of a guess that is neither right nor wrong: there is none, or not of the kind that is asked for."""


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


# --- predictions


class Count(int):
    """`{steps}` is "3" in a sentence, `{steps:step}` "3 steps"."""

    def __format__(self, noun: str) -> str:
        return counted(int(self), noun) if noun else str(int(self))


@dataclass(frozen=True)
class Answer:
    """What a run answers.

    right    how many, or which requests
    counts   by the names that lessons.toml has for them: a number or words; of guesses that are mistakes of one kind
             a mapping from each to what it is explained by
    reasons  of each request why it does not belong to the answer
    """

    right: int | frozenset[str]
    counts: Mapping[str, Any]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def words(self, sentence: str, **more: Any) -> str:
        values = {**self.counts, **more}
        return sentence.format(**{key: Count(each) if isinstance(each, int) else each for key, each in values.items()})


@dataclass(frozen=True)
class Prediction:
    """`change` gives the run that the question is about, of a learner's settings; changed twice it is the same run.

    `answer` reads the answer off both runs: the one now, and the changed one.
    """

    question: str
    right: str
    hint: str
    wrong: Sequence[tuple[str, str]]
    change: Callable[[Settings], Settings]
    answer: Callable[[Outcome, Outcome], Answer]

    @property
    def is_of_requests(self) -> bool:
        """The answer is letters, else a number."""
        return not self.wrong

    def judge(self, text: str, now: Outcome, again: Again = again) -> Verdict:
        """Unreadable for what is no guess."""
        changed = self.change(now.settings)
        names = NAMES[: len(changed.requests)]
        guess = read_requests(text, names) if self.is_of_requests else read_number(text)
        try:
            then = again(changed)
            run_of(then)
            answer = self.answer(then if now.run is None else now, then)  # a fault may leave no run to compare with
            self._require_right(guess, answer)
        except Wrong as wrong:
            return Verdict(False, str(wrong))
        except Problems as problems:
            return Verdict(False, f"With your settings it can't be run. {' '.join(problems.fields.values())}")
        return Verdict(True, answer.words(self.right))

    def _require_right(self, guess: Any, answer: Answer) -> None:
        """A wrong guess is explained by its mistake, by one request that it should not have, or by the hint: never by
        the answer."""
        if isinstance(answer.right, frozenset):
            for name in sorted(guess - answer.right):
                raise Wrong(f"Request {name} does not belong to the answer: {answer.reasons[name]}.")
            expect(guess == answer.right, f"At least one request is missing. {self.hint}")
        elif guess != answer.right:
            for name, sentence in self.wrong:
                if guess in (mistakes := self.mistakes(answer, name)):
                    raise Wrong(answer.words(sentence, guess=guess, hint=self.hint, computed=mistakes[guess]))
            raise Wrong(f"It is {'more' if guess < answer.right else 'less'}. {self.hint}")

    @staticmethod
    def mistakes(answer: Answer, name: str) -> Mapping[int, Any]:
        """Guesses of one kind; none where the run does not have it."""
        counts = answer.counts.get(name, {})
        return {counts: None} if isinstance(counts, int) else counts


def read_number(text: str) -> int:
    """Unreadable for all but a whole number in ASCII digits."""
    text = text.strip()
    if not text:
        raise Unreadable("There is no guess yet: expected a whole number, such as 3.")
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
        raise Unreadable(f"{show(text)}: expected a whole number, such as 3.")
    return int(text)


def read_requests(text: str, names: str) -> frozenset[str]:
    """The letters of "a b", "A, B" or "a and b", none of "none"; Unreadable for any other text."""
    expected = f"expected letters of requests, {names[0]} to {names[-1]}, or none"
    words = [word for word in re.split(r"[\s,;]+", text.strip().lower()) if word not in ("", "and")]
    if not words:
        raise Unreadable(f"There is no guess yet: {expected}.")
    letters = frozenset() if words == ["none"] else frozenset("".join(words))
    if not letters <= set(names):
        raise Unreadable(f"{show(text.strip())}: {expected}.")
    return letters


def sound(settings: Settings, **changes: Any) -> Settings:
    return replace(settings, **{"fault": "", "drafts": 0, **changes})


def alone(settings: Settings, tokens: int, **changes: Any) -> Settings:
    """Request a, by itself."""
    return sound(settings, requests=(replace(settings.requests[0], arrival=0, tokens=tokens),), **changes)


def together(settings: Settings) -> Settings:
    return sound(settings, requests=tuple(replace(each, arrival=0) for each in settings.requests), fault=CROSSING)


def steps_of_one(now: Outcome, then: Outcome) -> Answer:
    """One request: steps without a token are the first chunks of its prompt."""
    run, said = run_of(then), len(then.tokens["a"])
    steps, prompt, chunks = len(run.steps), len(run.requests["a"].prompt), len(run.steps) - said + 1
    prefill = "the prefill" if chunks == 1 else f"{chunks} steps for the prompt"
    counts = {"steps": steps, "prefill": prefill, "prompt": prompt, "decodes": said - 1, "one_more": steps + 1}
    counts |= {"rows": rows_of(run), "all_tokens": prompt + said, "now": steps_now(now)}
    return Answer(steps, counts)


def steps_now(now: Outcome) -> int:
    return len(now.run.steps) if now.run else -1


def rows_of(run: Run) -> int:
    return sum(step.num_tokens for step in run.steps)


def steps_of_batch(now: Outcome, then: Outcome) -> Answer:
    steps, before, settings = len(run_of(then).steps), steps_now(now), now.settings
    longest = max(then.tokens, key=lambda name: len(then.tokens[name]))
    said = len(then.tokens[longest])
    until = f"A batch runs until its longest member has ended, and request {longest} alone says {said} tokens."
    counts = {"steps": steps, "until": until, "longest": longest, "slots": settings.slots, "now": before}
    counts |= {"wasted": then.wasted, "wasted_now": now.wasted, "all_tokens": sum(map(len, then.tokens.values()))}
    counts["most"] = run_of(then).requests[longest].max_tokens
    if steps == said:  # one batch, whose prompts take one step
        counts |= {"one_more": steps + 1, "decodes": steps - 1}
    if (settings.policy, 2 * settings.slots) == ("static", then.settings.slots):
        counts["halves"] = {before // 2: "", -(-before // 2): ""}
    return Answer(steps, counts)


def empty_cells(now: Outcome, then: Outcome) -> Answer:
    """Of the step in which request e begins."""
    begins = [step for step in run_of(then).steps for entry in step.entries if entry.request_id == "e"]
    expect(begins, "No step computes the prompt of request e: the question is about the lesson's six requests.")
    step = begins[0]
    width, height, rows = max(len(entry.token_ids) for entry in step.entries), len(step.entries), step.num_tokens
    empty, others = height * width - rows, height - 1
    formula = f", ({width} - 1)({height} - 1)" if empty == (width - 1) * others else ""
    counts = {"step": step.number, "height": height, "width": width, "rows": rows, "others": others, "empty": empty}
    counts |= {"cells": height * width, "rows_whole": width * others, "of_one": width - 1}
    counts |= {"of_all": (width - 1) * height, "wasted": then.wasted}
    return Answer(empty, {"formula": formula, **counts})


def behind(run: Run, name: str) -> str:
    """Where a request begins right behind another one; "" where it does not."""
    for step in run.steps:
        names = [entry.request_id for entry in step.entries]
        if name in names[1:] and step.entries[names.index(name)].start == 0:
            return f"in step {step.number} it begins behind request {names[names.index(name) - 1]}"
    return ""


def harmed_behind(now: Outcome, then: Outcome) -> Answer:
    elsewise = "in no step does it begin behind another"
    return Answer(harmed(then), {}, {name: behind(run_of(then), name) or elsewise for name in then.changed})


def harmed_in_decodes(now: Outcome, then: Outcome) -> Answer:
    return Answer(harmed(then), {}, dict.fromkeys(then.changed, "it never has a share of one row"))


def harmed(outcome: Outcome) -> frozenset[str]:
    return frozenset(name for name, changed in outcome.changed.items() if changed in ("tokens", "logits"))


def first_token(run: Run, name: str) -> int:
    return next(step.number for step in run.steps if name in step.tokens)


def step_of_first_token(now: Outcome, then: Outcome) -> Answer:
    run, name = run_of(then), "c"
    expect(name in run.requests, "There is no request c: the question is about the lesson's six requests.")
    first, asked = first_token(run, name), run.requests[name]
    chunks = [
        (step.number, len(entry.token_ids))
        for step in run.steps[: first + 1]
        for entry in step.entries
        if entry.request_id == name
    ]
    done = {step: sum(rows for earlier, rows in chunks if earlier <= step) for step, _ in chunks[:-1]}
    numbers, sizes = (joined(map(str, each)) for each in zip(*chunks, strict=True))
    before = first_token(now.run, name) if now.run and name in now.run.requests else -1
    counts = {"prompt": len(asked.prompt), "numbers": numbers, "sizes": sizes, "unfinished": done, "now": before}
    return Answer(first, counts | {"one_more": first + 1, "arrival": asked.arrival})


def joined(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def who_waits(now: Outcome, then: Outcome) -> Answer:
    run = run_of(then)
    starts = {name: step.number for step in reversed(run.steps) for name in step.admitted}
    waits = {
        name: f"request {name} until step {starts[name]}" for name in sorted(starts) if came(run, name) < starts[name]
    }
    because = f"They wait for a slot: {joined(waits.values())}." if waits else "A slot is free whenever one comes."
    at_once = {name: f"it comes in step {start}, and starts there" for name, start in starts.items()}
    return Answer(frozenset(waits), {"because": because}, at_once)


def came(run: Run, name: str) -> int:
    return run.requests[name].arrival


def blocks_at_the_end(now: Outcome, then: Outcome) -> Answer:
    run, size = run_of(then), then.settings.block_size
    last, prompt, said = run.steps[-1].entries[-1], len(run.requests["a"].prompt), len(then.tokens["a"])
    counts = {"prompt": prompt, "said": said, "fed": said - 1, "places": last.stop, "all_tokens": prompt + said}
    counts |= {"of_all": -(-(prompt + said) // size), "of_prompt": -(-prompt // size), "of_answer": -(-said // size)}
    return Answer(len(last.block_table), counts | {"blocks": len(last.block_table), "size": size})


def preempted_first(now: Outcome, then: Outcome) -> Answer:
    run = run_of(then)
    preempted = {name: step.number for step in reversed(run.steps) for name in step.preempted}
    if not preempted:
        never = dict.fromkeys(run.requests, "it is never preempted: the blocks are enough")
        return Answer(frozenset(), {"because": "No request is preempted: the blocks are enough."}, never)
    number = min(preempted.values())
    first = run.steps[number].preempted[0]
    running = {name for step in run.steps[:number] for name in step.admitted} - set(run.steps[number].preempted)
    reasons = dict.fromkeys(run.requests, f"in step {number}, when a block is missing, another one goes first")
    for name in running:
        later = f". It is preempted later, in step {preempted[name]}" if name in preempted else ""
        reasons[name] = (
            f"when a block is missing, in step {number}, the youngest that runs gives way, and this one came earlier, "
            f"in step {came(run, name)}{later}"
        )
    because = f"In step {number} a block is missing. Request {first} is the youngest that runs, and gives way."
    return Answer(frozenset(first), {"because": because}, reasons)


def accepted_drafts(now: Outcome, then: Outcome) -> Answer:
    run, guessed, accepted = run_of(then), Counter[str](), Counter[str]()
    for step in run.steps:
        for entry in step.entries:
            if entry.num_drafts:
                guessed[entry.request_id] += entry.num_drafts
                accepted[entry.request_id] += len(step.tokens.get(entry.request_id, ())) - 1
    reasons = dict.fromkeys(run.requests, "nothing of it comes twice, so nothing is guessed")
    for name, count in guessed.items():
        is_or_are = "is" if accepted[name] == 1 else "are"
        reasons[name] = f"{accepted[name]} of its {counted(count, 'draft')} {is_or_are} right"
    because = " ".join(f"Request {name}: {reason}." for name, reason in reasons.items())
    return Answer(frozenset(name for name in accepted if accepted[name]), {"because": because}, reasons)


def steps_with_drafts(now: Outcome, then: Outcome) -> Answer:
    steps, said, drafts = len(run_of(then).steps), len(then.tokens["a"]), then.settings.drafts
    counts = {"steps": steps, "tokens": said, "drafts": drafts, "each": drafts + 1, "drafted": steps - 1}
    counts |= {"too_few": -(-said // (drafts + 1)), "only_drafts": 1 - (1 - said) // drafts}
    return Answer(steps, counts | {"by_drafts": -(-said // drafts)})


Change = Callable[[Settings], Settings]
PREDICTIONS: Sequence[Sequence[tuple[Change, Callable[[Outcome, Outcome], Answer]]]] = (  # of each lesson
    ((partial(alone, tokens=9), steps_of_one), (partial(alone, tokens=6, budget=1, chunked="on"), steps_of_one)),
    ((partial(sound, policy="static", slots=6), steps_of_batch), (partial(sound, policy="fcfs", slots=3), empty_cells)),
    ((together, harmed_behind), (partial(sound, fault=STATELESS), harmed_in_decodes)),
    (
        (partial(sound, policy="fcfs", budget=8, slots=4, chunked="on"), step_of_first_token),
        (partial(sound, policy="fcfs", budget=32, slots=2), who_waits),
    ),
    (
        (partial(sound, requests=(Asked("count: 23 to 27 ->", 0, 8),), block_size=4), blocks_at_the_end),
        (partial(sound, policy="fcfs", blocks=11), preempted_first),
    ),
    (
        (partial(sound, drafts=4), accepted_drafts),
        (
            partial(sound, requests=(Asked("copy: zo sa zo sa zo sa zo sa zo sa ->", 0, 24),), drafts=2, budget=64),
            steps_with_drafts,
        ),
    ),
)


# --- what a lesson asks for


@dataclass(frozen=True)
class Lesson:
    """`view` is the id of the view to look at. `check` is called for a run of at least one step."""

    number: str
    title: str
    text: Sequence[str]  # paragraphs
    start: Settings
    view: str
    predictions: Sequence[Prediction]
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
        number, rows = str(index + 1), words.pop("prediction")
        start = settings_of(read_link(f"{words.pop('start')}&lesson={number}"))
        predictions = [
            Prediction(**{"wrong": (), **each}, change=change, answer=answer)
            for each, (change, answer) in zip(rows, PREDICTIONS[index], strict=True)
        ]
        lessons[number] = Lesson(number, **words, start=start, predictions=predictions, judge=CHECKS[index])
    return lessons


def stripped(value: Any) -> Any:
    """Texts, however deep in lists and tables."""
    if isinstance(value, dict):
        return {key: stripped(each) for key, each in value.items()}
    return [*map(stripped, value)] if isinstance(value, list) else value.strip()


LESSONS: Mapping[str, Lesson] = read_lessons()
Judged = Mapping[str, Verdict | Unreadable]  # by the name of a guess


def judge_guesses(lesson: Lesson, typed: Typed, outcome: Outcome, again: Again = again) -> Judged:
    """Runs only what was guessed about. What is no guess is said at its field, and costs no run."""
    judged: dict[str, Verdict | Unreadable] = {}
    for name, prediction in zip(GUESSES, lesson.predictions, strict=True):
        if name in typed.values:
            try:
                judged[name] = prediction.judge(typed.values[name], outcome, again)
            except Unreadable as unreadable:
                judged[name] = unreadable
    return judged
