"""From what an engine said to judged positions: scores it in exact arithmetic, under the noise of its format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle.emulate import format_named
from lfm2np.oracle.noise import DRAWS, Ids, Noise, Truth, noise_of
from lfm2np.oracle.noise import truths_of as computed_truths
from lfm2np.oracle.targets.records import Answer, Ask
from lfm2np.oracle.verdict import Position, position_verdict
from lfm2np.progress import Progress
from lfm2np.work.place import Place

FLOAT32_UNITS = 4  # mlx-lm, right in all else, is off by up to 3 where a token is all but certain
Pair = tuple[Ask, Answer]


@dataclass(frozen=True, eq=False)
class Scored:
    """One sequence under the oracle: the truth, and the noise of one format."""

    truth: Truth
    noise: Noise


@dataclass(eq=False)
class Known:
    """What was computed before, so that another format, or another engine that says the same, costs little; and where
    the rest is computed."""

    truths: dict[Ids, Truth] = field(default_factory=dict)
    noises: dict[tuple[str, Ids], Noise] = field(default_factory=dict)
    place: Place = field(default_factory=Place)


def judge(
    model: LoadedModel,
    format_name: str,
    pairs: Sequence[Pair],
    progress: Progress | None = None,
    known: Known | None = None,
    draws: int = DRAWS,
) -> list[Position]:
    """All positions that the answers allow to judge, in the order of the asks; by so many engines that could be."""
    known = Known() if known is None else known
    usable = [(ask, answer) for ask, answer in pairs if answer.error is None and answer.token_ids]
    truths = truths_of(model, usable, known, progress)
    new = [one for one in dict.fromkeys(truths.values()) if (format_name, one.token_ids) not in known.noises]
    noises = noise_of(model, new, format_name, draws, place=known.place, progress=progress)
    for truth, own in zip(new, noises, strict=True):
        known.noises[format_name, truth.token_ids] = own
    bits = format_named(format_name).bits
    positions = []
    for ask, answer in usable:
        truth = truths[sequence(ask, answer)]
        positions += judged(ask, answer, Scored(truth, known.noises[format_name, truth.token_ids]), bits)
    return positions


def sequence(ask: Ask, answer: Answer) -> Ids:
    return (*ask.prompt_token_ids, *(answer.token_ids or ()))


def truths_of(
    model: LoadedModel, pairs: Sequence[Pair], known: Known, progress: Progress | None = None
) -> dict[Ids, Truth]:
    """By sequence; those that are the beginning of another share its truth, since the arithmetic is causal."""
    wanted: dict[Ids, dict[int, set[int]]] = {}
    for ask, answer in pairs:
        rows = wanted.setdefault(sequence(ask, answer), {})
        for row, token_id in enumerate(sequence(ask, answer)[1:]):
            rows.setdefault(row, set()).add(token_id)
        for index, top in enumerate(answer.top_logprobs or ()):
            rows[len(ask.prompt_token_ids) - 1 + index].update(top)
    whole = whole_sequences(wanted)
    missing: dict[Ids, dict[int, list[int]]] = {}
    for ids, of in whole.items():
        rows = {}
        for one in of:
            for row, tokens in wanted[one].items():
                rows.setdefault(row, set()).update(tokens)
        if ids not in known.truths or not known.truths[ids].covers(rows):
            missing[ids] = {row: sorted(tokens) for row, tokens in rows.items()}
    for truth in computed_truths(model, missing, known.place, progress):
        known.truths[truth.token_ids] = truth
    for key in [key for key in known.noises if key[1] in missing]:
        del known.noises[key]  # it is of other columns
    return {one: known.truths[ids] for ids, of in whole.items() for one in of}


def whole_sequences(sequences: Iterable[Ids]) -> dict[Ids, list[Ids]]:
    """Those that are no other's beginning, each with all that are its beginning, itself included."""
    whole: dict[Ids, list[Ids]] = {}
    for ids in sorted(sequences, reverse=True):  # a sequence comes right after those that begin with it
        last = next(reversed(whole), None)
        if last is not None and last[: len(ids)] == ids:
            whole[last].append(ids)
        else:
            whole[ids] = [ids]
    return whole


