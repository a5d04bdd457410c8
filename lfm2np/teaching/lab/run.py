"""One run of the page: the real engine on the learner's requests, with a fault and without it.

The engine runs as it is; what is added is a bound on its steps, and that whatever a fault makes it raise is an answer.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.drafters import NgramDrafter
from lfm2np.engine.engine import Engine, OnLogits
from lfm2np.engine.loading import Model, load
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.sequential import answer_alone
from lfm2np.errors import Lfm2npError, RequestError
from lfm2np.oracle.report.markup import counted
from lfm2np.teaching.drawings.demo import hand_model
from lfm2np.teaching.drawings.runs.leaks import Leak, leak
from lfm2np.teaching.drawings.runs.other_policies import passes
from lfm2np.teaching.drawings.runs.recorded import Coming, DetailedTrace, played, texts
from lfm2np.teaching.drawings.runs.recorded_run import Run, read_run
from lfm2np.teaching.faults import inject
from lfm2np.teaching.lab.settings import NAMES, Problems, Settings
from lfm2np.values import plain, show

MODELS = ("trained", "paper")
MOST_STEPS = 150  # of a run; beyond it a page would be tens of megabytes
START = "<start>"
# By request, in the order in which its tokens came: a position, and the SHA-256 of the whole row of logits.
Logits = dict[str, list[tuple[int, str]]]


# --- the two models


@dataclass(frozen=True, eq=False)
class Chosen:
    """One of the models. Without words it has a tokenizer."""

    model: Model
    words: Sequence[str]
    texts: Mapping[int, str]  # of every token


@cache
def chosen(name: str) -> Chosen:
    model, words = (load(), []) if name == "trained" else hand_model()[:2]
    return Chosen(model, words, texts(model, words, range(model.config.vocab_size)))


def token_ids(prompt: str, of: Chosen) -> list[int]:
    """Of text by the tokenizer; of words by their numbers, `<start>` first. RequestError for an unknown word."""
    if not of.words:
        return list(of.model.prompt_ids(prompt))
    words = prompt.split()
    words = words if words[:1] == [START] else [START, *words]
    for word in words:
        if word not in of.words:
            raise RequestError(f"{show(word)}: no word of the paper model, expected {' '.join(of.words)}.")
    return [of.words.index(word) for word in words]


def coming_of(settings: Settings) -> list[Coming]:
    """Greedy, until the end token or as many as may come."""
    of = chosen(settings.model)
    return [
        Coming(
            name, token_ids(asked.prompt, of), SamplingParams(temperature=0.0, max_tokens=asked.tokens), asked.arrival
        )
        for name, asked in zip(NAMES, settings.requests, strict=False)
    ]


def require_fits(settings: Settings) -> None:
    """Problems with what the model's words, its context and the pool have against a run."""
    of, problems, needed = chosen(settings.model), dict[str, str](), dict[str, int]()
    context = of.model.config.max_position_embeddings
    for index, asked in enumerate(settings.requests):
        try:
            prompt = len(token_ids(asked.prompt, of))
        except Lfm2npError as problem:
            problems[f"prompt-{index}"] = str(problem)
            continue
        if prompt + asked.tokens > context:
            sizes = f"The prompt has {prompt} tokens and may get {asked.tokens} more"
            problems[f"prompt-{index}"] = f"{sizes}, expected at most {context} together."
        else:  # the last token is never computed
            needed[NAMES[index]] = -(-(prompt + asked.tokens - 1) // settings.block_size)
    largest = max(needed, key=lambda name: needed[name], default="")
    if largest and needed[largest] > settings.blocks:
        sizes = f"{settings.blocks} blocks of {settings.block_size} tokens"
        problems["blocks"] = f"{sizes}: request {largest} alone needs {needed[largest]}."
    if problems:
        raise Problems(problems)


# --- what the engine does


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one engine did.

    run      None where no request got a token: there is nothing to draw
    tokens   by request, as it was answered: not all that came, under some faults
    stopped  one sentence, where it did not end by itself; "": it did
    sound    the same without the fault, where there is one
    """

    settings: Settings
    run: Run | None
    tokens: Mapping[str, tuple[int, ...]]
    logits: Logits
    stopped: str
    sound: Outcome | None = None

    @cached_property
    def wasted(self) -> int:
        """The cells that rectangles would add to the run's own steps."""
        return sum(each.padding for each in passes(self.run)) if self.run else 0

    @cached_property
    def changed(self) -> Mapping[str, str]:
        """By request what its fault changed: "tokens"; else "logits"; "cut", what was stopped and right so far; "".

        Logits are whole rows as the engine told them, by SHA-256, and compared as far as both runs have them: the
        recorded numbers of lm_head are only the first few.
        """
        return {name: self._changed(name, self.sound) for name in self.names} if self.sound else {}

    def _changed(self, name: str, sound: Outcome) -> str:
        said, right = self.tokens.get(name, ()), sound.tokens.get(name, ())
        rows = zip(self.logits.get(name, ()), sound.logits.get(name, ()), strict=False)
        has_other_logits = any(row != other for row, other in rows)
        if self.stopped and said != right and said == right[: len(said)] and not has_other_logits:
            return "cut"
        return "tokens" if said != right else "logits" if has_other_logits else ""

    @property
    def names(self) -> str:
        return NAMES[: len(self.settings.requests)]


def play(settings: Settings, is_detailed: bool = False) -> Outcome:
    """Until all requests have ended, the steps are too many, or the engine raises, which it does under faults only.

    is_detailed  with the numbers of every operation, to be drawn
    """
    of, file, stopped = chosen(settings.model), io.StringIO(), ""
    logits, tokens = Logits(), dict[str, tuple[int, ...]]()
    detailed = DetailedTrace(of.model, of.words) if is_detailed else None
    model = detailed.model if detailed else of.model
    with inject(settings.fault) if settings.fault else nullcontext(), np.errstate(all="ignore"):
        try:
            engine = make_engine(settings, model, trace=file, on_logits=noted_in(logits))
            step = partial(detailed.step, engine) if detailed else engine.step
            for outputs in itertools.islice(played(engine, coming_of(settings), step), MOST_STEPS):
                tokens |= {output.request_id: tuple(output.outputs[0].token_ids) for output in outputs}
            if engine.has_unfinished:
                stopped = f"The run was stopped after {MOST_STEPS} steps, before all requests had ended."
        except Exception as problem:  # a fault may raise anything
            if not settings.fault:
                raise
            message = plain(" ".join(str(problem).split())[:120].rstrip(".") or "no message")
            stopped = f"With this fault the engine ended with {type(problem).__name__}: {message}."
    lines = file.getvalue().splitlines()
    has_tokens = any(json.loads(line).get("tokens") for line in lines)
    run = replace(read_run(lines, is_whole=False), texts=of.texts) if has_tokens else None
    sound = play(replace(settings, fault="")) if settings.fault else None
    return Outcome(settings, run, tokens, logits, stopped, sound)


def noted_in(logits: Logits) -> OnLogits:
    """What an engine calls with each row of logits, which goes into `logits`."""

    def note(name: str, position: int, row: Any, token: int) -> None:
        logits.setdefault(name, []).append((position, hashlib.sha256(row.tobytes()).hexdigest()))

    return note


def make_engine(settings: Settings, model: LoadedModel, **more: Any) -> Engine:
    if settings.drafts:
        more |= {"drafter": NgramDrafter(), "num_speculative_tokens": settings.drafts}
    return Engine(model, **sizes_of(settings), prefix_caching=settings.prefix_cache == "on", **more)


def sizes_of(settings: Settings) -> dict[str, Any]:
    """Those of the engine; the budget is all that could ever be asked of one step where prompts are not to be cut."""
    budget = settings.budget
    if settings.chunked == "off":
        prompts = sum(len(each.prompt) for each in coming_of(settings))
        budget = prompts + sum(asked.tokens + settings.drafts for asked in settings.requests)
    return {
        "block_size": settings.block_size,
        "num_blocks": settings.blocks,
        "max_num_batched_tokens": budget,
        "max_num_seqs": settings.slots,
        "policy": settings.policy,
        "watermark": 0.0,
    }


def leaking_step(settings: Settings) -> Leak | None:
    """The first step in which a request begins behind another one; None where there is none.

    Of these requests without drafts, prefix cache and fault: then only the order of the rows could bring them together.
    """
    bare = play(replace(settings, drafts=0, prefix_cache="off", fault="")).run
    for step in bare.steps if bare else ():
        if any(entry.start == 0 for entry in step.entries[1:]):
            of = chosen(settings.model)
            return leak(of.model, coming_of(settings), step.number, of.texts, **sizes_of(settings))
    return None


# --- a proof


@dataclass(frozen=True)
class Verdict:
    right: bool
    sentence: str


def prove(settings: Settings) -> Verdict:
    """The run held against each of its requests alone, computed by the reference: token by token, bit by bit."""
    together, of, count = play(settings), chosen(settings.model), 0
    if together.stopped:
        return Verdict(False, f"{together.stopped} So it is not proved.")
    for request in coming_of(settings):
        name, alone = request.request_id, Logits()
        ids = of.model.prompt_ids(request.prompt)
        *_, answer = answer_alone(of.model, name, ids, request.params, 0, on_logits=noted_in(alone))
        right, said = answer.outputs[0].token_ids, together.tokens.get(name, ())
        if said != right:
            words = [" ".join(show(of.texts[token]) for token in answer) for answer in (said, right)]
            return Verdict(False, f"Request {name}: its tokens are {words[0]}; alone they are {words[1]}.")
        if together.logits.get(name) != alone[name]:
            other_logits = "the tokens are right, and the logits are not those that it has alone"
            return Verdict(False, f"Request {name}: {other_logits}.")
        count += len(right)
    sizes = f"{counted(len(settings.requests), 'request')}, {counted(count, 'token')}"
    logits = f"{count * of.model.config.vocab_size:,} logits"
    return Verdict(True, f"{sizes}, {logits}: every one equals sequential generation, bit for bit.")
