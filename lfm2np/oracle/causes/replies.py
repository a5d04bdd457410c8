"""A reply compared with itself, and log-probabilities that are right but reported in another way.

Other logarithms, another normalisation or temperature, one position too early, a floor, few digits: each way is undone,
and the result is judged like any answer. A way is the cause if all that an engine reported of that part is then right;
no noise of a format makes it so by accident.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from lfm2np.oracle.causes.findings import CERTAIN, Suspicion, requests_of
from lfm2np.oracle.causes.groups import FINE
from lfm2np.oracle.engines.records import Answer, Pair, Request
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.position import is_wrong
from lfm2np.oracle.judging.scored import Evidence, spoken, truths_of, usable
from lfm2np.oracle.judging.truth import Truth
from lfm2np.oracle.judging.verdict import LIMIT, Position, Verdict, size_of
from lfm2np.oracle.report.report import plural

Row = Mapping[int, float]  # log-probabilities at one position, by token
SAMPLER = (
    "how tokens are chosen from right logits, or parameters of another request; no operator, unless the "
    "log-probabilities are of a second pass"
)
LEAST_REPORTED = 16  # log-probabilities of a part, for any judgement
FIRST = 4  # answers on which a way is tried first
LEAST_SUM = 1.01  # of probabilities at one position: more than rounding adds; used in words only
LEAST_AT_FLOOR = 4  # equal log-probabilities, the lowest of a part
NEARLY = 0.02  # of a step
PARTS = {"the new tokens": "logprobs", "the alternatives": "top_logprobs", "the prompts' tokens": "prompt_logprobs"}

STEPS: dict[str, Callable[[float], float]] = {  # from one value to the next, at a value
    **{f"{digits} decimals": lambda value, digits=digits: 10.0**-digits for digits in range(1, 6)},  # type: ignore[misc]
    "float16": lambda value: math.ldexp(1.0, math.frexp(value)[1] - 11),
    "bfloat16": lambda value: math.ldexp(1.0, math.frexp(value)[1] - 8),
}


class At(NamedTuple):
    """What an answer reports of one part at one position, the alternatives there (empty where there are none), and the
    exact log-probabilities of the tokens of both."""

    row: Row
    top: Row
    right: Row


Part = Sequence[At]  # of one answer
Undo = Callable[[Part], Sequence[Row] | None]  # the rows with the way undone; None: it does not apply


def reply_cause(evidence: Evidence) -> Suspicion | None:
    """The way in which log-probabilities are reported, if all tokens are right and this explains all errors."""
    if any(position.verdict is Verdict.BUG for position in evidence.positions):
        return None
    pairs = usable(evidence.pairs)
    truths = truths_of(evidence.model, pairs, evidence.known)

    def is_right(name: str, rows: Sequence[Sequence[Row] | None]) -> bool:
        known = [(pair, of_answer) for pair, of_answer in zip(pairs, rows, strict=True) if of_answer is not None]
        if len(known) < len(pairs):
            return False
        answers = [(request, with_rows(name, answer, of_answer)) for (request, answer), of_answer in known]
        for some in (answers[:FIRST], answers):  # a few answers rule out most ways
            judged = judge(evidence.model, evidence.format_name, some, known=evidence.known)
            if is_wrong(judged) or size_of(judged) > FINE:
                return False
        return True

    wrong, right = dict[str, list[str]](), list[str]()  # parts, of those that are wrong by their way
    for part, name in PARTS.items():
        parts = [part_of(name, request, answer, truths[spoken(request, answer)]) for request, answer in pairs]
        rows = [[at.row for at in part] for part in parts]
        is_few = sum(len(row) for each in rows for row in each) < LEAST_REPORTED
        if is_few or is_right(name, rows):
            right += [part] if any(map(any, rows)) else []
            continue
        way = next((words for words, undo in ways(parts) if is_right(name, list(map(undo, parts)))), None)
        if way is None:
            return None
        wrong.setdefault(way, []).append(part)
    if not wrong:
        return None
    words = "; ".join(f"the log-probabilities of {listed(of)} {way}" for way, of in wrong.items())
    also = f" (those of {listed(right)} are right)" if right else ""
    return Suspicion(CERTAIN, words + also)


def listed(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1]) if names[1:] else names)


# --- the parts of an answer


def part_of(name: str, request: Request, answer: Answer, truth: Truth) -> Part:
    is_new = name != "prompt_logprobs"
    first = len(request.prompt_token_ids) - 1 if is_new else 0
    tokens = (answer.token_ids or ()) if is_new else request.prompt_token_ids[1:]
    values, tops = getattr(answer, name) or (), list(answer.top_logprobs or ()) if is_new else []
    rows = tops if name == "top_logprobs" else [dict([pair]) for pair in zip(tokens, values, strict=False)]
    tops = tops or [{}] * len(rows)
    exact = enumerate(zip(rows, tops, strict=True), first)
    return [
        At(row, top, {token: float(truth.logprobs[at - truth.first, truth.at(at, token)]) for token in {*row, *top}})
        for at, (row, top) in exact
    ]


def with_rows(name: str, answer: Answer, rows: Sequence[Row]) -> Answer:
    """The answer as if it reported this part alone."""
    values = tuple(rows) if name == "top_logprobs" else tuple(value for row in rows for value in row.values())
    fields: dict[str, Any] = {**dict.fromkeys(PARTS.values()), name: values or None}
    return replace(answer, **fields)


# --- the ways


def ways(parts: Sequence[Part]) -> Iterator[tuple[str, Undo]]:
    """The plainest first; a temperature and a shift are measured on what was reported."""
    yield "are to base 2, not natural", each(lambda value, *_: value * math.log(2.0))
    yield "are to base 10, not natural", each(lambda value, *_: value * math.log(10.0))
    yield "are all 0, as after a sampler that keeps one token", if_all_are_zero
    yield "are one position too late: each is of the token before", moved(1)
    yield "are one position too early: each is of the next token", moved(-1)
    values = [value for part in parts for at in part for value in at.row.values()]
    floor = min(values, default=0.0)
    if values.count(floor) >= LEAST_AT_FLOOR:
        yield f"are never below {floor:.4g}", raised_to(floor)
    for name, step_at in STEPS.items():
        if all(is_whole(value / step_at(value)) for value in values):
            yield f"are rounded to {name}", rounded_to(step_at)
    counts = {len(at.top) for part in parts for at in part}
    if min(counts, default=0) > 1:
        sizes = "s of ".join(map(str, sorted(counts)))
        yield f"are normalised over the top {sizes}, not over the vocabulary", each(normalised)
        temperature = temperature_of(parts)
        if temperature is not None:
            yield f"are of temperature {temperature:.3g}, not 1", each(cooled(temperature))
        yield "are not normalised over the vocabulary: all of a position are off by the same", each(cooled(1.0))


def each(undo: Callable[[float, Row, Row], float]) -> Undo:
    """Of each log-probability, with the alternatives of its row and what is right there."""
    return lambda part: [{token: undo(value, at.top, at.right) for token, value in at.row.items()} for at in part]


def if_all_are_zero(part: Part) -> Sequence[Row] | None:
    if any(value != 0.0 for at in part for value in at.row.values()):
        return None
    return [{token: at.right[token] for token in at.row} for at in part]


def raised_to(floor: float) -> Undo:
    """Where the floor is reported, anything below it is right."""
    return lambda part: [
        {token: min(value, at.right[token]) if value == floor else value for token, value in at.row.items()}
        for at in part
    ]


def rounded_to(step_at: Callable[[float], float]) -> Undo:
    """As near to the right one as half a step allows."""

    def undone(value: float, right: float) -> float:
        half = step_at(value) / 2.0
        return value + max(-half, min(half, right - value))

    return lambda part: [{token: undone(value, at.right[token]) for token, value in at.row.items()} for at in part]


def is_whole(steps: float) -> bool:
    """As far as float32, in which a value may have been written down, can tell."""
    return math.isfinite(steps) and abs(steps - round(steps)) < NEARLY


def moved(by: int) -> Undo:
    """For one log-probability per position; the missing one at the end is assumed to be right."""

    def undo(part: Part) -> Sequence[Row] | None:
        if any(len(at.row) != 1 for at in part):
            return None
        reported = [value for at in part for value in at.row.values()]
        return [
            {token: reported[index + by] if 0 <= index + by < len(reported) else at.right[token] for token in at.row}
            for index, at in enumerate(part)
        ]

    return undo


def normalised(value: float, tops: Row, right: Row) -> float:
    """By the exact total probability of the alternatives."""
    return value + math.log(math.fsum(math.exp(right[token]) for token in tops))


def cooled(temperature: float) -> Callable[[float, Row, Row], float]:
    """The likeliest alternative is assumed to be right, and the others relative to it."""

    def undo(value: float, tops: Row, right: Row) -> float:
        best = max(tops, key=lambda token: tops[token])
        return temperature * (value - tops[best]) + right[best]

    return undo


def temperature_of(parts: Sequence[Part]) -> float | None:
    """The median over all positions of the ratio of distances between alternatives."""
    ratios = []
    for _, tops, right in itertools.chain(*parts):
        best, last = max(tops, key=lambda token: tops[token]), min(tops, key=lambda token: tops[token])
        if tops[best] > tops[last]:
            ratios.append((right[best] - right[last]) / (tops[best] - tops[last]))
    value = median(ratios) if ratios else 0.0
    return value if value > 0.0 and abs(math.log(value)) > 1e-3 else None


# --- a reply against itself


def chosen_cause(positions: Sequence[Position]) -> Suspicion | None:
    """That each wrong token has its right log-probability: the network is right, and another token was chosen."""
    wrong = [position for position in positions if position.is_wrong]
    is_right = [
        position.is_flip and position.error_ratio is not None and abs(position.error_ratio) <= LIMIT
        for position in wrong
    ]
    if not wrong or not all(is_right):
        return None
    names, asked = requests_of(positions)
    words = f"{plural(len(wrong), 'token')} in {len(names)} of {len(asked)} requests"
    return Suspicion(CERTAIN, f"wrong tokens, of which each log-probability is right: {words}", SAMPLER)


def contradictions(pairs: Sequence[Pair]) -> list[str]:
    """Tokens reported twice and differently, and probabilities that sum to more than 1, in words."""
    twice, sums = [], []
    for request, answer in pairs:
        for index, top in enumerate(answer.top_logprobs or ()):
            token = (answer.token_ids or ())[index]
            chosen = None if answer.logprobs is None else answer.logprobs[index]
            where = f"{request.request_id}, new token {index}"
            if chosen is not None and token in top and math.exp(-abs(chosen - top[token])) < 2.0 - LEAST_SUM:
                twice.append(f"{where}: {chosen:.4g} by itself, {top[token]:.4g} among the alternatives")
            among = math.fsum(math.exp(min(logprob, 700.0)) for logprob in top.values())
            if among > LEAST_SUM:
                sums.append(f"{where}: {among:.4g}")
    words = [f"{len(twice)} tokens have two log-probabilities, first {twice[0]}"] if twice else []
    return words + ([f"{len(sums)} positions have probabilities that sum above 1, first {sums[0]}"] if sums else [])
