"""The predictions of the six lessons. What is right, and why a mistake is wrong, is counted in the run asked about.

A sentence holds for a learner's settings as well as for the lesson's. Drafts and faults are left out, but where the
question is about them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from lfm2np.oracle.report.markup import counted
from lfm2np.teaching.drawings.runs.recorded_run import Run
from lfm2np.teaching.lab.compute import Outcome
from lfm2np.teaching.lab.predictions import Number, Prediction, Which, Wrong
from lfm2np.teaching.lab.settings import Asked, Settings

CROSSING, STATELESS = "convolution-crosses-requests", "single-token-step-has-no-state"


def sound(settings: Settings, **changes: Any) -> Settings:
    """The settings with changes, without drafts and fault."""
    without: dict[str, Any] = {"fault": "", "drafts": 0}
    return replace(settings, **(without | changes))


def run_of(outcome: Outcome) -> Run:
    assert outcome.run is not None
    return outcome.run


def shares(run: Run, name: str) -> list[tuple[int, int, bool]]:
    """Of one request: the step, the rows that it has in it, and whether a token came out."""
    return [
        (step.number, len(entry.token_ids), name in step.tokens)
        for step in run.steps
        for entry in step.entries
        if entry.request_id == name
    ]


def joined(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


# --- 1: prefill and decode


def longer_answer(settings: Settings) -> Settings:
    return sound(settings, requests=(replace(settings.requests[0], arrival=0, max_tokens=9),))


def small_budget(settings: Settings) -> Settings:
    return sound(settings, requests=(replace(settings.requests[0], arrival=0, max_tokens=6),), budget=1, chunked=True)


def steps_of_answer(now: Outcome, then: Outcome) -> Number:
    """One request: steps without a token are the first chunks of its prompt."""
    run, tokens = run_of(then), len(then.tokens["a"])
    steps, prompt = len(run.steps), len(run.requests["a"].prompt)
    before = len(run_of(now).steps)
    rows, decodes, chunks = sum(step.num_tokens for step in run.steps), tokens - 1, steps - tokens + 1
    prefill = "the prefill" if chunks == 1 else f"{chunks} steps for the prompt"
    return Number(
        steps,
        f"{counted(steps, 'step')}: {prefill}, where the first token comes out, and {counted(decodes, 'decode')} for "
        "the others.",
        (
            (steps + 1, f"{steps + 1} would be right if the last token went in as well. Nobody asks what follows it."),
            (decodes, f"{decodes} is the number of decodes. The prefill is a step, too."),
            (
                rows,
                f"{rows} is the number of rows. Rows of one step are computed together, and the prompt has {prompt}.",
            ),
            (prompt + tokens, f"{prompt + tokens} counts the tokens of prompt and answer, not the steps."),
            (before, f"It takes {before} steps now. Each further token takes a decode of its own."),
        ),
        "Count a step for the prompt, which gives the first token, and one for each further token.",
    )


def steps_of_rows(now: Outcome, then: Outcome) -> Number:
    run, tokens = run_of(then), len(then.tokens["a"])
    steps, prompt, before = len(run.steps), len(run.requests["a"].prompt), len(run_of(now).steps)
    return Number(
        steps,
        f"A step computes one row: {prompt} steps for the prompt, the last of which gives the first token, and "
        f"{counted(tokens - 1, 'decode')}. That is {counted(steps, 'step')}.",
        (
            (
                prompt + tokens,
                f"{prompt + tokens} would be right if the last token went in as well, or if the last row of the prompt "
                "gave no token.",
            ),
            (
                before,
                f"It takes {before} steps now. With a budget of 1 a prompt of {prompt} rows no longer fits into one "
                "step.",
            ),
            (prompt, f"{prompt} steps are for the prompt alone. The decodes follow."),
            (tokens - 1, f"{tokens - 1} is the number of decodes. The prompt takes steps, too."),
        ),
        "One row is one step. How many rows has the prompt, and how many tokens go in after it?",
    )


ONE = (
    Prediction(
        "Suppose that request a may say 9 tokens, and is alone. How many steps will the run take?",
        longer_answer,
        steps_of_answer,
    ),
    Prediction(
        "Suppose that the budget is 1 token, and that request a, alone, may say 6. How many steps will the run take?",
        small_budget,
        steps_of_rows,
    ),
)


# --- 2: batches and padding


def steps_of_batch(now: Outcome, then: Outcome) -> Number:
    run, steps, before = run_of(then), len(run_of(then).steps), len(run_of(now).steps)
    longest = max(then.tokens, key=lambda name: len(then.tokens[name]))
    tokens, most = len(then.tokens[longest]), run.requests[longest].max_tokens
    assert then.counts is not None and now.counts is not None
    until = f"A batch runs until its longest member has ended, and request {longest} alone says {tokens} tokens."
    hint = (
        "The batch runs until its longest member has ended. Which one is it, and how many tokens does it say, the end "
        "included?"
    )
    mistakes = []
    if steps == tokens:  # one batch, whose prompts take one step
        mistakes += [
            (steps + 1, f"{steps + 1} would be right if the prefill gave no token: it gives the first one."),
            (steps - 1, f"{steps - 1} would be the decodes. The prefill is a step, too."),
        ]
    if (now.settings.policy, 2 * now.settings.slots) == ("static", then.settings.slots):
        halves = {before // 2, -(-before // 2)}
        mistakes += [(half, f"{half} would be right if twice the slots halved the steps. {hint}") for half in halves]
    return Number(
        steps,
        f"{counted(steps, 'step')}. {until} Fewer steps, but {counted(then.counts.wasted, 'cell')} of padding; it is "
        f"{now.counts.wasted} now: members that have ended keep their rows.",
        (
            *mistakes,
            (before, f"It takes {before} steps now, with {counted(now.settings.slots, 'slot')}."),
            (most, f"Request {longest} may say {most} tokens, but it ends before: count its answer, the end included."),
            (
                sum(map(len, then.tokens.values())),
                "That is the number of all tokens. A step gives a token to each member of the batch.",
            ),
        ),
        hint,
    )


def empty_cells(now: Outcome, then: Outcome) -> Number:
    """Of the step in which request e begins."""
    run = run_of(then)
    for step in run.steps:
        begins = [entry for entry in step.entries if entry.request_id == "e" and entry.start == 0]
        if begins:
            break
    else:
        raise Wrong("No step computes the prompt of request e: the question is about the lesson's six requests.")
    width, height, rows = max(len(entry.token_ids) for entry in step.entries), len(step.entries), step.num_tokens
    assert then.counts is not None
    empty, others = height * width - rows, height - 1
    return Number(
        empty,
        f"Step {step.number} is a rectangle of {height} rows and {width} columns, and {rows} of its {height * width} "
        f"cells are computed: {empty} are empty"
        + (f", ({width} - 1)({height} - 1)." if empty == (width - 1) * others else "."),
        (
            (
                width * others,
                f"{width * others} counts the rows beside the prompt whole. Each decode computes one cell.",
            ),
            (width - 1, f"{width - 1} are the empty cells of one decode. There are {others}."),
            (
                (width - 1) * height,
                f"{(width - 1) * height} would be right if the prompt's own row had empty cells, too. It is as long "
                "as the rectangle is wide.",
            ),
            (height * width, f"{height * width} is the whole rectangle. The computed cells are not empty."),
            (rows, f"{rows} cells of the rectangle are computed. The question is about the others."),
            (then.counts.wasted, f"{then.counts.wasted} cells are empty in all steps together."),
        ),
        "The rectangle is as wide as the prompt, and has a row for each request of the step: who decodes beside e?",
    )


TWO = (
    Prediction(
        "Suppose that the policy stays static, and that there are 6 slots: all six requests are one batch. How many "
        "steps will the run take?",
        partial(sound, policy="static", slots=6),
        steps_of_batch,
    ),
    Prediction(
        "Suppose that the policy is fcfs, with 3 slots. One step takes the prompt of request e, of 17 tokens, beside "
        "decodes. Drawn as a rectangle, how many of its cells are empty?",
        partial(sound, policy="fcfs", slots=3),
        empty_cells,
    ),
)


# --- 3: faults


def together(settings: Settings) -> Settings:
    return sound(settings, requests=tuple(replace(asked, arrival=0) for asked in settings.requests), fault=CROSSING)


def behind(run: Run, name: str) -> str:
    """Where a request begins right behind another one; "" where it does not."""
    for step in run.steps:
        names = [entry.request_id for entry in step.entries]
        if name in names[1:] and step.entries[names.index(name)].start == 0:
            return f"in step {step.number} it begins behind request {names[names.index(name) - 1]}"
    return ""


def harmed(outcome: Outcome) -> frozenset[str]:
    return frozenset(name for name, changed in outcome.changed.items() if changed.logits or changed.tokens)


def harmed_behind(now: Outcome, then: Outcome) -> Which:
    right, run = harmed(then), run_of(then)
    elsewise = "in no step does it begin behind another"
    reasons = {name: behind(run, name) or elsewise for name in then.changed}
    because = "A request that begins behind another one is harmed, in its first rows. The first of the step is not."
    hint = (
        "The first rows of a prompt take in the rows before them in the step. Whose rows are these, for each request?"
    )
    return Which(right, because, reasons, hint)


def harmed_in_decodes(now: Outcome, then: Outcome) -> Which:
    reasons = dict.fromkeys(then.changed, "it never has a share of one row")
    because = "The bug is in each decode, and needs nobody else. A request alone would have other logits, too."
    hint = "Which requests have a step with a single row? It does not matter who is beside them."
    return Which(harmed(then), because, reasons, hint)


THREE = (
    Prediction(
        "Suppose that all requests come in step 0. Which will have other logits than without this fault?",
        together,
        harmed_behind,
        of_requests=True,
    ),
    Prediction(
        f"Suppose that the fault is {STATELESS}: a share of one row, as a decode has, is convolved with zeros. Which "
        "requests will have other logits than without it?",
        partial(sound, fault=STATELESS),
        harmed_in_decodes,
        of_requests=True,
    ),
)


# --- 4: who goes first


def first_token(run: Run, name: str) -> int:
    return next(step.number for step in run.steps if name in step.tokens)


def step_of_first_token(now: Outcome, then: Outcome) -> Number:
    run, name = run_of(then), "c"
    if name not in run.requests:
        raise Wrong("There is no request c: the question is about the lesson's six requests.")
    first, asked = first_token(run, name), run.requests[name]
    chunks = [(step, rows) for step, rows, _ in shares(run, name) if step <= first]
    unfinished, computed = [], 0
    for step, rows in chunks[:-1]:
        computed += rows
        unfinished.append(
            (
                step,
                f"In step {step} its prompt is not whole: {computed} of {len(asked.prompt)} rows are computed, and "
                "only the last one gives a token.",
            )
        )
    before = first_token(run_of(now), name) if name in run_of(now).requests else -1
    sizes = [str(rows) for _, rows in chunks]
    return Number(
        first,
        f"Its prompt of {len(asked.prompt)} rows goes in as {joined(sizes)} in steps "
        f"{joined([str(step) for step, _ in chunks])}, and only the last row gives a token.",
        (
            *unfinished,
            (first + 1, f"{first + 1} would be right if steps were counted from 1. The first step is step 0."),
            (before, "There it is now. With 8 rows a step its prompt has to share with requests that came before."),
            (asked.arrival, f"It comes in step {asked.arrival}, but its prompt does not fit into that step."),
        ),
        "Fill each step with 8 rows, the oldest request first: a decode takes 1, and a prompt what is left.",
    )


def who_waits(now: Outcome, then: Outcome) -> Which:
    run = run_of(then)
    starts = {name: step.number for step in reversed(run.steps) for name in step.admitted}
    reasons, right = {}, set()
    for name, start in sorted(starts.items()):
        came = run.requests[name].arrival
        if start == came:
            reasons[name] = f"it comes in step {came}, and starts there"
        else:
            right.add(name)
    until = joined([f"request {name} until step {starts[name]}" for name in sorted(right)])
    because = f"They wait for a slot: {until}." if right else "A slot is free whenever one comes."
    return Which(right, because, reasons, "Two run at a time. When does each come, and who holds the slots then?")


FOUR = (
    Prediction(
        "Suppose that the budget is 8 tokens. In which step will request c have its first token? The first step is "
        "step 0.",
        partial(sound, policy="fcfs", budget=8, slots=4, chunked=True),
        step_of_first_token,
    ),
    Prediction(
        "Suppose that there are 2 slots, and a budget of 32. Which requests can't start in the step in which they "
        "come?",
        partial(sound, policy="fcfs", budget=32, slots=2),
        who_waits,
        of_requests=True,
    ),
)


# --- 5: memory


def preempted_first(now: Outcome, then: Outcome) -> Which:
    run = run_of(then)
    preempted = {name: step.number for step in reversed(run.steps) for name in step.preempted}
    step = next((step for step in run.steps if step.preempted), None)
    if step is None:
        enough = "it is never preempted: the blocks are enough"
        return Which((), "No request is preempted: the blocks are enough.", dict.fromkeys(run.requests, enough), "")
    first = step.preempted[0]
    running = [name for number in range(step.number) for name in run.steps[number].admitted]
    reasons = {}
    for name, asked in run.requests.items():
        if name in running and name not in step.preempted:
            later = f". It is preempted later, in step {preempted[name]}" if name in preempted else ""
            reasons[name] = (
                f"when a block is missing, in step {step.number}, the youngest that runs gives way, and this one came "
                f"earlier, in step {asked.arrival}{later}"
            )
        else:
            reasons[name] = f"in step {step.number}, when a block is missing, another one goes first"
    because = f"In step {step.number} a block is missing. Request {first} is the youngest that runs, and gives way."
    hint = "The blocks run out. Who gives way then: the youngest that runs, or the largest?"
    return Which({first}, because, reasons, hint)


def blocks_at_the_end(now: Outcome, then: Outcome) -> Number:
    run, size = run_of(then), then.settings.block_size
    last, prompt, tokens = run.steps[-1].entries[-1], len(run.requests["a"].prompt), len(then.tokens["a"])
    blocks, places = len(last.block_table), last.stop
    of_all, of_prompt, of_answer = (-(-count // size) for count in (prompt + tokens, prompt, tokens))
    return Number(
        blocks,
        f"{prompt} tokens of the prompt and {tokens - 1} of the answer are computed, {places} in all: the last token "
        f"never goes in. That is {counted(blocks, 'block')} of {size}.",
        (
            (
                of_all,
                f"{of_all} would be right if the last token went in as well: {prompt} and {tokens} are "
                f"{prompt + tokens} tokens.",
            ),
            (of_prompt, f"{counted(of_prompt, 'block')} are enough for the prompt alone."),
            (of_answer, f"{counted(of_answer, 'block')} are enough for the answer alone."),
            (places, f"{places} is the number of tokens. A block holds {size}."),
            (prompt + tokens, f"{prompt + tokens} is the number of tokens. A block holds {size}."),
        ),
        "Count the tokens that go in, of prompt and answer, and divide: a block that is begun is taken whole.",
    )


FIVE = (
    Prediction(
        "A request alone has a prompt of 9 tokens, and says 8. How many blocks of 4 tokens will it hold in its last "
        "step?",
        partial(sound, requests=(Asked("count: 23 to 27 ->", 0, 8),), block_size=4),
        blocks_at_the_end,
    ),
    Prediction(
        "Suppose that there are 11 blocks. Which request will be preempted first?",
        partial(sound, policy="fcfs", num_blocks=11),
        preempted_first,
        of_requests=True,
    ),
)


# --- 6: drafts


def accepted_of(now: Outcome, then: Outcome) -> Which:
    run = run_of(then)
    right, reasons = set(), {}
    for name in run.requests:
        guessed = accepted = 0
        for step in run.steps:
            for entry in step.entries:
                if entry.request_id == name and entry.num_drafts:
                    guessed += entry.num_drafts
                    accepted += len(step.tokens.get(name, ())) - 1
        if accepted:
            right.add(name)
        reasons[name] = (
            f"{accepted} of its {counted(guessed, 'draft')} {'is' if accepted == 1 else 'are'} right"
            if guessed
            else "nothing of it comes twice, so nothing is guessed"
        )
    because = " ".join(f"Request {name}: {reason}." for name, reason in reasons.items())
    hint = "A draft copies what followed earlier. Whose prompt and answer have the same tokens in a row twice?"
    return Which(right, because, reasons, hint)


def steps_with_drafts(now: Outcome, then: Outcome) -> Number:
    steps, tokens, drafts = len(run_of(then).steps), len(then.tokens["a"]), then.settings.drafts
    too_few = -(-tokens // (drafts + 1))
    without = 1 - (1 - tokens) // drafts
    return Number(
        steps,
        f"{counted(steps, 'step')}: the prefill gives one token, and each later step up to {drafts + 1}, the drafts "
        f"and the one that the engine chooses behind them. Without drafts it would be {tokens} steps.",
        (
            (tokens, f"{tokens} would be right without drafts: a token a step."),
            (too_few, f"{too_few} would be right if the prefill gave {drafts + 1} tokens, too. It has no drafts yet."),
            (
                without,
                f"{without} would be right if a step gave {drafts} tokens. It gives one more: behind the last draft "
                "that is right the engine chooses a token itself.",
            ),
            (steps - 1, f"{steps - 1} steps have drafts. The prefill is a step, too."),
            (-(-tokens // drafts), f"A step gives more than {drafts} tokens, and the prefill gives one."),
        ),
        "Count one token for the prefill. How many can a step give when all its drafts are right?",
    )


SIX = (
    Prediction(
        "Suppose that there are 4 drafts. Which requests will have a draft that is right?",
        partial(sound, drafts=4),
        accepted_of,
        of_requests=True,
    ),
    Prediction(
        "A request alone copies zo sa zo sa zo sa zo sa zo sa, with 2 drafts. It says 11 tokens, the end included, and "
        "all drafts are right until it ends. How many steps will the run take?",
        partial(sound, requests=(Asked("copy: zo sa zo sa zo sa zo sa zo sa ->", 0, 24),), drafts=2, budget=64),
        steps_with_drafts,
    ),
)
