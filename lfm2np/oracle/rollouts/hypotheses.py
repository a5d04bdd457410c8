"""What may be wrong with a side: a table of hypotheses, each with the log-probabilities that it predicts.

A hypothesis is one error: in the network (variants.py) or in how its log-probabilities were written down (undo). With a
reading and a format (exact.py) it predicts what a side reports. The table is in the order in which equals
are named, the simplest first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.work.place import Place, compute
from lfm2np.oracle.causes.replies import LEAST_REPORTED, STEPS, is_whole
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.noise import Noise
from lfm2np.oracle.judging.processors import FILTERS
from lfm2np.oracle.rollouts.exact import (
    AS_IT_IS,
    AT,
    PENALTIES,
    Fit,
    Scores,
    fit,
    item_of,
    joined,
    params_of,
    views_from,
)
from lfm2np.oracle.rollouts.rollout import Rollout
from lfm2np.oracle.rollouts.variants import VARIANTS, with_parts

Float64 = NDArray[np.float64]
Variant = Mapping[str, Any]
Values = Sequence[Float64]  # [R] of each rollout
Undo = Callable[[Values, Values], tuple[Values, str]]
MOST_BEFORE = 3  # sequences of a pack: what leaks through more convolutions is below any rounding error
CHUNKS = tuple(2**k for k in range(3, 14))
BITS = {"bfloat16": 8, "float16": 11}  # of the significand
HEAD, CHUNKED = "head precision", "state lost at a chunk border"
TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0)
WIDTHS = (0.1, 0.01)  # of a temperature: the interval about the nearest, by turns
MOST_ERROR = 1.0  # nats of a token's error that count for a temperature
AS_NEAR = 1.1  # a temperature with fewer digits may leave so many times the error of the nearest
NO_DIFFERENCE = 1e-3  # a share of the temperature


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One error.

    name      the kind, by which it is reported
    detail    which of its kind
    variants  by a rollout's id the network's error, of those where it changes something; all with `readings` or `model`
    undo      of values as reported, and the exact ones: what they were before the error, NaN where that is lost,
              and a detail that it found; None: they are as computed
    bits      of the significand that it rounds to: tried in formats of more than twice as many
    readings  those under which it is tried; (): those of the side
    model     that computes it; None: the one that is judged by
    """

    name: str
    detail: str = ""
    variants: Mapping[str, Variant] = field(default_factory=dict)
    undo: Undo | None = None
    bits: int = 0
    readings: tuple[str, ...] = ()
    model: LoadedModel | None = None


AS_COMPUTED = Hypothesis(AS_IT_IS)


def hypotheses_of(
    model: LoadedModel,
    rollouts: Sequence[Rollout],
    beside: Sequence[Rollout],
    chunks: Sequence[int] = (),
    previous: LoadedModel | None = None,
) -> list[Hypothesis]:
    """Those that are possible of these rollouts; `beside` are all of the file, for what stood beside each."""
    late, lost = {"late": 1}, {each.id: {"borders": [len(each.prompt_token_ids)], "attend": True} for each in rollouts}
    return [
        AS_COMPUTED,
        *(
            Hypothesis("log-probabilities shifted by one position", f"of the token {where}", undo=partial(shifted, by))
            for where, by in (("before", 1), ("after", -1))
        ),
        Hypothesis("labels are not shifted", "logits that have seen the token", of_all(rollouts, late)),
        Hypothesis("a constant offset", undo=without_offset),
        *(
            Hypothesis(
                "reported values are rounded", f"to {name}", undo=partial(rounded_to, step_at), bits=BITS.get(name, 0)
            )
            for name, step_at in STEPS.items()
        ),
        *(
            Hypothesis("another base of the logarithm", str(base), undo=partial(in_nats, math.log(base)))
            for base in (2, 10)
        ),
        *(
            Hypothesis(
                HEAD,
                f"logits in {name}{inputs}",
                of_all(rollouts, {"head_bits": bits, "rounds_inputs": bool(inputs)}),
                bits=bits,
            )
            for name, bits in BITS.items()
            for inputs in (", and the head's inputs", "")
        ),
        *seen_hypotheses("state leaks in a pack", packed_before(beside)),
        *seen_hypotheses("padding is not masked", padding_before(model, beside)),
        Hypothesis("state lost between prefill and decode", "convolution", lost),
        *chunk_hypotheses(rollouts, chunks),
        *route_hypotheses(beside),
        *(
            Hypothesis("stale weights", name, model=changed)
            for name, changed in (() if previous is None else with_parts(model, previous))
        ),
    ]


