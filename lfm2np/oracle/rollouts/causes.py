"""What explains one side's errors: hypotheses with the log-probabilities that each predicts, compared by likelihood.

A hypothesis is a network with one error (variants.py), or none, together with a reading (scores.py) and a format
(reported_side.py). All are scored on the same sample of rollouts; the likeliest is named if what it leaves unexplained
is within the format's rounding error, and "unexplained" stands where none does so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.work.place import Place, compute, source_of
from lfm2np.oracle import factors
from lfm2np.oracle.rollouts.reported_side import BEFORE, Fit, Predicted, Spread, fit, predicted
from lfm2np.oracle.rollouts.rollout import Rollout
from lfm2np.oracle.rollouts.scores import OTHERS, PENALTIES, Scores, ids_of, item_of
from lfm2np.oracle.rollouts.variants import part_names, variant_work
from lfm2np.values import Progress

Float64 = NDArray[np.float64]
Variant = dict[str, Any]
MOST_BEFORE = 3  # sequences of a pack: what leaks through more convolutions is below any rounding error
CHUNKS = tuple(2**k for k in range(3, 14))
MOST_OUTLIERS = 0.01  # of the tokens under a hypothesis that rounds, as float32 noise flips some roundings
MOST_EXPLAINED = 0.98  # of the squared error
LEAST_GAIN = 10.0  # nats in all by which an error in the network must beat the network without it
LEAST_OF_ALL = 20.0  # the same where the network without it explains everything, too;
LEAST_OF_TOKENS = 0.5  # of each token for the head's precision, which rounds all of them
AS_IT_IS, HEAD, CHUNKED = "as computed", "head precision", "state lost at a chunk border"
ROUTES = "routes of another run"
# readings, by what was applied to the logits
TEMPERED, FILTERED = ("tempered", "processed", "unpenalised"), ("processed", "unpenalised", "filtered")
PENALISED = ("processed", "filtered")


@dataclass(frozen=True)
class Hypothesis:
    """An error in the network. `variants` gives that of each rollout; None where it changes nothing.

    name    the kind, by which it is reported
    detail  which of its kind
    bits    of the significand that it rounds to: tried in formats of more than twice as many
    """

    name: str
    detail: str
    variants: Callable[[Rollout], Variant | None]
    bits: int = 0


@dataclass(frozen=True, eq=False)
class Explanation:
    """One hypothesis about a sample of rollouts.

    explained  share of the squared errors that it removes, 0 to 1
    shifts     [N] what it predicts minus what the side should have reported
    """

    hypothesis: Hypothesis
    fit: Fit
    explained: float
    shifts: Float64

    @property
    def handicap(self) -> float:
        """Nats by which it must be likelier than the network without an error."""
        return 0.0 if self.hypothesis.name == AS_IT_IS else LEAST_GAIN

    @property
    def is_adequate(self) -> bool:
        """Whether what is left is within the format's rounding error, or almost nothing of a large error.

        The error spread is that of the network without the error: with it, it may be several times as large.
        """
        if self.hypothesis.detail and self.explained >= MOST_EXPLAINED:
            return True
        reported = max(1, int(np.count_nonzero(self.fit.reported)))
        outliers = np.count_nonzero(self.fit.wrong) / reported
        sizes = np.minimum(self.fit.sizes[self.fit.reported], 2.0 * factors.OFF)
        rms = math.sqrt(float(np.mean(sizes**2))) if len(sizes) else 0.0
        return bool(outliers <= (MOST_OUTLIERS if self.hypothesis.detail else 0.0) and rms <= factors.OFF)


# --- the hypotheses


def hypotheses_of(
    model: LoadedModel, rollouts: Sequence[Rollout], chunks: Sequence[int] = (), previous: LoadedModel | None = None
) -> list[Hypothesis]:
    """Those that the file and the model leave possible; `rollouts` are all of the file, for what stood beside each."""
    parts = [] if previous is None else part_names(model, previous)
    return [
        Hypothesis(AS_IT_IS, "", partial(always, None)),
        *head_hypotheses(),
        *pack_hypotheses(rollouts),
        *seen_hypotheses("padding is not masked", padding_before(model, rollouts)),
        *border_hypotheses(rollouts, chunks),
        *route_hypotheses(rollouts),
        *(Hypothesis("stale weights", name, partial(always, {"part": name})) for name in parts),
    ]


def always(variant: Variant | None, rollout: Rollout) -> Variant | None:
    """The same of every rollout."""
    return variant


def head_hypotheses() -> list[Hypothesis]:
    return [
        Hypothesis(
            HEAD,
            f"logits in {name}" + (", and the head's inputs" if inputs else ""),
            partial(always, {"head_bits": bits, "rounds_inputs": inputs}),
            bits,
        )
        for name, bits in (("bfloat16", 8), ("float16", 11))
        for inputs in (True, False)
    ]


def pack_hypotheses(rollouts: Sequence[Rollout]) -> list[Hypothesis]:
    """State of the sequences before in a pack."""
    return seen_hypotheses("state leaks in a pack", packed_before(rollouts))


def seen_hypotheses(name: str, before: Mapping[str, list[list[int]]]) -> list[Hypothesis]:
    """That the convolution, attention, or both see what stands before a rollout, by its id."""
    if not before:
        return []
    near = {rollout_id: sequences[-MOST_BEFORE:] for rollout_id, sequences in before.items()}
    return [
        Hypothesis(name, "convolution", partial(seen, near, True, False)),
        Hypothesis(name, "attention", partial(seen, before, False, True)),
        Hypothesis(name, "convolution and attention", partial(seen, before, True, True)),
    ]


def seen(before: Mapping[str, list[list[int]]], conv: bool, attend: bool, rollout: Rollout) -> Variant | None:
    """By the convolution, by attention: what stands before the rollout, if anything does."""
    return {"before": before[rollout.id], "conv": conv, "attend": attend} if rollout.id in before else None


def packed_before(rollouts: Sequence[Rollout]) -> dict[str, list[list[int]]]:
    """By id, the sequences before it in its pack; none for the first of a pack."""
    packs: dict[str, list[Rollout]] = {}
    before = {}
    for rollout in rollouts:
        if rollout.pack is not None:
            earlier = packs.setdefault(rollout.pack, [])
            if earlier:
                before[rollout.id] = [list(ids_of(each)) for each in earlier]
            earlier.append(rollout)
    return before


def padding_before(model: LoadedModel, rollouts: Sequence[Rollout]) -> dict[str, list[list[int]]]:
    """By id, the padding to the left; where the file does not say how much, up to the longest of the group."""
    longest: dict[str, int] = {}
    for rollout in rollouts:
        if rollout.group is not None:
            longest[rollout.group] = max(longest.get(rollout.group, 0), len(rollout.prompt_token_ids))
    padding = {}
    for rollout in rollouts:
        most = longest.get(rollout.group or "", 0) - len(rollout.prompt_token_ids)
        count = rollout.left_padding or max(0, most)
        token = rollout.pad_token_id if rollout.pad_token_id is not None else model.config.pad_token_id
        if count:
            padding[rollout.id] = [[token or 0] * count]
    return padding


def border_hypotheses(rollouts: Sequence[Rollout], chunks: Sequence[int]) -> list[Hypothesis]:
    """The convolution's state, or all of it, lost between chunks of a prompt or a sequence, or before the answer."""
    longest = max((len(ids_of(rollout)) for rollout in rollouts), default=0)
    sizes = [size for size in dict.fromkeys((*chunks, *CHUNKS)) if size < longest]

    def every(size: int, attend: bool) -> Callable[[Rollout], Variant | None]:
        return lambda rollout: (
            {"borders": list(range(size, len(ids_of(rollout)), size)), "attend": attend}
            if len(ids_of(rollout)) > size + 1
            else None
        )

    def before_answer(rollout: Rollout) -> Variant:
        return {"borders": [len(rollout.prompt_token_ids)], "attend": True}

    return [
        Hypothesis("state lost between prefill and decode", "convolution", before_answer),
        *(
            Hypothesis(CHUNKED, f"{state}, every {size} tokens", every(size, attend))
            for size in sizes
            for state, attend in (("convolution", True), ("all state", False))
        ),
    ]


