"""Who says what is wrong with the answers to a trace, and what should have come.

That is the oracle, under the rounding error of the declared format.
Stop strings are judged only where each token has a text: some servers leave special tokens out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Protocol

from lfm2np.checkpoint.text.tokenizer import Tokenizer
from lfm2np.engine.engine import Engine
from lfm2np.engine.loading import Model
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.work.place import Place
from lfm2np.oracle.agreement import UNFINISHED, all_text, text_fault
from lfm2np.oracle.check import fitting
from lfm2np.oracle.engines.records import (
    DEAD,
    IMPOSSIBLE,
    NO_ABORT,
    NO_ANSWER,
    Answer,
    Pair,
    Request,
    Trace,
    changed,
    greedy,
)
from lfm2np.oracle.engines.target import Played
from lfm2np.oracle.judging.allowed import Allowed
from lfm2np.oracle.judging.drawn import drawn_wrongly
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.noise import DRAWS, allowed_by
from lfm2np.oracle.judging.scored import Known, add_noises, truths_of
from lfm2np.oracle.judging.verdict import LIMIT, Position, Verdict
from lfm2np.suite.fuzz.trace import STOP_IN
from lfm2np.suite.properties.rounding import wrong_words

DRAWN_ERROR = 1e-9  # the probability, for each trace, that the samples of a right engine are called wrong
WRONG, STOP, TEXT, DIFFERS = "wrong", "stop", "text", "differs"
MEANS = {
    "wrong": "a token or a log-probability that no right engine of the declared format gives",
    "differs": "an answer that is not that of the same request alone, by more than the engine's own spread",
    "stop": "an answer that does not end where its stop text ends it",
    "text": "a text or a finish_reason that is not that of the answer's own tokens",
    "dead": "the server is gone",
    "hang": "a request that is never answered",
    "5xx": "a valid request that the engine fails on",
    "broken": "a connection that breaks, or a reply that is no HTTP",
    "refused": "a valid request that is refused",
    "impossible": "an answer of a form that no right engine gives",
    "leak": "slots or memory that never come free",
}


@dataclass(frozen=True)
class Finding:
    """The worst of one trace. `request` and `position` (of its output) say where, if that is known."""

    kind: str  # one of MEANS
    what: str
    request: int | None = None
    position: Position | None = None
    seen: Answer | None = None


@dataclass(frozen=True)
class Right:
    """One token. `bound` in nats; `decided`: another token is wrong here, not only as good."""

    token_id: int
    logprob: float
    bound: float
    decided: bool


def right_token(token_id: int, allowed: Allowed, is_drawn: bool) -> Right:
    column = allowed.at(token_id)
    return Right(
        token_id, float(allowed.logprobs[column]), allowed.bound(column), not is_drawn and allowed.runner_up > LIMIT
    )


class Expected(Protocol):
    """What a trace that is handed over is compared with."""

    @property
    def expected(self) -> str:
        """A sentence that says what it is."""

    @property
    def ends(self) -> Collection[int]:
        """End-of-sequence tokens, behind which a server may stop."""

    def right(self, request: Request, seen: Answer | None) -> list[Right]:
        """What should have come; empty where that is unknown."""

    def alone(self, request: Request) -> Request | None:
        """The request whose answer is what should have come; None where that is not the engine's own."""