# --- errors in what was written down


def shifted(steps: int, reported: Values, exact: Values) -> tuple[Values, str]:
    """Each answer's values stand so many tokens late."""
    moved = [np.roll(values, -steps) for values in reported]
    for values in moved:
        values[-1 if steps > 0 else 0] = np.nan
    return moved, ""


def without_offset(reported: Values, exact: Values) -> tuple[Values, str]:
    """Less the median of the errors, which wrong values of less than half of the tokens do not move."""
    with np.errstate(invalid="ignore"):
        errors = joined(reported) - joined(exact)
    known = errors[np.isfinite(errors)]
    offset = float(np.median(known)) if len(known) else 0.0
    return [values - offset for values in reported], f"{offset:+.3g} nats"


def rounded_to(step_at: Callable[[float], float], reported: Values, exact: Values) -> tuple[Values, str]:
    """As near to the exact ones as half a step allows; as they are unless all are whole steps."""
    steps = [np.array([step_at(value) for value in values.tolist()]) for values in reported]
    with np.errstate(invalid="ignore"):
        whole = joined(reported) / joined(steps)
        if not all(map(is_whole, whole[np.isfinite(whole)])) or np.count_nonzero(whole <= -0.5) < LEAST_REPORTED:
            return reported, ""
        return [
            values + np.clip(right - values, -step / 2.0, step / 2.0)
            for values, right, step in zip(reported, exact, steps, strict=True)
        ], ""


def in_nats(factor: float, reported: Values, exact: Values) -> tuple[Values, str]:
    return [values * factor for values in reported], ""


# --- errors in the network


def of_all(rollouts: Sequence[Rollout], variant: Variant) -> dict[str, Variant]:
    return {rollout.id: variant for rollout in rollouts}


def seen_hypotheses(name: str, before: Mapping[str, list[list[int]]]) -> list[Hypothesis]:
    """That the convolution, attention, or both see what stands before a rollout, by its id."""
    near = {rollout_id: sequences[-MOST_BEFORE:] for rollout_id, sequences in before.items()}
    ways = (
        ("convolution", near, True, False),
        ("attention", before, False, True),
        ("convolution and attention", before, True, True),
    )
    return [
        Hypothesis(name, detail, {key: {"before": ids, "conv": conv, "attend": attend} for key, ids in seen.items()})
        for detail, seen, conv, attend in ways
        if before
    ]


def packed_before(rollouts: Sequence[Rollout]) -> dict[str, list[list[int]]]:
    """By id, the sequences before it in its pack; none for the first of a pack."""
    packs: dict[str, list[list[int]]] = {}
    before = {}
    for rollout in rollouts:
        if rollout.pack is not None:
            earlier = packs.setdefault(rollout.pack, [])
            if earlier:
                before[rollout.id] = [*earlier]
            earlier.append([*rollout.ids])
    return before


def padding_before(model: LoadedModel, rollouts: Sequence[Rollout]) -> dict[str, list[list[int]]]:
    """By id, the padding to the left; where the file does not say how much, up to the longest of the group."""
    longest: dict[str | None, int] = {None: 0}
    for rollout in rollouts:
        if rollout.group is not None:
            longest[rollout.group] = max(longest.get(rollout.group, 0), len(rollout.prompt_token_ids))
    padding = {}
    for rollout in rollouts:
        count = rollout.left_padding or max(0, longest[rollout.group] - len(rollout.prompt_token_ids))
        token = rollout.pad_token_id if rollout.pad_token_id is not None else model.config.pad_token_id
        if count:
            padding[rollout.id] = [[token or 0] * count]
    return padding


def chunk_hypotheses(rollouts: Sequence[Rollout], chunks: Sequence[int]) -> list[Hypothesis]:
    """The convolution's state, or all of it, lost between chunks of a sequence."""
    lengths = {rollout.id: len(rollout.ids) for rollout in rollouts}
    return [
        Hypothesis(
            CHUNKED,
            f"{state}, every {size} tokens",
            {
                key: {"borders": [*range(size, count, size)], "attend": attend}
                for key, count in lengths.items()
                if count > size + 1
            },
        )
        for size in dict.fromkeys((*chunks, *CHUNKS))
        if size < max(lengths.values())
        for state, attend in (("convolution", True), ("all state", False))
    ]


