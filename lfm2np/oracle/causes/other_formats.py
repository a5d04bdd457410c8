"""Another number format than the declared one as the reason of errors: named if it explains them, as far as it does.

alike    right under it, as large as its errors everywhere, and correlated with those of emulated engines: certain
by size  the first two: so err other engines of this format, whose roundings stand elsewhere, but also weights that are
         off by as much; of quantised weights in an unknown scheme no more can be said, as those of emulated engines are
         drawn. They err by the same amounts where the same tokens are sent again, else they are not named
smaller  right under it, and somewhere or everywhere smaller: an engine that rounds so in places, or any small error

The rounding errors of two engines of a format have a part in common, where both round the same numbers. ALIKE lies
between what was measured when it was chosen: correlations of 0.4 and more of emulated engines and of transformers, and
of other errors of that size at most 0.15 in bfloat16 and float16.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.files import is_gguf, read_tensors
from lfm2np.checkpoint.tensors import input_roundings
from lfm2np.errors import NumericsError
from lfm2np.oracle.causes.groups import FINE, LEAST, SHOWN, Group, group_of, grouped
from lfm2np.oracle.causes.split import described, is_unsteady
from lfm2np.oracle.judging.constants import search_constants
from lfm2np.oracle.judging.formats import format_named, others
from lfm2np.oracle.judging.judge import FAR, judge, worst_of
from lfm2np.oracle.judging.noise import DRAWS, FIRST
from lfm2np.oracle.judging.position import is_wrong
from lfm2np.oracle.judging.scored import Evidence, add_noises, spoken, truths_of, usable
from lfm2np.oracle.judging.truth import Spoken
from lfm2np.oracle.judging.verdict import FLIPS_LIMIT, LIMIT, Position, chance_together, size_of

Float64 = NDArray[np.float64]
SOME = 32  # answers that are tried before all
MOST_FLIPS = 0.5  # of an engine's new tokens: a format that flips more explains anything
LEAST_SIZE = 0.3  # root mean square of right engines' errors in units of their own format's noise
LEAST_OF_STEPS = 0.5  # the least where it is not known how weights are quantised: such noise explains too much
LEAST_PART = 0.15  # in any group, of the errors of the emulated engine that errs least there
ALIKE = 0.3  # correlation with the mean of emulated engines,
SURE = 2.0  # and its distance from 0 in standard deviations, each sequence with a sign of its own


class Fit(StrEnum):
    """How well another format explains errors; in words, of {0}, not the declared {1}."""

    ALIKE = "errs like {0} everywhere: not the {1} that it declares"
    BY_SIZE = (
        "right under --format {0}, with errors of its size everywhere: run again with it if the engine computes in it, "
        "else weights, an operator or a state are off by as much; not the {1} that it declares"
    )
    SMALLER = "wrong by less than {0} rounds, right under --format {0}"


def other_format(evidence: Evidence) -> tuple[str, Fit] | None:
    """The first of `others` that errs so, alike or by size; else the first under which all is right, or None.

    A format under which a right engine would choose mostly other tokens explains anything, so it is not named. Nor is
    one under which a constant is seen to be off: rounding has no direction.

    The answer that is furthest off is tried alone first, then SOME of all.
    """
    model, pairs, known, progress = evidence.model, evidence.pairs, evidence.known, evidence.progress
    worst = max(evidence.positions, key=lambda at: max(at.gap_ratio * at.is_flip, abs(at.error_ratio or 0.0)))
    first = [pair for pair in pairs if pair[0].request_id == worst.request.request_id]
    tensors = read_tensors(model.path, model.config)
    is_quantised = any(tensor.is_quantised for tensor in tensors.values())
    states_inputs = bool(input_roundings(model.path, model.config))
    smaller, unsteady = None, is_unsteady(evidence.positions)
    for name in others(evidence.format_name, is_quantised and is_gguf(model.path), states_inputs, is_quantised):
        if format_named(name).levels and (smaller is not None or unsteady):
            break  # which explain almost anything, but not that the same tokens err by other amounts
        under = partial(judge, model, name, progress=progress, known=known, explains=False)
        try:
            tried = under(first, draws=FIRST)  # weights that each engine draws are expensive
            if not model.config.sparse_layers and worst_of(tried) > LIMIT * FAR:
                continue
            if is_wrong(under(first)) or is_wrong(under(pairs[:: max(1, len(pairs) // SOME)])):
                continue
            judged = under(pairs)
            if is_wrong(judged) or chance_together(judged) < FLIPS_LIMIT or not is_telling(judged):
                continue
            under_it = replace(evidence, format_name=name, positions=judged)
            fit = fit_of(under_it, evidence.positions)
            seen = search_constants(under_it, is_wrong=True, is_wanted=False)
        except NumericsError:
            continue  # it can't hold this model's numbers
        if fit is None or (seen is not None and seen.found):
            continue
        if fit is not Fit.SMALLER:
            return name, fit
        smaller = smaller or (name, fit)
    return smaller


def is_telling(judged: Sequence[Position]) -> bool:
    flips = [position.flip_chance for position in judged if position.flip_chance is not None]
    return math.fsum(flips) <= MOST_FLIPS * len(flips)


def fit_of(evidence: Evidence, declared: Sequence[Position]) -> Fit | None:
    """Of a format under which each position is right; None if they are too large together somewhere.

    declared  the same positions under the declared format

    An error is compared with those of emulated engines at the same position: where a token is certain all are near 0.
    No group of positions may err far less, nor the median, nor what is right under the declared format if a split tells
    where that is: with several bugs no tag may be free of errors, though no format makes them.
    """
    form, reported = format_named(evidence.format_name), [at for at in evidence.positions if at.error is not None]
    if any(group.told >= 4 * LEAST and group.rms > FINE for group in by_tags(reported)):
        return None
    if size_of(evidence.positions) < (LEAST_OF_STEPS if form.levels else LEAST_SIZE):
        return Fit.SMALLER
    emulated, sequences = emulated_errors(evidence, reported)
    scales = np.array([position.scale for position in reported])
    errors, theirs = np.array([position.error for position in reported], np.float64) / scales, emulated / scales
    if np.median(np.abs(errors)) < LEAST_PART * np.median(np.abs(theirs), axis=1).min():
        return Fit.SMALLER  # no format leaves most positions without an error, and makes a few wrong
    description = described(declared)
    inside = frozenset() if description is None else description.inside

    def groups_of(of_each: Float64) -> list[Group]:
        some = [replace(at, error_size=abs(float(error))) for at, error in zip(reported, of_each, strict=True)]
        return [*by_tags(some), group_of([at for at in some if at.place in inside])]

    least = [min(group.rms for group in groups) for groups in zip(*map(groups_of, theirs), strict=True)]
    for group, least_rms in zip(groups_of(errors), least, strict=True):
        if group.told >= 4 * LEAST and group.rms < LEAST_PART * least_rms:
            return Fit.SMALLER
    alike = not form.levels and is_alike(errors, theirs.mean(axis=0), sequences)
    return Fit.ALIKE if alike else Fit.BY_SIZE


def by_tags(positions: Sequence[Position]) -> list[Group]:
    return [group for name in SHOWN for group in grouped(positions, name).values()]


def emulated_errors(evidence: Evidence, positions: Sequence[Position]) -> tuple[Float64, list[Spoken]]:
    """[K, N] of all DRAWS at the positions' own tokens, and the N sequences of these."""
    pairs = usable(evidence.pairs)
    truths = truths_of(evidence.model, pairs, evidence.known)
    add_noises(evidence.model, evidence.format_name, list(truths.values()), evidence.known, DRAWS)
    of_request = {request.request_id: truths[spoken(request, answer)] for request, answer in pairs}
    errors, sequences = [], []
    for position in positions:
        truth = of_request[position.request.request_id]
        noise = evidence.known.noises[evidence.format_name, truth.spoken]
        errors.append(noise.errors[:, position.row - truth.first, truth.at(position.row, position.token_id)])
        sequences.append(truth.spoken)
    return np.array(errors, np.float64).T, sequences


def is_alike(errors: Float64, others: Float64, sequences: Sequence[Spoken]) -> bool:
    """Whether errors [N] are correlated with others [N], by more than ALIKE, and by SURE: no accident.

    Errors of one sequence depend on each other, so each sequence is one observation.
    """
    products: defaultdict[Spoken, float] = defaultdict(float)
    for sequence, product in zip(sequences, errors * others, strict=True):
        products[sequence] += float(product)
    total, by_chance = math.fsum(products.values()), math.sqrt(math.fsum(each**2 for each in products.values()))
    return total > SURE * by_chance and total > ALIKE * math.sqrt(float(errors @ errors) * float(others @ others))
