"""Two answers of engines to the same tokens, position by position, up to the first token that differs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lfm2np.oracle.engines.records import Answer
from lfm2np.oracle.judging.allowed import Allowed, shape

UNFINISHED = "\ufffd"  # of a character some of whose bytes have not come
LEAST_SHAPE = 0.25  # of a likely token: the logarithm of the sum rounds too, by as much as a logit does
LEAST_REST = 2.0**-24  # of all other tokens beside a certain one, as far as float32 tells: no lead is infinite


@dataclass(frozen=True)
class Compared:
    """One position of two answers.

    position    output token of the first answer, from 0
    difference  of the token's log-probability, second minus first, nats; of two different tokens the nats by which
                either run would have to be off; None where one answer does not report it
    noise       such differences in units of one logit's noise, of each token that both answers report
    is_equal    everything that both report has the same bits
    is_flip     the tokens differ
    tokens      of the first and of the second answer
    is_open     the tokens differ by `difference` at least, perhaps by much more, or were drawn: only how often that
                happens can be judged
    """

    position: int
    difference: float | None
    noise: tuple[float, ...]
    is_equal: bool
    is_flip: bool = False
    tokens: tuple[int, int] = (-1, -1)
    is_open: bool = False


@dataclass(frozen=True)
class Comparison:
    """All positions of two answers, and what no rounding explains."""

    positions: tuple[Compared, ...]
    fault: str | None = None


def allowed_by(values: Mapping[int, float], best: int, nats: float = 1.0) -> Allowed:
    """What an engine's own answer allows at a position, where only rounding sets two runs apart.

    values  the log-probabilities that it reports, by token
    nats    standard deviation of one logit's difference between two runs
    """
    tokens = sorted(values)
    logprobs = np.array([values[token] for token in tokens])
    squares = np.exp(2.0 * np.minimum(0.0, logprobs))
    scales = nats * np.sqrt(np.maximum(LEAST_SHAPE, shape(np.sqrt(squares), squares.sum() - squares)))
    apart = math.sqrt(2.0) * nats
    leads = np.maximum(0.0, values.get(best, 0.0) - logprobs) / apart
    return Allowed(best, np.array(tokens, np.int64), logprobs, scales, leads, lead(values, best) / apart, 0.0)


def in_noise(here: Mapping[int, float], there: Mapping[int, float], token: int) -> list[float]:
    """Differences of the log-probabilities that both report, in standard deviations of one logit's."""
    allowed = allowed_by(here, token)
    return [abs(there[each] - here[each]) / float(allowed.scales[allowed.at(each)]) for each in here if each in there]


def compared(
    first: Answer,
    second: Answer,
    start: int = 0,
    most: int | None = None,
    is_whole: bool = False,
    is_drawn: bool = False,
) -> Comparison:
    """The second answer is of the prompt of the first and `start` of its tokens, and goes on for at most `most`.

    is_whole  both answer the same request: text and finish reason must be the same, too
    is_drawn  tokens are sampled: another token does not show what either run prefers
    """
    ids, others = first.token_ids, second.token_ids
    if ids is None or others is None:
        return Comparison((), second.error or first.error or "no token ids were reported")
    positions: list[Compared] = []
    for index, (token, other) in enumerate(zip(ids[start:], others, strict=False)):
        positions.append(at(first, second, start + index, index, is_drawn))
        if token != other:
            return Comparison(tuple(positions))
    due = len(ids) - start if most is None else min(most, len(ids) - start)
    if len(others) < due or (len(others) > due and most is None):
        reason = f", finish_reason {second.finish_reason!r}" if second.finish_reason else ""
        return Comparison(tuple(positions), f"{len(others)} tokens{reason}, expected {due} as in the other answer")
    return Comparison(tuple(positions), unlike(first, second) if is_whole else None)


def unlike(first: Answer, second: Answer) -> str | None:
    """Text or finish reason of the same tokens."""
    for name in ("text", "finish_reason"):
        here, there = getattr(first, name), getattr(second, name)
        if here is not None and there is not None and here != there:
            return f"{name} {there!r} of the same tokens, expected {here!r} as in the other answer"
    return None