def route_hypotheses(rollouts: Sequence[Rollout]) -> list[Hypothesis]:
    """Experts other than those that the sampler reports."""
    sampler = {rollout.id: rollout.routes for rollout in rollouts if rollout.routes is not None}
    trainer = {rollout.id: rollout.trainer_routes for rollout in rollouts if rollout.trainer_routes is not None}
    earlier = {
        rollout.id: (*before.routes[: len(rollout.routes)], *rollout.routes[len(before.routes) :])
        for before, rollout in itertools.pairwise(rollouts)
        if before.routes is not None and rollout.routes is not None
    }
    tried: dict[str, Mapping[str, Any]] = {
        "those that the trainer reports": trainer,
        "the network's own": dict.fromkeys(rollout.id for rollout in rollouts),
        "of the token before": {key: (routes[0], *routes[:-1]) for key, routes in sampler.items()},
        "of the sequence before in the file": earlier,
    }
    return [
        Hypothesis("routes of another run", detail, {key: {"routes": routes} for key, routes in of.items()})
        for detail, of in tried.items()
        if sampler or trainer
    ]


# --- what they predict


def prediction_of(
    model: LoadedModel, scores: Sequence[Scores], hypothesis: Hypothesis, readings: Sequence[str], place: Place
) -> list[Scores] | None:
    """The scores of the rollouts under a hypothesis; None where it changes none, or where the network so changed
    overflows. Without a record, as an item names no checkpoint, and another model than a worker's is computed here.
    """
    readings = hypothesis.readings or readings
    items: list[dict[str, Any]] = []
    changed: dict[int, int] = {}  # of the rollouts, the number of the item
    for index, each in enumerate(scores):
        variant = hypothesis.variants.get(each.rollout.id, {} if hypothesis.readings or hypothesis.model else None)
        if variant is not None:
            changed[index] = len(items)
            rollout = replace(each.rollout, routes=variant["routes"]) if "routes" in variant else each.rollout
            items.append({**item_of(rollout, readings), "variant": variant})
    if not items:
        return None if hypothesis.name != AS_IT_IS and hypothesis.undo is None else list(scores)
    there = replace(place, record=None, executor=place.executor if hypothesis.model is None else None)
    results = compute(VARIANTS, hypothesis.model or model, items, there)
    if any("error" in result for result in results):
        return None
    return [
        replace(each, views=views_from(each.rollout, readings, results[changed[index]])) if index in changed else each
        for index, each in enumerate(scores)
    ]


# --- which explains most


def explanations(
    reported: Values,
    hypotheses: Sequence[Hypothesis],
    predictions: Sequence[Sequence[Scores] | None],
    noises: Sequence[Noise],
    format_name: str,
    readings: Sequence[str],
) -> list[Fit]:
    """Of each hypothesis the reading that leaves least, by Fit.rank: what explains most comes first, and of equals what
    the table has first.
    """
    tried = []
    for hypothesis, predicted in zip(hypotheses, predictions, strict=True):
        if predicted is None or format_named(format_name).bits <= 2 * hypothesis.bits:
            continue
        fits = []
        for reading in hypothesis.readings or readings:
            undone, found = reported, ""
            if hypothesis.undo:
                undone, found = hypothesis.undo(reported, [each.views[reading].logprobs for each in predicted])
            left = fit(undone, predicted, noises, format_name, reading)
            fits.append(replace(left, name=hypothesis.name, detail=hypothesis.detail or found))
        tried.append(min(fits, key=lambda each: each.rank))
    return sorted(tried, key=lambda each: each.rank)


# --- a temperature that is not stated