def route_hypotheses(rollouts: Sequence[Rollout]) -> list[Hypothesis]:
    """Experts other than those that the sampler reports: the trainer's, the network's own, the token's before, the
    sequence's before.
    """
    if not any(rollout.routes is not None or rollout.trainer_routes is not None for rollout in rollouts):
        return []
    earlier: dict[str, Any] = {}
    for before, rollout in itertools.pairwise(rollouts):
        if before.routes is not None and rollout.routes is not None:
            rows = len(rollout.routes)
            earlier[rollout.id] = (*before.routes[:rows], *rollout.routes[len(before.routes) :])
    return [
        Hypothesis(
            ROUTES,
            "those that the trainer reports",
            lambda rollout: None if rollout.trainer_routes is None else {"routes": rollout.trainer_routes},
        ),
        Hypothesis(ROUTES, "the network's own", partial(always, {"routes": "own"})),
        Hypothesis(
            ROUTES,
            "of the token before",
            lambda rollout: None if rollout.routes is None else {"routes": (rollout.routes[0], *rollout.routes[:-1])},
        ),
        Hypothesis(
            ROUTES,
            "of the sequence before in the file",
            lambda rollout: {"routes": earlier[rollout.id]} if rollout.id in earlier else None,
        ),
    ]


# --- their predictions


