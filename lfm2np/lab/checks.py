"""How the engine judges an answer: one function a lesson, from the settings it started from and what a run did.

It returns a sentence about a right answer, and raises Wrong for another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from lfm2np.drawings.page.markup import counted
from lfm2np.drawings.runs.run import Run
from lfm2np.lab.compute import Outcome
from lfm2np.lab.settings import NAMES, Asked, Problems, Settings, query_name, told
from lfm2np.values import show

Again = Callable[[Settings], Outcome]  # runs the engine once more; Problems for what can't be

STEPS_OF_ONE = 7
MOST_WASTED, MOST_STATIC_STEPS = 19, 25
MOST_ROWS, MOST_WAIT = 8, 3
LEAST_PLAIN_STEPS = 6
OF_THE_ENGINE = ("policy", "budget", "slots", "chunked", "block_size", "num_blocks", "prefix_caching")


@dataclass(frozen=True)
class Verdict:
    right: bool
    sentence: str


class Wrong(Exception):
    """The sentence of a run that is not what was asked for."""


def expect(condition: object, sentence: str) -> None:
    if not condition:
        raise Wrong(sentence)


def one_request(start: Settings, settings: Settings, outcome: Outcome, again: Again) -> str:
    expect_moved_only(start, settings, ("budget", "chunked", "block_size", "num_blocks", "slots", "policy"))
    assert outcome.run is not None
    shares = [step.num_tokens for step in outcome.run.steps]
    prefill = sum(not step.tokens for step in outcome.run.steps) + 1
    seen = (
        f"The run took {counted(len(shares), 'step')}, {prefill} for the prompt and {len(shares) - prefill} for decodes"
    )
    expect(len(shares) == STEPS_OF_ONE, f"{seen}; expected {STEPS_OF_ONE} steps.")
    return f"{seen}: the prompt went in as chunks of {' and '.join(map(str, shares[:prefill]))} rows."


def less_waste(start: Settings, settings: Settings, outcome: Outcome, again: Again) -> str:
    expect_moved_only(start, settings, OF_THE_ENGINE)
    assert outcome.counts is not None and outcome.run is not None
    counts, why = outcome.counts, why_wasted(settings, outcome.run)
    seen = f"{settings.policy} takes {counted(counts.steps, 'step')} and wastes {counted(counts.wasted, 'cell')}"
    expect(counts.steps <= MOST_STATIC_STEPS, f"{seen}: expected at most {MOST_STATIC_STEPS} steps.")
    expect(counts.wasted <= MOST_WASTED, f"{seen}: expected at most {MOST_WASTED} cells; {why}.")
    return f"{seen}: who has ended leaves, and what is long and what is short are seldom in one step."


def why_wasted(settings: Settings, run: Run) -> str:
    if settings.policy == "static":
        return "members that have ended keep their rows"
    prompts = mixed = 0
    for step in run.steps:
        shares = [len(entry.token_ids) for entry in step.entries]
        cells = len(shares) * max(shares, default=0) - sum(shares)
        starts = [entry.start < len(run.requests[entry.request_id].prompt) for entry in step.entries]
        if all(starts):
            prompts += cells
        else:
            mixed += cells
    if mixed >= prompts:
        return "a step that takes a prompt beside decodes is a rectangle as wide as the prompt"
    return "a step that takes prompts of several lengths is a rectangle as wide as the longest"


def hidden_fault(start: Settings, settings: Settings, outcome: Outcome, again: Again) -> str:
    other_model = f"The model is {settings.model}; the lesson is about the model {start.model}."
    expect(settings.model == start.model, other_model)
    now = f"The fault is {settings.fault or 'gone'}"
    expect(settings.fault == start.fault, f"{now}; the question is how to hide {start.fault} while it is there.")
    known = {asked.prompt for asked in start.requests}
    too_few = "At least two requests with the lesson's prompts have to stay: who is alone can't be harmed."
    expect(sum(asked.prompt in known for asked in settings.requests) >= 2, too_few)
    assert outcome.run is not None
    for name, changed in outcome.changed.items():
        what = "tokens" if changed.tokens else "logits, though the same tokens,"
        sentence = f"Request {name} has other {what} than without the fault{behind(outcome.run, name)}."
        expect(not changed.tokens and not changed.logits, sentence)
    return (
        "Every token and every logit is the same with the fault and without it: in no step does a prompt begin right "
        "behind another request. A test that runs like this would never find the bug."
    )


def behind(run: Run, name: str) -> str:
    for step in run.steps:
        names = [entry.request_id for entry in step.entries]
        if name in names[1:] and step.entries[names.index(name)].start == 0:
            return f": in step {step.number} it begins behind request {names[names.index(name) - 1]}"
    return ""


def quick_and_even(start: Settings, settings: Settings, outcome: Outcome, again: Again) -> str:
    expect_moved_only(start, settings, OF_THE_ENGINE)
    assert outcome.run is not None
    largest = max(outcome.run.steps, key=lambda step: step.num_tokens)
    rows = f"Step {largest.number} has {largest.num_tokens} rows, expected at most {MOST_ROWS}."
    expect(largest.num_tokens <= MOST_ROWS, rows)
    waits: dict[str, int] = {}
    for step in outcome.run.steps:
        for name in step.tokens:
            waits.setdefault(name, step.number - outcome.run.requests[name].arrival)
    slowest = max(waits, key=lambda name: waits[name])
    few = f"No step has more than {largest.num_tokens} rows"
    seen = f"request {slowest} has its first token {counted(waits[slowest], 'step')} after it came"
    expect(waits[slowest] <= MOST_WAIT, f"{few}, but {seen}, expected at most {MOST_WAIT}.")
    return f"{few}, and the slowest, {seen}."


def smallest_pool(start: Settings, settings: Settings, outcome: Outcome, again: Again) -> str:
    expect_moved_only(start, settings, ("num_blocks",))
    seen, blocks = first_preemption(outcome), settings.num_blocks
    expect(not seen, f"With {blocks} blocks {seen}.")
    try:
        fewer = first_preemption(again(replace(settings, num_blocks=blocks - 1)))
    except Problems:
        fewer = "a request alone does not fit"
    expect(fewer, f"With {blocks} blocks nobody is preempted, but neither is with {blocks - 1}.")
    return f"With {blocks} blocks nobody is preempted, and with {blocks - 1} {fewer}."


def first_preemption(outcome: Outcome) -> str:
    assert outcome.run is not None
    for step in outcome.run.steps:
        if step.preempted:
            return f"request {step.preempted[0]} is preempted in step {step.number}"
    return ""


def steps_saved(start: Settings, settings: Settings, outcome: Outcome, again: Again) -> str:
    requests = len(settings.requests)
    expect(not settings.fault, f"The fault is {settings.fault}; the lesson is about a sound engine.")
    expect(requests >= len(start.requests), f"There is {counted(requests, 'request')}, expected at least two.")
    expect(settings.drafts, "There are no drafts: every token takes a step of its request.")
    plain = again(replace(settings, drafts=0))
    if plain.stopped or plain.counts is None or outcome.counts is None:
        raise Wrong(f"Without drafts: {plain.stopped}")
    expect(plain.tokens == outcome.tokens, "The tokens are not the same as without drafts.")
    steps, without = outcome.counts.steps, plain.counts.steps
    seen = f"The same tokens take {counted(steps, 'step')} with drafts and {without} without"
    expect(without >= LEAST_PLAIN_STEPS, f"{seen}: expected at least {LEAST_PLAIN_STEPS} without.")
    most = without - -(-without // 3)
    expect(steps <= most, f"{seen}: expected at most {most} with drafts.")
    return f"{seen}: a third or more is saved."


def expect_moved_only(start: Settings, settings: Settings, may: tuple[str, ...]) -> None:
    """Wrong, where something changed that has to stay."""
    for field in fields(Settings):
        old, new = getattr(start, field.name), getattr(settings, field.name)
        if field.name in (*may, "lesson") or old == new:
            continue
        if field.name == "requests":
            raise Wrong(requests_moved(old, new))
        raise Wrong(f"{query_name(field.name)} is {told(new) or 'none'}, and has to stay {told(old) or 'none'}.")


def requests_moved(old: tuple[Asked, ...], new: tuple[Asked, ...]) -> str:
    if len(old) != len(new):
        return f"There {'is' if len(new) == 1 else 'are'} {counted(len(new), 'request')}; the lesson has {len(old)}."
    index = next(index for index, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
    name, was, now = NAMES[index], old[index], new[index]
    what = next(what for what in ("prompt", "max_tokens", "arrival") if getattr(was, what) != getattr(now, what))
    return (
        f"The {what.replace('max_', 'number of ')} of request {name} is {show(getattr(now, what))}, and has to "
        f"stay {show(getattr(was, what))}."
    )