def other_temperatures(
    model: LoadedModel, scores: Sequence[Scores], reported: Float64, place: Place
) -> list[Hypothesis]:
    """By reading, the temperature that brings the exact values nearest to a side's [N], if the file states another."""
    samplings = [each.rollout.sampling for each in scores]

    def logprobs_at(name: str, temperatures: Sequence[float]) -> Float64:
        readings = tuple(f"{name}{AT}{temperature!r}" for temperature in temperatures)
        found = prediction_of(model, scores, Hypothesis(name, readings=readings), readings, place) or ()
        return np.array([joined(each.views[reading].logprobs for each in found) for reading in readings])

    has_filters = any(params_of("processed", each) != params_of("tempered", each) for each in samplings)
    hypotheses = []
    for name in ("tempered", "processed") if has_filters else ("tempered",):
        temperature = fitted_temperature(reported, partial(logprobs_at, name))
        stated = {1.0, *(each.temperature for each in samplings)}
        if not any(math.isclose(temperature, each, rel_tol=NO_DIFFERENCE) for each in stated):
            words = f"a temperature of {temperature:g} other than the stated one"
            hypotheses.append(Hypothesis(words, readings=(f"{name}{AT}{temperature:g}",)))
    return hypotheses


def fitted_temperature(reported: Float64, logprobs_at: Callable[[Sequence[float]], Float64]) -> float:
    """The temperature that leaves the least sum of absolute errors, in as few digits as leave hardly more.

    reported     [N]
    logprobs_at  of K temperatures the exact [K, N]; between them they are interpolated in the inverse temperature,
                 which multiplies the logits
    """
    temperatures = np.array(TEMPERATURES)
    for width in (*WIDTHS, 0.0):
        table = logprobs_at(temperatures.tolist())
        fine = np.geomspace(temperatures[0], temperatures[-1], 401)
        errors = errors_at(fine, temperatures, table, reported)
        best = float(fine[np.argmin(errors)])
        if width:
            temperatures = best * (1.0 + width * np.linspace(-1.0, 1.0, 5))
    short = [round(best, digits) for digits in (1, 2, 3, 4)]
    inside = np.array([value for value in short if temperatures[0] <= value <= temperatures[-1]])
    near = errors_at(inside, temperatures, table, reported) <= AS_NEAR * errors.min()
    return float(inside[np.argmax(near)] if near.any() else short[-1])


def errors_at(wanted: Float64, nodes: Float64, table: Float64, reported: Float64) -> Float64:
    """[wanted] sums of absolute errors, with the log-probabilities [K, N] known at the nodes [K], ascending."""
    right = np.clip(np.searchsorted(nodes, wanted), 1, len(nodes) - 1)
    before, after = 1.0 / nodes[right - 1], 1.0 / nodes[right]
    share = ((1.0 / wanted - before) / (after - before))[:, None]
    with np.errstate(invalid="ignore"):
        exact = (1.0 - share) * table[right - 1] + share * table[right]
        errors = np.minimum(np.abs(reported - exact), MOST_ERROR)
    known = ~np.isnan(reported)
    return np.asarray(np.where(np.isnan(errors), MOST_ERROR, errors)[:, known].sum(axis=1))


# --- in words


def reading_words(expected: str, actual: str, sampling: SamplingParams) -> str:
    """What a side does that reports `actual` where `expected` was meant; "" if they are the same."""
    meant, done = params_of(expected, sampling), params_of(actual, sampling)
    words = []
    if meant.temperature != done.temperature:
        unsaid = AT in actual and f"at temperature {done.temperature:g}, which the file does not say"
        unmet = (
            AT in expected and f"the sampler's are at temperature {meant.temperature:g}, which the file does not say"
        )
        words.append(unsaid or unmet or f"temperature {'not ' * (done.temperature == 1.0)}applied")
    if differ(meant, done, FILTERS):
        is_kept = not differ(done, sampling, FILTERS)
        words.append("renormalised over kept tokens" if is_kept else "not renormalised over the kept tokens")
    if differ(meant, done, PENALTIES):
        words.append(f"penalties {'not ' * (not differ(done, SamplingParams(), PENALTIES))}applied")
    return ", ".join(words)


def differ(one: SamplingParams, other: SamplingParams, names: Iterable[str]) -> bool:
    return any(getattr(one, name) != getattr(other, name) for name in names)


def longest_words(scores: Sequence[Scores], expected: str, actual: str) -> str:
    """Of all requests' sampling parameters the fullest answer."""
    return max((reading_words(expected, actual, each.rollout.sampling) for each in scores), key=len, default="")