def predictions_of(
    model: LoadedModel,
    scores: Sequence[Scores],
    hypotheses: Sequence[Hypothesis],
    readings: Sequence[str],
    previous: LoadedModel | None,
    place: Place,
    progress: Progress | None = None,
) -> list[Mapping[str, Predicted] | None]:
    """Of each hypothesis the predicted values by reading, of these; None where it changes no rollout of the sample, or
    where the network so changed overflows.
    """
    needed = list(dict.fromkeys(each for reading in readings for each in (reading, BEFORE.get(reading, reading))))
    items, owners = [], []
    for index, each in enumerate(scores):  # what shares a pass stands together: see variants.run
        for number, hypothesis in enumerate(hypotheses):
            variant = hypothesis.variants(each.rollout)
            if variant is not None:
                item, _ = item_of(each.rollout, needed)
                del item["columns"]
                if isinstance(variant.get("routes"), tuple):
                    item["routes"] = np.asarray(variant["routes"], np.int64)[: len(item["token_ids"]) - 1]
                    variant = {}
                items.append({**item, "variant": variant})
                owners.append((number, index))
    unrecorded = replace(place, record=None)  # an item names no checkpoint
    there = previous if previous is None or place.executor is None else source_of(previous)
    results = compute(variant_work(there), model, items, unrecorded, progress)
    changed: list[dict[int, Mapping[str, Any]]] = [{} for _ in hypotheses]
    for (number, index), result in zip(owners, results, strict=True):
        changed[number][index] = result
    return [
        by_reading(scores, changes, needed) if changes or hypothesis.name == AS_IT_IS else None
        for hypothesis, changes in zip(hypotheses, changed, strict=True)
    ]


def by_reading(
    scores: Sequence[Scores], changes: Mapping[int, Mapping[str, Any]], readings: Sequence[str]
) -> dict[str, Predicted] | None:
    """Of the sample, where some rollouts have other values, by number; None if one can't be computed."""
    if any("error" in result for result in changes.values()):
        return None
    changed = [changed_by(each, changes.get(index), readings) for index, each in enumerate(scores)]
    return {reading: predicted(changed, reading) for reading in readings}


def changed_by(scores: Scores, arrays: Mapping[str, Any] | None, readings: Sequence[str]) -> Scores:
    if arrays is None:
        return scores
    fields = {name: arrays[name] for name in ("logprobs", "low", "high", "squares", "least")}
    return replace(scores, numbers=item_of(scores.rollout, readings)[1], **fields)


# --- which explains best


def explanations(
    reported: Float64,
    expected: str,
    hypotheses: Sequence[Hypothesis],
    predictions: Sequence[Mapping[str, Predicted] | None],
    spreads: Sequence[Spread],
    readings: Sequence[str],
) -> list[Explanation]:
    """Each hypothesis under its likeliest reading and format, the likeliest first.

    expected  the reading that the side should have reported
    readings  that are tried; the expected one first
    """
    base = next(values for h, values in zip(hypotheses, predictions, strict=True) if h.name == AS_IT_IS)
    assert base is not None
    with np.errstate(invalid="ignore"):
        before = np.minimum(np.abs(reported - base[expected].logprobs), 50.0)
    known = ~np.isnan(reported)
    total = math.fsum((before[known] ** 2).tolist())
    explained_by = []
    for hypothesis, values in zip(hypotheses, predictions, strict=True):
        if values is None:
            continue
        tried = [
            fit(reported, values[reading], spread, reading)
            for reading in readings
            for spread in spreads
            if spread.bits > 2 * hypothesis.bits
        ]
        is_plain = hypothesis.name == AS_IT_IS
        best = max(tried, key=lambda each: (is_plain and each.is_right, each.log_likelihood))
        with np.errstate(invalid="ignore"):
            left = np.minimum(np.abs(best.errors), 50.0)
            shifts = values[best.reading].logprobs - base[expected].logprobs
        explained = 1.0 - math.fsum((left[known] ** 2).tolist()) / total if total else 0.0
        explained_by.append(Explanation(hypothesis, best, max(0.0, explained), np.nan_to_num(shifts)))
    return sorted(explained_by, key=lambda each: each.fit.log_likelihood - each.handicap, reverse=True)


def reading_words(expected: str, actual: str, sampling: SamplingParams) -> str:
    """What a side does that reports `actual` where `expected` was meant; "" if they are the same."""
    if expected == actual:
        return ""
    if actual in OTHERS or expected in OTHERS:
        side, reading = ("", actual) if actual in OTHERS else ("the sampler's are ", expected)
        return f"{side}{reading}, which the file does not say"
    has_filters = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    has_penalties = any(getattr(sampling, name) != neutral for name, neutral in PENALTIES.items())
    words = []
    for readings, has_effect, left_out, added in (
        (TEMPERED, sampling.temperature not in (0.0, 1.0), "temperature not applied", "temperature applied"),
        (FILTERED, has_filters, "not renormalised over the kept tokens", "renormalised over kept tokens"),
        (PENALISED, has_penalties, "penalties not applied", "penalties applied"),
    ):
        if has_effect and (expected in readings) != (actual in readings):
            words.append(left_out if expected in readings else added)
    return ", ".join(words)