def judged(ask: Ask, answer: Answer, scored: Scored, bits: int) -> list[Position]:
    """The tokens of one answer, and those of its prompt if their log-probabilities are told."""
    start = len(ask.prompt_token_ids)
    positions = []
    for row, told in enumerate(answer.prompt_logprobs or ()):
        positions.append(judged_token(ask, row, ask.prompt_token_ids[row + 1], False, {}, told, scored, bits))
    for index, token_id in enumerate(answer.token_ids or ()):
        logprob = None if answer.logprobs is None else answer.logprobs[index]
        tops = {} if answer.top_logprobs is None else answer.top_logprobs[index]
        positions.append(judged_token(ask, start - 1 + index, token_id, True, tops, logprob, scored, bits))
    return positions


def judged_token(
    ask: Ask,
    row: int,
    token_id: int,
    is_new: bool,
    tops: Mapping[int, float],
    logprob: float | None,
    scored: Scored,
    bits: int,
) -> Position:
    truth, noise = scored.truth, scored.noise
    unit = resolution(float(truth.largest[row]), bits)
    own, best = truth.at(row, token_id), truth.at(row, int(truth.best[row]))
    values = {**tops, **({} if logprob is None else {token_id: logprob})}
    told = [(truth.at(row, one), value) for one, value in values.items()]
    raw = [value - float(truth.logprobs[row, column]) for column, value in told]
    scales = [noise.scale(truth, row, column) for column, _ in told]
    errors = without_normaliser(raw, scales, unit, truth.vocab_size)
    gap = float(truth.logprobs[row, best] - truth.logprobs[row, own])
    gap_ratio = max(0.0, gap - unit) / noise.gap_scale(row, own, best) if own != best else 0.0
    ratio = max((beyond(one, unit) / scale for one, scale in zip(errors, scales, strict=True)), key=abs, default=None)
    sizes = [abs(error) / math.hypot(scale, unit / 2.0) for error, scale in zip(raw, scales, strict=True)]
    return Position(
        ask=ask,
        row=row,
        is_new=is_new,
        token_id=token_id,
        best=int(truth.best[row]),
        gap=gap,
        gap_ratio=gap_ratio,
        margin_ratio=margin_ratio(scored, row, best, unit),
        error=None if logprob is None else logprob - float(truth.logprobs[row, own]),
        error_ratio=ratio,
        error_size=max(sizes, default=None),
        verdict=position_verdict(is_new, token_id, int(truth.best[row]), gap_ratio, ratio),
    )


def resolution(largest: float, bits: int) -> float:
    """What rounding the logits themselves may do: one unit in the last place of the largest in the format, and a few of
    float32, in which log-probabilities are computed: they are the difference of a logit and a sum of exponentials."""
    exponent = math.frexp(largest)[1]
    return math.ldexp(1.0, exponent - bits) + FLOAT32_UNITS * math.ldexp(1.0, exponent - 24)


def without_normaliser(
    errors: Sequence[float], scales: Sequence[float], unit: float, vocab_size: int
) -> Sequence[float]:
    """The errors of one position without what a sum of exponentials in float32 may add to all of them.

    Added one after another, terms below 2**-25 of the sum are lost, at most vocab_size of them: log-probabilities of
    llama.cpp and mlx-lm are off by as much, all of a position by the same. So with several told one shift can't hide
    the others; of all shifts that large the one that leaves the least is taken off.
    """
    if not errors:
        return errors
    most = most_shift(vocab_size)

    def left(shift: float) -> float:
        return max(abs(beyond(one - shift, unit)) / scale for one, scale in zip(errors, scales, strict=True))

    shift = min((0.0, *(min(most, max(-most, one)) for one in errors)), key=left)
    return [one - shift for one in errors]


def most_shift(vocab_size: int) -> float:
    """Nats: see without_normaliser."""
    return math.ldexp(vocab_size, -25)


def beyond(error: float, unit: float) -> float:
    """What is left of an error, with its sign, behind one unit of the logits."""
    return math.copysign(max(0.0, abs(error) - unit), error)


def margin_ratio(scored: Scored, row: int, best: int, unit: float) -> float:
    """How far the runner-up of the greedy token is behind, in units of the noise."""
    logprobs = scored.truth.logprobs[row].copy()
    logprobs[best] = -np.inf
    runner_up = int(np.argmax(logprobs))
    gap = float(scored.truth.logprobs[row, best] - logprobs[runner_up])
    return max(0.0, gap - unit) / scored.noise.gap_scale(row, best, runner_up)
