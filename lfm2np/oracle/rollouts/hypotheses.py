"""What may be wrong with a side: a table of hypotheses, each with the log-probabilities that it predicts.

A hypothesis is one error: in the network (variants.py) or in how its log-probabilities were written down (undo). With a
reading (exact.py) it predicts what a side reports, within a format (fits.py). The table is in the order in which equals
are named, the simplest first.
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
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.noise import Noise
from lfm2np.oracle.rollouts.exact import AT, PENALTIES, Scores, item_of, joined, params_of, views_from
from lfm2np.oracle.rollouts.fits import Fit, fit
from lfm2np.oracle.rollouts.rollout import Rollout
from lfm2np.oracle.rollouts.variants import part_names, variant_work

Float64 = NDArray[np.float64]
Variant = dict[str, Any]
Values = list[Float64]  # [R] of each rollout
Undo = Callable[[Values, Values], tuple[Values, str]]
MOST_BEFORE = 3  # sequences of a pack: what leaks through more convolutions is below any rounding error
CHUNKS = tuple(2**k for k in range(3, 14))
AS_IT_IS, HEAD, CHUNKED = "as computed", "head precision", "state lost at a chunk border"
ROUTES = "routes of another run"


def no_change(rollout: Rollout) -> Variant | None:
    return None


def as_reported(reported: Values, exact: Values) -> tuple[Values, str]:
    return reported, ""


@dataclass(frozen=True)
class Hypothesis:
    """One error.

    name      the kind, by which it is reported
    detail    which of its kind
    variants  the network's error for a rollout; None where it changes nothing
    undo      of values as reported, and the exact ones: what they were before the error, NaN where that is lost,
              and a detail that it found
    bits      of the significand that it rounds to: tried in formats of more than twice as many
    readings  those under which it is tried; (): those of the side
    """

    name: str
    detail: str = ""
    variants: Callable[[Rollout], Variant | None] = no_change
    undo: Undo = as_reported
    bits: int = 0
    readings: tuple[str, ...] = ()

    @property
    def is_of_network(self) -> bool:
        return self.undo is as_reported


def hypotheses_of(
    model: LoadedModel, rollouts: Sequence[Rollout], chunks: Sequence[int] = (), previous: LoadedModel | None = None
) -> list[Hypothesis]:
    """Those that the file and the model leave possible; `rollouts` are all of the file, for what stood beside each."""
    parts = [] if previous is None else part_names(model)
    return [
        Hypothesis(AS_IT_IS),
        Hypothesis("log-probabilities shifted by one position", "of the token before", undo=partial(shifted, 1)),
        Hypothesis("log-probabilities shifted by one position", "of the token after", undo=partial(shifted, -1)),
        Hypothesis("labels are not shifted", "logits that have seen the token", always({"late": 1})),
        Hypothesis("a constant offset", undo=without_offset),
        Hypothesis("another base of the logarithm", "2", undo=partial(in_nats, math.log(2.0))),
        Hypothesis("another base of the logarithm", "10", undo=partial(in_nats, math.log(10.0))),
        Hypothesis(HEAD, "logits in bfloat16, and the head's inputs", always(head(8, True)), bits=8),
        Hypothesis(HEAD, "logits in bfloat16", always(head(8, False)), bits=8),
        Hypothesis(HEAD, "logits in float16, and the head's inputs", always(head(11, True)), bits=11),
        Hypothesis(HEAD, "logits in float16", always(head(11, False)), bits=11),
        *seen_hypotheses("state leaks in a pack", packed_before(rollouts)),
        *seen_hypotheses("padding is not masked", padding_before(model, rollouts)),
        Hypothesis("state lost between prefill and decode", "convolution", lost_before_the_answer),
        *chunk_hypotheses(rollouts, chunks),
        *route_hypotheses(rollouts),
        *(Hypothesis("stale weights", name, always({"part": name})) for name in parts),
    ]


def temperature_hypothesis(reading: str, temperature: float) -> Hypothesis:
    at = f"{temperature:g}"
    name = f"a temperature of {at} other than the stated one"
    return Hypothesis(name, variants=always({}), readings=(f"{reading}{AT}{at}",))


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


def in_nats(factor: float, reported: Values, exact: Values) -> tuple[Values, str]:
    return [values * factor for values in reported], ""


# --- errors in the network


def always(variant: Variant) -> Callable[[Rollout], Variant | None]:
    return lambda rollout: variant


def head(bits: int, rounds_inputs: bool) -> Variant:
    return {"head_bits": bits, "rounds_inputs": rounds_inputs}


def lost_before_the_answer(rollout: Rollout) -> Variant:
    return {"borders": [len(rollout.prompt_token_ids)], "attend": True}


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
    return {"before": before[rollout.id], "conv": conv, "attend": attend} if rollout.id in before else None


def packed_before(rollouts: Sequence[Rollout]) -> dict[str, list[list[int]]]:
    """By id, the sequences before it in its pack; none for the first of a pack."""
    packs: dict[str, list[Rollout]] = {}
    before = {}
    for rollout in rollouts:
        if rollout.pack is not None:
            earlier = packs.setdefault(rollout.pack, [])
            if earlier:
                before[rollout.id] = [list(each.ids) for each in earlier]
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


def chunk_hypotheses(rollouts: Sequence[Rollout], chunks: Sequence[int]) -> list[Hypothesis]:
    """The convolution's state, or all of it, lost between chunks of a sequence."""
    longest = max((len(rollout.ids) for rollout in rollouts), default=0)
    return [
        Hypothesis(CHUNKED, f"{state}, every {size} tokens", partial(cut_every, size, attend))
        for size in dict.fromkeys((*chunks, *CHUNKS))
        if size < longest
        for state, attend in (("convolution", True), ("all state", False))
    ]