def stopped(first: Answer, second: Answer, stop: str, max_tokens: int) -> Comparison:
    """The second answers the same request, but is to end at a stop string, which the first's text has.

    How many tokens it takes is unknown without a tokenizer, so the second's may be any of the first ones.
    """
    count = len(second.token_ids or ())
    pair = compared(first, second, most=count)
    if pair.fault or any(each.is_flip for each in pair.positions):
        return pair
    text = first.text or ""
    expected, seen = text[: text.index(stop)], second.text
    certain, unfinished, _ = expected.partition(UNFINISHED)
    if seen is not None and seen != expected and not (unfinished and seen.startswith(certain)):
        return Comparison(
            pair.positions, f"text {seen!r} with stop {stop!r}, expected {expected!r} of {text!r} without it"
        )
    if second.finish_reason == "length" and count < max_tokens:
        return Comparison(
            pair.positions, f"finish_reason 'length' after {count} of {max_tokens} tokens, with stop {stop!r}"
        )
    return pair


def likeliest(answer: Answer) -> Comparison:
    """The tokens of a greedy answer against the likeliest ones that it reports itself."""
    positions = []
    for index, token in enumerate(answer.token_ids or ()):
        here = reported(answer, index)
        if token in here and len(here) > 1:
            lead = max(here.values()) - here[token]
            positions.append(Compared(index, -lead, (lead / math.sqrt(2.0),), lead == 0.0, lead > 0.0))
    return Comparison(tuple(positions))


def at(first: Answer, second: Answer, position: int, index: int, is_drawn: bool) -> Compared:
    """first.token_ids[position] against second.token_ids[index]."""
    token, other = (first.token_ids or ())[position], (second.token_ids or ())[index]
    here, there = reported(first, position), reported(second, index)
    is_flip = token != other
    noise = in_noise(here, there, token)
    if is_flip and not is_drawn:
        difference, is_open = flip(here, there, token, other)
        noise += [] if difference is None else [difference / math.sqrt(2.0)]
        return Compared(position, difference, tuple(noise), False, True, (token, other), is_open)
    is_equal = not is_flip and all(here[each] == there[each] for each in here if each in there)
    difference = there[token] - here[token] if token in here and token in there else None
    return Compared(position, difference, tuple(noise), is_equal, is_flip, (token, other), is_open=is_flip)


def flip(here: Mapping[int, float], there: Mapping[int, float], token: int, other: int) -> tuple[float | None, bool]:
    """By how much the runs differ if each prefers its own token, nats, and whether it may be more than that, as one
    does not report the other's token. None where neither reports its own.

    The sum of both leads; or, as each run's likeliest token is known, the difference of those, if that is more.
    """
    if token not in here and other not in there:
        return None, False
    leads = lead(here, token, other) + lead(there, other, token)
    if other in here and token in there:
        return leads, False
    likeliest = abs(here[token] - there[other]) if token in here and other in there else 0.0
    return max(leads, likeliest), True


def lead(values: Mapping[int, float], token: int, other: int | None = None) -> float:
    """By how many nats a token that was chosen as the likeliest leads another, or every other, at least.

    values  log-probabilities that are reported; 0 if the token's is not among them. What is not reported has at most
            the rest of the probability, and is at most as likely as the least that is
    """
    if token not in values:
        return 0.0
    rest = math.fsum([1.0, *(-math.exp(min(0.0, value)) for value in values.values())])
    unreported = min(*values.values(), math.log(max(rest, LEAST_REST)))
    others = [value for each, value in values.items() if each != token]
    rivals = [*others, unreported] if other is None else [values.get(other, unreported)]
    return max(0.0, values[token] - max(rivals))


def reported(answer: Answer, index: int) -> dict[int, float]:
    """Log-probabilities at one output position, by token id; empty where none is reported."""
    tops = dict(answer.top_logprobs[index]) if answer.top_logprobs is not None else {}
    if answer.logprobs is not None and answer.token_ids is not None:
        tops[answer.token_ids[index]] = answer.logprobs[index]
    return tops


def scored(first: Answer, logprobs: Sequence[float], prompt: int) -> Comparison:
    """An answer's tokens against their log-probabilities as parts of a prompt.

    logprobs  of each token but the first of the whole sequence
    prompt    tokens of the first answer's prompt
    """
    if first.logprobs is None and first.top_logprobs is None:
        return Comparison(())
    return compared(first, Answer(first.token_ids, tuple(logprobs[prompt - 1 :])))
