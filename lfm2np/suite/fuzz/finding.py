"""What is wrong with the answers to a trace, judged by the oracle under the rounding error of the declared format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lfm2np.engine.loading import Model
from lfm2np.oracle.agreement import text_fault
from lfm2np.oracle.check import fitting
from lfm2np.oracle.engines.records import Answer, Ask
from lfm2np.oracle.judging.drawn import drawn_wrongly
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.scored import Known, Pair
from lfm2np.oracle.judging.verdict import Position, Verdict
from lfm2np.suite.fuzz.played import DEAD, IMPOSSIBLE, Played, Reply
from lfm2np.suite.fuzz.right import stop_fault
from lfm2np.suite.fuzz.trace import Sent, Trace

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
    trouble = trouble_finding(played)
    if trouble is not None and (trouble.kind == DEAD or trouble.request is not None):
        return trouble
    return wrong_answer(model, format_name, trace, played.replies, known, texts) or trouble


def trouble_finding(played: Played) -> Finding | None:
    """What is wrong besides answers: a server that is gone first, one that keeps memory last."""
    if played.trouble is not None and played.trouble.kind == DEAD:
        return Finding(DEAD, played.trouble.what)
    for index, reply in enumerate(played.replies):
        if reply.trouble is not None:
            return Finding(reply.trouble.kind, f"request {index}: {reply.trouble.what}", index)
    return None if played.trouble is None else Finding(played.trouble.kind, played.trouble.what)


def wrong_answer(
    model: Model, format_name: str, trace: Trace, replies: Sequence[Reply], known: Known | None, texts: bool
) -> Finding | None:
    """The first answer that can't be right: by its form, by where it ends, by its numbers, or by its text."""
    tokenizer, ends = model.tokenizer if model.has_tokenizer else None, model.config.eos_token_ids
    pairs: list[Pair] = []
    text: Finding | None = None
    for index, reply in enumerate(replies):
        sent = trace.requests[index]
        for answer in reply.answers:
            seed = sent.seed if sent.temperature else None
            ask = Ask(str(index), "fuzz", sent.prompt, sent.max_tokens, stop=sent.stop, seed=seed)
            fitted = fitting(ask, answer, model.config, reply.left)
            why = fitted.error or length_fault(model, sent, fitted, reply.left)
            if why is not None:
                return Finding(IMPOSSIBLE, f"request {index}: {why}", index, seen=answer)
            if tokenizer is not None and not reply.left:
                if (why := stop_fault(tokenizer, ends, sent, fitted)) is not None:
                    return Finding(STOP, f"request {index}: {why}", index, seen=answer)
                why = text_fault(tokenizer, ends, sent.stop, sent.max_tokens, fitted) if texts else None
                if text is None and why is not None:
                    text = Finding(TEXT, f"request {index}: {why}", index, seen=answer)
            pairs.append((ask, fitted))
    known = Known() if known is None else known
    positions = judge(model, format_name, pairs, known=known)
    wrong = [position for position in positions if position.verdict in (Verdict.BUG, Verdict.DRIFT)]
    if not wrong and text is not None:
        return text
    if not wrong:
        other = drawn_wrongly(model, pairs, positions, known, DRAWN_ERROR)
        return None if other is None else Finding(WRONG, f"request {other[0]}: {other[1]}", int(other[0]))
    worst = min(wrong, key=lambda position: (int(position.ask.id), position.row))
    index = int(worst.ask.id)
    seen = next(answer for ask, answer in pairs if ask is worst.ask)
    return Finding(WRONG, wrong_words(worst, len(trace.requests[index].prompt)), index, worst, seen)


def length_fault(model: Model, sent: Sent, answer: Answer, left: bool) -> str | None:
    """Fewer tokens than requested, without a reason."""
    if answer.token_ids is None or left or len(answer.token_ids) >= sent.max_tokens or sent.stop is not None:
        return None
    ended_by = answer.token_ids[-1:]
    if ended_by and ended_by[0] in model.config.eos_token_ids:
        return None  # some servers can't ignore the end-of-sequence token
    reason = f"finish_reason {answer.finish_reason!r}"
    return f"{len(answer.token_ids)} tokens with {reason}, expected {sent.max_tokens}"


def wrong_words(position: Position, prompt: int) -> str:
    place = position.row - prompt + 1
    token = f"output token {place}" if place >= 0 else f"prompt token {position.row + 1}"
    where = f"request {position.ask.id}, {token}"
    if position.is_flip and position.verdict is Verdict.BUG:
        return (
            f"{where}: {position.token_id}, but the oracle's is {position.best}, {position.gap:.4g} nat ahead: "
            f"{position.gap_ratio:.3g} times the noise"
        )
    return (
        f"{where}: token {position.token_id} with a log-probability that is off by {position.error or 0.0:+.4g} nat: "
        f"{abs(position.error_ratio or 0.0):.3g} times the noise"
    )