def cut_every(size: int, attend: bool, rollout: Rollout) -> Variant | None:
    count = len(rollout.ids)
    return {"borders": list(range(size, count, size)), "attend": attend} if count > size + 1 else None


def route_hypotheses(rollouts: Sequence[Rollout]) -> list[Hypothesis]:
    """Experts other than those that the sampler reports."""
    if not any(rollout.routes is not None or rollout.trainer_routes is not None for rollout in rollouts):
        return []
    earlier: dict[str, Any] = {}
    for before, rollout in itertools.pairwise(rollouts):
        if before.routes is not None and rollout.routes is not None:
            rows = len(rollout.routes)
            earlier[rollout.id] = (*before.routes[:rows], *rollout.routes[len(before.routes) :])
    late = {rollout.id: (rollout.routes[0], *rollout.routes[:-1]) for rollout in rollouts if rollout.routes is not None}
    trainers = {rollout.id: rollout.trainer_routes for rollout in rollouts if rollout.trainer_routes is not None}
    return [
        Hypothesis(ROUTES, "those that the trainer reports", partial(routed_by, trainers)),
        Hypothesis(ROUTES, "the network's own", always({"routes": "own"})),
        Hypothesis(ROUTES, "of the token before", partial(routed_by, late)),
        Hypothesis(ROUTES, "of the sequence before in the file", partial(routed_by, earlier)),
    ]


def routed_by(routes: Mapping[str, Any], rollout: Rollout) -> Variant | None:
    return {"routes": routes[rollout.id]} if rollout.id in routes else None


# --- what they predict


def prediction_of(
    model: LoadedModel,
    scores: Sequence[Scores],
    hypothesis: Hypothesis,
    readings: Sequence[str],
    previous: LoadedModel | None,
    place: Place,
) -> list[Scores] | None:
    """The scores of the rollouts under a hypothesis; None where it changes none, or where the network so changed
    overflows.
    """
    readings = hypothesis.readings or readings
    items: list[dict[str, Any]] = []
    changed: dict[int, int] = {}  # of the rollouts, the number of the item
    for index, each in enumerate(scores):
        variant = hypothesis.variants(each.rollout)
        if variant is not None:
            item = item_of(each.rollout, readings)
            if isinstance(variant.get("routes"), tuple):
                item["routes"] = np.asarray(variant["routes"], np.int64)[: len(item["token_ids"]) - 1]
                variant = {}
            changed[index] = len(items)
            items.append({**item, "variant": variant})
    if not items:
        return list(scores) if hypothesis.name == AS_IT_IS or not hypothesis.is_of_network else None
    unrecorded = replace(place, record=None)  # an item names no checkpoint
    there = previous if previous is None or place.executor is None else source_of(previous)
    results = compute(variant_work(there), model, items, unrecorded)
    if any("error" in result for result in results):
        return None
    return [
        replace(each, views=views_from(each.rollout, readings, results[changed[index]])) if index in changed else each
        for index, each in enumerate(scores)
    ]


# --- which explains most


@dataclass(frozen=True, eq=False)
class Explanation:
    """One hypothesis about a sample of rollouts, under the reading by which it leaves least.

    explained  the share of the positions that are wrong as computed which it leaves within Allowed
    """

    hypothesis: Hypothesis
    detail: str
    fit: Fit
    explained: float

    @property
    def is_error(self) -> bool:
        return self.hypothesis.name != AS_IT_IS

    @property
    def words(self) -> str:
        """ "" of the network as it is."""
        return "" if not self.is_error else self.hypothesis.name + (f" ({self.detail})" if self.detail else "")


def explanations(
    reported: Values,
    scores: Sequence[Scores],
    hypotheses: Sequence[Hypothesis],
    predictions: Sequence[list[Scores] | None],
    noises: Sequence[Noise],
    format_name: str,
    readings: Sequence[str],
) -> list[Explanation]:
    """Within one format, by Fit.rank: what explains most comes first, and of equals what the table has first."""
    tried: list[tuple[Hypothesis, str, Fit]] = []
    for hypothesis, predicted in zip(hypotheses, predictions, strict=True):
        if predicted is None or format_named(format_name).bits <= 2 * hypothesis.bits:
            continue
        fits = []
        for reading in hypothesis.readings or readings:
            undone, detail = hypothesis.undo(reported, [each.views[reading].logprobs for each in predicted])
            fits.append((hypothesis, hypothesis.detail or detail, fit(undone, predicted, noises, format_name, reading)))
        tried.append(min(fits, key=lambda each: each[-1].rank))
    wrong = next(each.num_wrong for hypothesis, _, each in tried if hypothesis.name == AS_IT_IS)
    explained = [Explanation(*each, max(0.0, 1.0 - each[-1].num_wrong / wrong) if wrong else 0.0) for each in tried]
    return sorted(explained, key=lambda each: each.fit.rank)


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
    if filters_of(meant) != filters_of(done):
        is_kept = filters_of(done) == filters_of(sampling)
        words.append("renormalised over kept tokens" if is_kept else "not renormalised over the kept tokens")
    if penalties_of(meant) != penalties_of(done):
        words.append(f"penalties {'not ' * (penalties_of(done) == PENALTIES)}applied")
    return ", ".join(words)


def filters_of(params: SamplingParams) -> tuple[float, ...]:
    return params.top_k, params.top_p, params.min_p


def penalties_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in PENALTIES}


def longest_words(scores: Sequence[Scores], expected: str, actual: str) -> str:
    """Of all requests' sampling parameters the fullest answer."""
    return max((reading_words(expected, actual, each.rollout.sampling) for each in scores), key=len, default="")