@dataclass
class ByTruth:
    """Exact arithmetic, under the rounding error of the declared format.

    texts  also judge texts and finish reasons
    """

    model: Model
    format_name: str
    place: Place = field(default_factory=Place)
    texts: bool = True
    expected = (
        "What is right is computed in exact arithmetic, in which the order of sums cannot matter; how far off the "
        "declared format may be is measured at each position."
    )

    def __post_init__(self) -> None:
        self.ends: Collection[int] = self.model.config.eos_token_ids
        self.tokenizer = self.model.tokenizer_or_none

    def finding(self, trace: Trace, played: Played) -> Finding | None:
        """The worst that is wrong; a server that is gone explains everything else, so it comes first."""
        trouble = trouble_finding(trace, played)
        if trouble is not None and (trouble.kind == DEAD or trouble.request is not None):
            return trouble
        return self.wrong_answer(trace, played) or trouble

    def wrong_answer(self, trace: Trace, played: Played) -> Finding | None:
        """The first answer that can't be right: by its form, by where it ends, by its numbers, or by its text."""
        pairs: list[Pair] = []
        text: Finding | None = None
        for index, (request, answers) in enumerate(zip(trace.requests, played.answers, strict=True)):
            request = replace(request, request_id=str(index))
            for answer in answers:
                if answer.token_ids is None:
                    continue
                fitted = fitting(request, answer, self.model.config)
                kind, why = self.fault_of(request, fitted)
                if kind == TEXT:
                    text = text or Finding(kind, f"request {index}: {why}", index, seen=answer)
                elif kind:
                    return Finding(kind, f"request {index}: {why}", index, seen=answer)
                pairs.append((request, fitted))
        known = Known(place=self.place)
        positions = judge(self.model, self.format_name, pairs, known=known)
        wrong = [position for position in positions if position.verdict in (Verdict.BUG, Verdict.DRIFT)]
        if not wrong and text is not None:
            return text
        if not wrong:
            other = drawn_wrongly(self.model, pairs, positions, known, DRAWN_ERROR)
            return None if other is None else Finding(WRONG, f"request {other[0]}: {other[1]}", int(other[0]))
        worst = min(wrong, key=lambda position: (int(position.request.request_id), position.row))
        index = int(worst.request.request_id)
        seen = next(answer for request, answer in pairs if request is worst.request)
        return Finding(WRONG, f"request {wrong_words(worst)}", index, worst, seen)

    def fault_of(self, request: Request, answer: Answer) -> tuple[str, str]:
        """Of its form, its end or its text: what kind of finding, and why; empty where there is none."""
        if (why := answer.error or length_fault(self.model, request, answer)) is not None:
            return IMPOSSIBLE, why
        if self.tokenizer is None or answer.is_aborted:
            return "", ""
        if (why := stop_fault(self.tokenizer, self.ends, request, answer)) is not None:
            return STOP, why
        if self.texts:
            why = text_fault(self.tokenizer, self.ends, request, answer)
        return (TEXT, why) if why is not None else ("", "")

    def right(self, request: Request, seen: Answer | None) -> list[Right]:
        """For a greedy request the oracle's tokens; for a sampled one those that the engine gave."""
        tokens = self.fitted_tokens(request, seen) if request.is_sampled else self.best_tokens(request)
        if not tokens:
            return []
        asked, known = greedy("right", request.prompt_token_ids, len(tokens)), Known()
        pair = (asked, Answer(tuple(tokens)))
        (truth,) = truths_of(self.model, [pair], known).values()
        add_noises(self.model, self.format_name, [truth], known, DRAWS)
        bits = format_named(self.format_name).bits
        allowed = allowed_by(truth, known.noises[self.format_name, truth.spoken], bits)
        start = len(request.prompt_token_ids) - 1
        return [right_token(token, allowed[row], request.is_sampled) for row, token in enumerate(tokens, start)]

    def alone(self, request: Request) -> None:
        """What is right does not depend on what the engine says alone."""

    def fitted_tokens(self, request: Request, seen: Answer | None) -> tuple[int, ...]:
        """Empty for an answer that can't be scored."""
        if seen is None or seen.error is not None:
            return ()
        return fitting(request, replace(seen, is_aborted=True), self.model.config).ids

    def best_tokens(self, request: Request) -> tuple[int, ...]:
        """Up to the token that completes the stop text; not ended by an end-of-sequence token."""
        engine = Engine(self.model)
        stop = (request.stop,) if request.stop is not None and self.tokenizer is not None else ()
        params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, stop=stop)
        engine.add_request("right", request.prompt_token_ids, params)
        *_, last = engine.stream()
        return tuple(last.outputs[0].token_ids)

    def with_stops(self, trace: Trace) -> Trace:
        """The trace with stop strings that its requests will meet: see STOP_IN."""
        if self.tokenizer is None or all(STOP_IN not in request.tags for request in trace.requests):
            return trace
        met = [(request, self.stop_in(self.tokenizer, request)) for request in trace.requests]
        return Trace(tuple(changed(request, stop=stop or request.params.stop) for request, stop in met))

    def stop_in(self, tokenizer: Tokenizer, request: Request) -> str | None:
        """A text that begins in the token before number `stop_in` of the right answer, and ends within that token if it
        has more than one character: an engine that looks only at the ends of tokens misses it. None where there is
        none."""
        if STOP_IN not in request.tags or request.is_sampled or request.stop is None:
            return None
        ids = self.best_tokens(changed(request, stop=(), max_tokens=min(request.max_tokens, request.tags[STOP_IN] + 1)))
        if not all_text(tokenizer, ids):
            return None
        before, whole = tokenizer.decode(ids[:-1]), tokenizer.decode(ids)
        if UNFINISHED in whole:
            return None
        last = whole[len(before) :]
        return (before[-1:] + (last[:-1] or last)) or None


def trouble_finding(trace: Trace, played: Played) -> Finding | None:
    """What is wrong besides answers: a server that is gone first, one that keeps memory last."""
    if played.trouble is not None and played.trouble.kind == DEAD:
        return Finding(DEAD, played.trouble.what)
    for index, answers in enumerate(played.answers):
        for answer in answers:  # what comes of a cancelled one is not judged
            if answer.error is not None and not (answer.is_aborted and answer.error == NO_ABORT):
                kind = IMPOSSIBLE if answer.kind == NO_ANSWER else answer.kind
                return Finding(kind, f"request {index}: {answer.error}", index)
    return None if played.trouble is None else Finding(played.trouble.kind, played.trouble.what)


def stop_fault(tokenizer: Tokenizer, ends: Collection[int], request: Request, answer: Answer) -> str | None:
    """Why an answer can't be right: it goes on behind its stop string, or ends though that never came; or None."""
    ids = answer.token_ids
    if not ids or request.stop is None or not all_text(tokenizer, ids):
        return None
    if request.stop in tokenizer.decode(ids[:-1]):
        return f"stop {request.stop!r} stands in the text of its first {len(ids) - 1} tokens, yet it goes on"
    if len(ids) < request.max_tokens and request.stop not in tokenizer.decode(ids) and ids[-1] not in ends:
        return f"ends after {len(ids)} of {request.max_tokens} tokens, and stop {request.stop!r} is not in its text"
    return None


def length_fault(model: Model, request: Request, answer: Answer) -> str | None:
    """Fewer tokens than requested, without a reason. Some servers can't ignore an end-of-sequence token."""
    ids = answer.token_ids
    if ids is None or answer.is_aborted or len(ids) >= request.max_tokens or request.stop is not None:
        return None
    if ids and ids[-1] in model.config.eos_token_ids:
        return None
    return f"{len(ids)} tokens with finish_reason {answer.finish_reason!r}, expected {request.max_tokens}"
