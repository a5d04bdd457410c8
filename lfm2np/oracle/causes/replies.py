"""A reply compared with itself, and log-probabilities that are right but reported in another way.

Other logarithms, another normalisation or temperature, one position too early: each way is undone, and the result is
judged like any answer. A way is the cause if all that an engine reported of that part is then right; no noise of a
format makes it so by accident.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from lfm2np.oracle.causes.findings import CERTAIN, Suspicion, requests_of
from lfm2np.oracle.causes.groups import FINE
from lfm2np.oracle.engines.records import Answer, Pair, Request
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.position import is_wrong
from lfm2np.oracle.judging.scored import Evidence, spoken, truths_of, usable
from lfm2np.oracle.judging.truth import Truth
from lfm2np.oracle.judging.verdict import Verdict, size_of

Row = Mapping[int, float]  # log-probabilities reported at one position, by token
LEAST_REPORTED = 16  # log-probabilities of a part, for any judgement
FIRST = 4  # answers on which a way is tried first
LEAST_SUM = 1.01  # of probabilities at one position: more than rounding adds; used in words only
CHOSEN, ALTERNATIVES, PROMPT = "the new tokens", "the alternatives", "the prompts' tokens"
PARTS = (CHOSEN, ALTERNATIVES, PROMPT)


@dataclass(frozen=True)
class Part:
    """What one answer reports of one part: R rows, the first of which is the truth's row `first`."""

    rows: Sequence[Row]
    tops: Sequence[Row]  # the alternatives of the same rows; empty where none are reported
    truth: Truth
    first: int

    def right(self, index: int, token: int) -> float:
        row = self.first + index
        return float(self.truth.logprobs[row - self.truth.first, self.truth.at(row, token)])


Undo = Callable[[Part], Sequence[Row] | None]  # the rows with the way undone; None: it does not apply
Way = tuple[str, Undo]


def reply_cause(evidence: Evidence) -> Suspicion | None:
    """The way in which log-probabilities are reported, if all tokens are right and this explains all errors."""
    if any(position.verdict is Verdict.BUG for position in evidence.positions):
        return None
    pairs = usable(evidence.pairs)
    truths = truths_of(evidence.model, pairs, evidence.known)

    def is_right(part: str, all_rows: Sequence[Sequence[Row]]) -> bool:
        answers = [
            (request, with_rows(part, answer, rows)) for (request, answer), rows in zip(pairs, all_rows, strict=True)
        ]
        for some in (answers[:FIRST], answers):  # a few answers rule out most ways
            judged = judge(evidence.model, evidence.format_name, some, known=evidence.known)
            if is_wrong(judged) or size_of(judged) > FINE:
                return False
        return True

    parts_by_way: dict[str, list[str]] = {}
    for part in PARTS:
        parts = [part_of(part, request, answer, truths[spoken(request, answer)]) for request, answer in pairs]
        if sum(map(len, (row for part in parts for row in part.rows))) < LEAST_REPORTED:
            continue
        if is_right(part, [part.rows for part in parts]):
            continue
        way = next((words for words, rows in undone(parts) if is_right(part, rows)), None)
        if way is None:
            return None
        parts_by_way.setdefault(way, []).append(part)
    if not parts_by_way:
        return None
    words = "; ".join(f"the log-probabilities of {listed(of)} {way}" for way, of in parts_by_way.items())
    wrong_parts = {part for of in parts_by_way.values() for part in of}
    reported = [part for part in PARTS if any(any(rows_of(part, *pair)) for pair in pairs)]
    right = [part for part in reported if part not in wrong_parts]
    also = f" (those of {listed(right)} are right)" if right else ""
    wrong, asked = requests_of(evidence.positions)
    return Suspicion(CERTAIN, words + also, "", len(wrong), len(asked))


def listed(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1]) if names[1:] else names)


# --- the parts of an answer


def rows_of(part: str, request: Request, answer: Answer) -> list[Row]:
    if part == ALTERNATIVES:
        return list(answer.top_logprobs or ())
    if part == CHOSEN:
        return [{token: logprob} for token, logprob in zip(answer.token_ids or (), answer.logprobs or (), strict=False)]
    return [
        {token: logprob}
        for token, logprob in zip(request.prompt_token_ids[1:], answer.prompt_logprobs or (), strict=False)
    ]


