"""Six guided lessons. Each asks for a run with some property; the engine says whether a run has it.

They follow docs/learn. An answer is settings, so there is nothing to compare with: a check counts what the run did, and
runs the engine again with other settings where that is the question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lfm2np.lab import checks
from lfm2np.lab.checks import Again, Verdict, Wrong
from lfm2np.lab.compute import Outcome
from lfm2np.lab.settings import Asked, Settings


@dataclass(frozen=True)
class Lesson:
    """`view` is the id of the view to look at. `check` is called for a run of at least one step."""

    number: int
    title: str
    text: tuple[str, ...]  # paragraphs
    start: Settings
    view: str
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
    view="timeline",
    question="Make this one request take exactly 7 steps, with the same prompt and the same six tokens.",
    hint="Five decodes are five steps, whatever you do. Which setting cuts the prefill into two?",
    judge=checks.one_request,
)

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
    view="policies",
    question="The same requests in no more steps than now, 25, and with at most a third of the wasted cells, 19.",
    hint="Waste comes from members that have ended, and from prompts and decodes in one step. One of the policies "
    "avoids both.",
    judge=checks.less_waste,
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
    view="isolation",
    question="Keep the fault, and at least two of the requests. Hide the bug: every token and every logit is right.",
    hint="The fault needs a row of another request right before the first row of a prompt. When is there none?",
    judge=checks.hidden_fault,
)

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
    view="timeline",
    question="No step has more than 8 rows, and yet each request has its first token at most 3 steps after it came.",
    hint="A budget of 8 bounds the rows. Who still waits then, and for what: for a slot, or for decodes?",
    judge=checks.quick_and_even,
)

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
    view="memory",
    question="Find the smallest number of blocks with which nobody is preempted. Change nothing else.",
    hint="With plenty of blocks, look at the step in which most are in use, and count.",
    judge=checks.smallest_pool,
)

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
    question="Choose drafts, and at least two prompts, so that a third of the steps is saved. Without drafts the run "
    "has to take 6 steps or more.",
    hint="Which tasks of the trained model have answers that stand in the prompt?",
    judge=checks.steps_saved,
)

LESSONS: Mapping[int, Lesson] = {lesson.number: lesson for lesson in (ONE, TWO, THREE, FOUR, FIVE, SIX)}
