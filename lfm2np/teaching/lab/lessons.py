"""Six guided lessons. Each has two predictions, and asks for a run with some property; the engine judges all of them.

They follow docs/learn. The last answer is settings, so there is nothing to compare with: a check counts what the run
did, and runs the engine again with other settings where that is the question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from lfm2np.oracle.report.markup import counted
from lfm2np.teaching.drawings.runs.recorded_run import Run
from lfm2np.teaching.lab import exercises
from lfm2np.teaching.lab.compute import Outcome
from lfm2np.teaching.lab.exercises import behind
from lfm2np.teaching.lab.predictions import Again, Prediction, Verdict, Wrong
from lfm2np.teaching.lab.settings import NAMES, Asked, Problems, Settings, query_name, setting_text
from lfm2np.values import show

STEPS_OF_ONE = 7
MOST_WASTED, MOST_STATIC_STEPS = 19, 25
MOST_ROWS, MOST_WAIT = 8, 3
LEAST_PLAIN_STEPS = 6
OF_THE_ENGINE = ("policy", "budget", "slots", "chunked", "block_size", "num_blocks", "prefix_caching")


def expect(condition: object, sentence: str) -> None:
    if not condition:
        raise Wrong(sentence)


@dataclass(frozen=True)
class Lesson:
    """`view` is the id of the view to look at. `check` is called for a run of at least one step."""

    number: int
    title: str
    text: tuple[str, ...]  # paragraphs
    start: Settings
    view: str
    predictions: Sequence[Prediction]
    question: str
    hint: str
    judge: Callable[[Settings, Settings, Outcome, Again], str]  # start, settings, their outcome, again

    def check(self, settings: Settings, outcome: Outcome, again: Again) -> Verdict:
        if outcome.stopped or outcome.run is None:
            return Verdict(False, f"{outcome.stopped} So it can't be judged.")
        try:
            return Verdict(True, self.judge(self.start, settings, outcome, again))
        except Wrong as wrong:
            return Verdict(False, str(wrong))


def expect_moved_only(start: Settings, settings: Settings, may: tuple[str, ...]) -> None:
    """Wrong, where something changed that has to stay."""
    for field in fields(Settings):
        old, new = getattr(start, field.name), getattr(settings, field.name)
        if field.name in (*may, "lesson") or old == new:
            continue
        if field.name == "requests":
            raise Wrong(requests_moved(old, new))
        raise Wrong(
            f"{query_name(field.name)} is {setting_text(new) or 'none'}, and has to stay {setting_text(old) or 'none'}."
        )


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


ONE = Lesson(
    number=1,
    title="One request: prefill and decode",
    text=(
        "The paper model gets a prompt of four tokens and may say six. In its first step the whole prompt goes in, and "
        "one token comes out: the prefill. In each later step the token that came out goes in, and one more comes out: "
        "a decode. The last token never goes in, since nobody asks what follows it.",
        "So the run has 6 steps and 9 rows. A step is one pass over all weights, whether it computes four rows or one.",
        "A step has a budget of tokens. A prompt that does not fit into it goes in by chunks, and only the step that "
        "computes its last row gives a token.",
    ),
    start=Settings(
        model="paper",
        requests=(Asked("<start> the cat sees", 0, 6),),
        block_size=2,
        num_blocks=16,
        budget=16,
        slots=1,
        lesson=1,
    ),
    view="schedule",
    predictions=exercises.ONE,
    question="Make this one request take exactly 7 steps, with the same prompt and the same six tokens.",
    hint="Five decodes are five steps, whatever you do. Which setting cuts the prefill into two?",
    judge=one_request,
)


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


TWO = Lesson(
    number=2,
    title="Why is my batch wasted?",
    text=(
        "Six requests, three at a time, batched by requests: the policy static. A batch runs until its longest member "
        "has ended, and who has ended keeps a row until then. Drawn as rectangles, the steps have 57 cells in which "
        "nothing is computed.",
        "Other policies let a request in as soon as another one has left. That takes fewer steps. But a step that "
        "computes a prompt of n tokens beside B - 1 decodes is a rectangle of B rows and n columns, and "
        "(n - 1)(B - 1) of its cells are empty.",
        "This engine never pads: its batch is one flat array. The count says what a padded one would waste.",
    ),
    start=Settings(
        requests=(
            Asked("copy: red ->", 0, 8),
            Asked("add: 34 + 58 ->", 0, 8),
            Asked("sort: 7 2 9 4 1 ->", 0, 10),
            Asked("count: 23 to 31 ->", 0, 24),
            Asked("recall: f = 7, r = 2, v = 2; f ->", 0, 8),
            Asked("copy: tivu zo sa ->", 0, 10),
        ),
        policy="static",
        num_blocks=64,
        budget=64,
        slots=3,
        lesson=2,
    ),
    view="schedule",
    predictions=exercises.TWO,
    question="The same requests in no more steps than now, 25, and with at most a third of the wasted cells, 19.",
    hint="Waste comes from members that have ended, and from prompts and decodes in one step. One of the policies "
    "avoids both.",
    judge=less_waste,
)


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
        where = behind(outcome.run, name)
        sentence = f"Request {name} has other {what} than without the fault{where and f': {where}'}."
        expect(not changed.tokens and not changed.logits, sentence)
    return (
        "Every token and every logit is the same with the fault and without it: in no step does a prompt begin right "
        "behind another request. A test that runs like this would never find the bug."
    )


THREE = Lesson(
    number=3,
    title="Who can see whom?",
    text=(
        "The usual picture says that requests of one batch meet in attention only, so that a mask keeps them apart. "
        "LFM2 has convolutions, which look two rows back. In a flat batch those may be rows of somebody else.",
        "This engine has that bug now: the first rows of a prompt are convolved with the last rows of the request "
        "before it in the step. All tokens are right, or nearly so, and the logits are not.",
        "Such a bug lives for years, as there are always settings under which nobody can see it.",
    ),
    start=Settings(
        requests=(
            Asked("copy: red blue ->", 0, 6),
            Asked("sort: 3 1 2 ->", 0, 6),
            Asked("add: 34 + 58 ->", 1, 6),
        ),
        num_blocks=32,
        budget=32,
        fault="convolution-crosses-requests",
        lesson=3,
    ),
    view="ragged",
    predictions=exercises.THREE,
    question="Keep the fault, and at least two of the requests. Hide the bug: every token and every logit is right.",
    hint="The fault needs a row of another request right before the first row of a prompt. When is there none?",
    judge=hidden_fault,
)


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


FOUR = Lesson(
    number=4,
    title="Who goes first?",
    text=(
        "Six requests come in the first five steps. With a budget of 32 rows every prompt goes in at once, and the "
        "steps that take a prompt are long: all that decode wait for them.",
        "A smaller budget makes steps short and even. But then prompts wait, for decodes, for other prompts, and for a "
        "slot.",
        "Both have names: time per token, and time to first token. A policy is a choice between them.",
    ),
    start=Settings(
        requests=(
            Asked("copy: red ->", 0, 8),
            Asked("count: 23 to 31 ->", 0, 24),
            Asked("sort: 7 2 9 4 1 ->", 1, 10),
            Asked("add: 34 + 58 ->", 2, 8),
            Asked("recall: f = 7, r = 2, v = 2; f ->", 3, 8),
            Asked("copy: tivu zo sa ->", 4, 10),
        ),
        num_blocks=64,
        budget=32,
        slots=4,
        lesson=4,
    ),
    view="schedule",
    predictions=exercises.FOUR,
    question="No step has more than 8 rows, and yet each request has its first token at most 3 steps after it came.",
    hint="A budget of 8 bounds the rows. Who still waits then, and for what: for a slot, or for decodes?",
    judge=quick_and_even,
)


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


FIVE = Lesson(
    number=5,
    title="How much memory is enough?",
    text=(
        "A request takes a block of the pool when it needs one, not for its whole answer ahead. So the pool may run "
        "out while requests run. Then the youngest one is preempted: it gives its blocks back, waits, and is computed "
        "again.",
        "No token changes by it. It costs steps, and rows that are computed twice.",
        "Request d has the prompt of c. What c has computed can be found in the prefix cache, so d needs less.",
    ),
    start=Settings(
        requests=(
            Asked("count: 23 to 27 ->", 0, 12),
            Asked("count: 31 to 35 ->", 1, 12),
            Asked("copy: tivu zo sa ->", 2, 8),
            Asked("copy: tivu zo sa ->", 4, 8),
        ),
        num_blocks=9,
        budget=32,
        slots=4,
        lesson=5,
    ),
    view="pool",
    predictions=exercises.FIVE,
    question="Find the smallest number of blocks with which nobody is preempted. Change nothing else.",
    hint="With plenty of blocks, look at the step in which most are in use, and count.",
    judge=smallest_pool,
)


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


SIX = Lesson(
    number=6,
    title="Guess, then check",
    text=(
        "A decode computes one row, and reads all weights for it. With speculation somebody guesses the next tokens, "
        "one step computes them all, and those that are right are kept. The answer is the same, token for token.",
        "The guesser here only copies: it looks where the newest tokens stood before, and guesses that what followed "
        "there follows again. It needs no model, and it knows nothing.",
        "So what it saves depends on the text.",
    ),
    start=Settings(
        requests=(Asked("add: 34 + 58 ->", 0, 8), Asked("count: 23 to 31 ->", 0, 24)),
        num_blocks=64,
        budget=64,
        lesson=6,
    ),
    view="speculation",
    predictions=exercises.SIX,
    question="Choose drafts, and at least two prompts, so that a third of the steps is saved. Without drafts the run "
    "has to take 6 steps or more.",
    hint="Which tasks of the trained model have answers that stand in the prompt?",
    judge=steps_saved,
)


LESSONS: Mapping[int, Lesson] = {lesson.number: lesson for lesson in (ONE, TWO, THREE, FOUR, FIVE, SIX)}
