"""What is wrong with the answers to a trace, judged by the oracle under the rounding error of the declared format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lfm2np.engine.loading import Model
from lfm2np.oracle.agreement import text_fault
from lfm2np.oracle.check import fitting
from lfm2np.oracle.engines.records import DEAD, IMPOSSIBLE, NO_ABORT, NO_ANSWER, Answer, Pair, Request, Trace
from lfm2np.oracle.engines.target import Played
from lfm2np.oracle.judging.drawn import drawn_wrongly
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.judging.verdict import Position, Verdict
from lfm2np.suite.fuzz.right import stop_fault

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


def finding_of(
    model: Model, format_name: str, trace: Trace, played: Played, known: Known | None = None, texts: bool = True
) -> Finding | None:
    """None if a right engine may answer so. A server that is gone explains everything else, so it comes first.

    texts  also judge texts and finish reasons
    """
    trouble = trouble_finding(trace, played)
    if trouble is not None and (trouble.kind == DEAD or trouble.request is not None):
        return trouble
    return wrong_answer(model, format_name, trace, played, known, texts) or trouble


def trouble_finding(trace: Trace, played: Played) -> Finding | None:
    """What is wrong besides answers: a server that is gone first, one that keeps memory last."""
    if played.trouble is not None and played.trouble.kind == DEAD:
        return Finding(DEAD, played.trouble.what)
    for index, answers in enumerate(played.answers):
        why = trouble_of(trace.requests[index], answers)
        if why is not None:
            return Finding(why[0], f"request {index}: {why[1]}", index)
    return None if played.trouble is None else Finding(played.trouble.kind, played.trouble.what)


def trouble_of(request: Request, answers: Sequence[Answer]) -> tuple[str, str] | None:
    """Its kind and what it is, where a request failed. What comes of a cancelled one is not judged."""
    for answer in answers:
        if answer.error is not None and not (answer.is_aborted and answer.error == NO_ABORT):
            return (IMPOSSIBLE if answer.kind == NO_ANSWER else answer.kind), answer.error
    return None


def wrong_answer(
    model: Model, format_name: str, trace: Trace, played: Played, known: Known | None, texts: bool
) -> Finding | None:
    """The first answer that can't be right: by its form, by where it ends, by its numbers, or by its text."""
    tokenizer, ends = model.tokenizer if model.has_tokenizer else None, model.config.eos_token_ids
    pairs: list[Pair] = []
    text: Finding | None = None
    for index, (request, answers) in enumerate(zip(trace.requests, played.answers, strict=True)):
        request = replace(request, request_id=str(index))
        for answer in answers:
            if answer.token_ids is None:
                continue
            fitted = fitting(request, answer, model.config)
            why = fitted.error or length_fault(model, request, fitted)
            if why is not None:
                return Finding(IMPOSSIBLE, f"request {index}: {why}", index, seen=answer)
            if tokenizer is not None and not answer.is_aborted:
                if (why := stop_fault(tokenizer, ends, request, fitted)) is not None:
                    return Finding(STOP, f"request {index}: {why}", index, seen=answer)
                why = text_fault(tokenizer, ends, request.stop, request.max_tokens, fitted) if texts else None
                if text is None and why is not None:
                    text = Finding(TEXT, f"request {index}: {why}", index, seen=answer)
            pairs.append((request, fitted))
    known = Known() if known is None else known
    positions = judge(model, format_name, pairs, known=known)
    wrong = [position for position in positions if position.verdict in (Verdict.BUG, Verdict.DRIFT)]
    if not wrong and text is not None:
        return text
    if not wrong:
        other = drawn_wrongly(model, pairs, positions, known, DRAWN_ERROR)
        return None if other is None else Finding(WRONG, f"request {other[0]}: {other[1]}", int(other[0]))
    worst = min(wrong, key=lambda position: (int(position.request.request_id), position.row))
    index = int(worst.request.request_id)
    seen = next(answer for request, answer in pairs if request is worst.request)
    return Finding(WRONG, wrong_words(worst, len(trace.requests[index].prompt_token_ids)), index, worst, seen)


def length_fault(model: Model, request: Request, answer: Answer) -> str | None:
    """Fewer tokens than requested, without a reason."""
    if (
        answer.token_ids is None
        or answer.is_aborted
        or len(answer.token_ids) >= request.max_tokens
        or request.stop is not None
    ):
        return None
    ended_by = answer.token_ids[-1:]
    if ended_by and ended_by[0] in model.config.eos_token_ids:
        return None  # some servers can't ignore the end-of-sequence token
    reason = f"finish_reason {answer.finish_reason!r}"
    return f"{len(answer.token_ids)} tokens with {reason}, expected {request.max_tokens}"


def wrong_words(position: Position, prompt: int) -> str:
    place = position.row - prompt + 1
    token = f"output token {place}" if place >= 0 else f"prompt token {position.row + 1}"
    where = f"request {position.request.request_id}, {token}"
    if position.is_flip and position.verdict is Verdict.BUG:
        return (
            f"{where}: {position.token_id}, but the oracle's is {position.best}, {position.gap:.4g} nat ahead: "
            f"{position.gap_ratio:.3g} times the noise"
        )
    return (
        f"{where}: token {position.token_id} with a log-probability that is off by {position.error or 0.0:+.4g} nat: "
        f"{abs(position.error_ratio or 0.0):.3g} times the noise"
    )