def part_of(part: str, request: Request, answer: Answer, truth: Truth) -> Part:
    rows = rows_of(part, request, answer)
    tops = list(answer.top_logprobs or ()) if part != PROMPT else []
    first = 0 if part == PROMPT else len(request.prompt_token_ids) - 1
    return Part(rows, tops or [{}] * len(rows), truth, first)


def with_rows(part: str, answer: Answer, rows: Sequence[Row]) -> Answer:
    """The answer as if it reported this part alone."""
    bare = replace(answer, logprobs=None, top_logprobs=None, prompt_logprobs=None)
    if part == ALTERNATIVES:
        return replace(bare, top_logprobs=tuple(rows) or None)
    values = tuple(value for row in rows for value in row.values()) or None
    return replace(bare, logprobs=values) if part == CHOSEN else replace(bare, prompt_logprobs=values)


# --- the ways


def undone(parts: Sequence[Part]) -> Iterator[tuple[str, list[Sequence[Row]]]]:
    """Each possible way, in words, and the rows of all parts with it undone."""
    for words, undo in ways(parts):
        rows = [undo(part) for part in parts]
        known = [undone_rows for undone_rows in rows if undone_rows is not None]
        if len(known) == len(rows):
            yield words, known


def ways(parts: Sequence[Part]) -> Iterator[Way]:
    """The plainest first; a temperature and a shift are measured on what was reported."""
    yield "are to base 2, not natural", scaled(math.log(2.0))
    yield "are to base 10, not natural", scaled(math.log(10.0))
    yield "are all 0, as after a sampler that keeps one token", if_all_are_zero
    yield "are one position too late: each is of the token before", moved(1)
    yield "are one position too early: each is of the next token", moved(-1)
    counts = {len(tops) for part in parts for tops in part.tops}
    if min(counts, default=0) > 1:
        sizes = "s of ".join(map(str, sorted(counts)))
        yield f"are normalised over the top {sizes}, not over the vocabulary", normalised
        temperature = temperature_of(parts)
        if temperature is not None:
            yield f"are of temperature {temperature:.3g}, not 1", cooled(temperature)
        yield "are not normalised over the vocabulary: all of a position are off by the same", cooled(1.0)


def scaled(factor: float) -> Undo:
    return lambda part: [{token: factor * logprob for token, logprob in row.items()} for row in part.rows]


def if_all_are_zero(part: Part) -> Sequence[Row] | None:
    if any(value != 0.0 for row in part.rows for value in row.values()):
        return None
    return [{token: part.right(index, token) for token in row} for index, row in enumerate(part.rows)]


def moved(by: int) -> Undo:
    """For one log-probability per position; the missing one at the end is assumed to be right."""

    def undo(part: Part) -> Sequence[Row] | None:
        if any(len(row) != 1 for row in part.rows):
            return None
        reported = [value for row in part.rows for value in row.values()]
        rows = []
        for index, row in enumerate(part.rows):
            (token,) = row
            at = index + by
            rows.append({token: reported[at] if 0 <= at < len(reported) else part.right(index, token)})
        return rows

    return undo


def normalised(part: Part) -> Sequence[Row] | None:
    """By the truth's total probability of the alternatives."""
    rows = []
    for index, (row, tops) in enumerate(zip(part.rows, part.tops, strict=True)):
        together = math.log(math.fsum(math.exp(part.right(index, token)) for token in tops))
        rows.append({token: value + together for token, value in row.items()})
    return rows


def cooled(temperature: float) -> Undo:
    """The likeliest alternative is assumed to be right, and the others relative to it."""

    def undo(part: Part) -> Sequence[Row] | None:
        rows = []
        for index, (row, tops) in enumerate(zip(part.rows, part.tops, strict=True)):
            best = max(tops, key=lambda token: tops[token])
            right = part.right(index, best)
            rows.append({token: temperature * (value - tops[best]) + right for token, value in row.items()})
        return rows

    return undo


def temperature_of(parts: Sequence[Part]) -> float | None:
    """The median over all positions of the ratio of distances between alternatives."""
    ratios = []
    for part in parts:
        for index, tops in enumerate(part.tops):
            best, last = max(tops, key=lambda token: tops[token]), min(tops, key=lambda token: tops[token])
            if tops[best] > tops[last]:
                ratios.append((part.right(index, best) - part.right(index, last)) / (tops[best] - tops[last]))
    value = median(ratios) if ratios else 0.0
    return value if value > 0.0 and abs(math.log(value)) > 1e-3 else None


# --- a reply against itself


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
