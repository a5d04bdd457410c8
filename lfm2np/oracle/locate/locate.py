"""Where an engine goes wrong: the first operation whose output its own inputs do not explain.

Each dumped tensor is compared with what the operation computes in float64 from the engine's OWN dumped inputs, so that
an error counts where it arises, and not again later. An input that was not dumped is recomputed from its own inputs,
with what the format may lose there: the fault may then be in any recomputed operation. spread.py derives the bounds.

A dumped number has the spread of one rounding when it is read: a fused kernel may have continued with the unrounded
number. A number that is not finite is reported, then replaced by the expected one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.oracle.locate import mixture
from lfm2np.oracle.locate.dump import Dump, default_format
from lfm2np.oracle.locate.mixture import CHOSEN, OUTPUTS, WEIGHTS
from lfm2np.oracle.locate.operation import Operation, Oracle
from lfm2np.oracle.locate.operations import operations
from lfm2np.oracle.locate.patterns import (
    STEP,
    Context,
    describe_channels,
    describe_reads,
    describe_rows,
    describe_steps,
)
from lfm2np.oracle.locate.rounded_inputs import rounds
from lfm2np.oracle.locate.spread import LIMIT, PRECISIONS, Measured, Precision, joined_rows, precision_named, rounded
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.processor import require_ieee
from lfm2np.values import Progress

Array = NDArray[Any]
EMBEDDINGS = "model.embed_tokens"
BLUNT = 0.5  # of a tensor's size; from all tensors of a right bfloat16 engine bounds are at most 0.2 of it
LARGEST = float(np.finfo(np.float32).max)  # no format of an engine exceeds it


@dataclass(frozen=True)
class Finding:
    """One tensor that its inputs do not explain."""

    name: str
    operation: str  # in words
    layer: int | None
    recomputed: tuple[str, ...]  # the operations before it that were not dumped: the fault may be in these
    error: float  # the largest, measured by its bound; infinite where a number is not finite
    bound: float  # of that error
    row: int
    channel: int
    value: float  # the engine's,
    expected: float  # and the right one
    wrong_numbers: int
    numbers: int
    rows: str  # the pattern, in words
    channels: str
    steps: str  # which of several steps are wrong, in words
    place: str  # of the largest error, in words
    noun: str  # what a channel is called
    experts: str  # of a mixture: whose numbers are wrong, in words
    choice: str  # of an expert: what is wrong with it, in words


@dataclass(frozen=True)
class Check:
    """One dumped tensor that was checked."""

    name: str
    error: float  # the largest, measured by its bound: right up to 1
    is_blunt: bool  # bounds near its size: too much before it is not dumped, so that it can hardly be wrong
    is_rounded: bool | None = None  # of products with quantised weights: whether their inputs were, to 8 bits


@dataclass(frozen=True)
class Report:
    """What was checked and what was found, in the model's order."""

    format: str
    num_tokens: int
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    unreached: tuple[str, ...]  # operations on which no dumped tensor depends
    unknown: tuple[str, ...]  # names in the dump that mean nothing here
    narrower: str | None  # a coarser format that holds every number dumped: what the engine may compute in

    @property
    def is_conclusive(self) -> bool:
        """Whether a fault was found, or could have been found in a tensor after the embeddings."""
        return bool(self.findings) or any(check.name != EMBEDDINGS and not check.is_blunt for check in self.checks)


def locate(
    tensors: Mapping[str, StoredTensor],
    config: ModelConfig,
    dump: Dump,
    precision: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Checks every dumped tensor against its inputs.

    tensors    the checkpoint's (checkpoint.open_checkpoint)
    precision  what the engine computes in: one of spread.PRECISIONS; None: what the dump is stored in
    progress   called with (operations done, operations in all)
    errors     CheckpointError for weights that are not finite, RequestError for another precision
    """
    require_ieee()
    chosen = precision_named(precision or default_format(dump))
    oracle = Oracle(tensors, config, chosen, dump.token_ids, dump.steps, chosen.rounds_inputs)
    steps = operations(config, dump.tensors)
    needed = needed_names(steps, dump)
    known: dict[str, Measured] = {}
    exact: dict[str, Measured] = {}  # where products of inputs that are not rounded make something else
    behind: dict[str, tuple[str, ...]] = {}  # by name, what was recomputed to get it
    findings, checks = [], []
    with np.errstate(all="ignore"):
        for done, step in enumerate(steps, start=1):
            if step.name in needed or step.name in dump.tensors:
                expected, is_rounded = computed(step, oracle, known, exact, dump)
                recomputed = tuple(dict.fromkeys(name for source in step.inputs for name in behind[source]))
                known[step.name], behind[step.name] = expected, (*recomputed, step.name)
            if step.name in dump.tensors:
                if step.prefers is None:
                    expected = as_stored(expected, dump, step.name)
                    check, wrong = looked_at(step, dump, expected, recomputed, known.get(step.chosen))
                    check = replace(check, is_rounded=is_rounded)
                else:
                    preferred = step.prefers(oracle, known[step.inputs[0]])
                    check, wrong = looked_at_choice(step, dump, expected, recomputed, preferred)
                checks.append(check)
                findings += wrong
                known[step.name], behind[step.name] = as_read(dump, step, expected, chosen), ()
            if progress:
                progress(done, len(steps))
    reached = needed | dump.tensors.keys()
    unreached = tuple(step.name for step in steps if step.name not in reached)
    return Report(
        format=chosen.name,
        num_tokens=len(dump.token_ids),
        checks=tuple(checks),
        findings=tuple(findings),
        unreached=unreached,
        unknown=dump.unknown,
        narrower=narrower_format(dump, chosen),
    )


def logits_at(tensors: Mapping[str, StoredTensor], config: ModelConfig, dump: Dump, row: int) -> Array:
    """[V] at a position: as dumped, or what the last dumped tensors give."""
    dumped = dump.tensors.get("lm_head", np.empty((0, config.vocab_size)))
    if (place := row - len(dump.token_ids)) >= -len(dumped):
        return np.asarray(dumped[place])
    chosen = precision_named(default_format(dump))
    oracle = Oracle(tensors, config, chosen, dump.token_ids, dump.steps, chosen.rounds_inputs)
    known: dict[str, Measured] = {}
    exact: dict[str, Measured] = {}
    with np.errstate(all="ignore"):
        for step in operations(config, dump.tensors):
            known[step.name], _ = computed(step, oracle, known, exact, dump)
            if step.name in dump.tensors and step.name != "lm_head":
                known[step.name] = as_read(dump, step, known[step.name], chosen)
    return np.asarray(known["lm_head"].values[row])


def computed(
    step: Operation, oracle: Oracle, known: Mapping[str, Measured], exact: dict[str, Measured], dump: Dump
) -> tuple[Measured, bool | None]:
    """What an operation computes from its inputs; and for a product, whether inputs were rounded to 8 bits (None: no
    question).

    Either explains the dump: all products before it that are not dumped round their inputs, or none does. `exact` gets
    what the latter gives for operations that are not dumped, where it differs from `known`.
    """
    expected = step.compute(oracle, *(known[name] for name in step.inputs))
    may_round = step.weights != "" and rounds(oracle.tensors[f"{step.weights}.weight"])
    if not (oracle.rounds_inputs and (may_round or exact.keys() & set(step.inputs))):
        return expected, None

    def error(candidate: Measured) -> float:
        return float(errors_by_bound(dump.tensors[step.name], as_stored(candidate, dump, step.name)).max())

    is_dumped = step.name in dump.tensors
    if is_dumped and (step.prefers is not None or error(expected) <= 1.0):
        return expected, True if may_round else None
    other = step.compute(replace(oracle, rounds_inputs=False), *(exact.get(name, known[name]) for name in step.inputs))
    if not is_dumped:
        exact[step.name] = other
        return expected, None
    is_rounded = error(expected) <= error(other)
    return (expected if is_rounded else other), is_rounded if may_round else None


def narrower_format(dump: Dump, precision: Precision) -> str | None:
    """The coarsest format below `precision` that holds all dumped numbers after the embeddings.

    The coarsest: numbers of bfloat16 that happen not to be tiny are numbers of float16, too, hardly ever the reverse.
    """
    tensors = [values for name, values in dump.tensors.items() if name != EMBEDDINGS and not name.endswith(CHOSEN)]
    for coarser in sorted(PRECISIONS.values(), key=lambda coarser: coarser.unit, reverse=True):
        if tensors and coarser.unit > precision.unit and all(np.array_equal(coarser.keep(x), x) for x in tensors):
            return coarser.name
    return None


def needed_names(steps: Sequence[Operation], dump: Dump) -> set[str]:
    """The inputs of dumped tensors, and of what has to be recomputed for them."""
    needed: set[str] = set()
    for step in reversed(steps):
        if step.name in dump.tensors or step.name in needed:
            needed.update(step.inputs)
    return needed


def as_stored(expected: Measured, dump: Dump, name: str) -> Measured:
    """What the file may hold of it: rounded again if its format is coarser than the engine's."""
    coarser = PRECISIONS.get(dump.stored.get(name, ""))
    return rounded(expected.values, coarser, expected.spread) if coarser else expected


def as_read(dump: Dump, step: Operation, expected: Measured, precision: Precision) -> Measured:
    """A dumped tensor as an input: with the spread of a rounding; missing or not finite numbers as expected."""
    name = step.name
    if step.prefers is not None:
        return mixture.as_read(dump.tensors[name], expected)
    values, first = dump.tensors[name], len(expected.values) - len(dump.tensors[name])
    values = np.where(np.abs(values) <= LARGEST, values, expected.values[first:])
    stored = PRECISIONS.get(dump.stored.get(name, ""), precision)
    dumped = rounded(values, max(stored, precision, key=lambda form: form.unit))
    return joined_rows([expected[:first], dumped]) if first else dumped


def says_nothing(expected: Measured) -> bool:
    """Whether the bounds of most rows are more than BLUNT of the values."""
    size = np.sqrt(np.square(expected.values).mean())
    of_rows = np.sqrt(np.square(expected.bound()).mean(axis=1))
    return bool(np.median(of_rows) > BLUNT * size > 0.0)


def errors_by_bound(values: Array, expected: Measured) -> Array:
    """Each error relative to its bound; infinite for a number that is not finite, 0 where the bound is.

    `values` may be the last rows only.
    """
    first = len(expected.values) - len(values)
    errors = np.abs(values - expected.values[first:]) / expected.bound()[first:]
    return np.where(np.abs(values) <= LARGEST, np.nan_to_num(errors, nan=0.0), np.inf)


def looked_at(
    step: Operation, dump: Dump, expected: Measured, recomputed: tuple[str, ...], chosen: Measured | None
) -> tuple[Check, list[Finding]]:
    """A dumped tensor against the expected one as it may be stored; `chosen`: the experts whose numbers these are."""
    values = dump.tensors[step.name]
    first = len(expected.values) - len(values)
    errors = errors_by_bound(values, expected)
    wrong = errors > 1.0
    check = Check(step.name, float(errors.max()), says_nothing(expected[first:]))
    if not wrong.any():
        return check, []
    channels = describe_channels(wrong, step.heads, step.parts, step.noun)
    experts = whose(step, wrong, chosen[first:]) if chosen is not None else ""
    held = expected[first:]
    return check, [finding(step, dump, recomputed, first, errors, held.values, held.bound(), channels, experts)]


def whose(step: Operation, wrong: Array, chosen: Measured) -> str:
    """Which experts' weights or outputs are wrong, or which one's part of their sum, in words."""
    count = int((chosen.values[0] > 0.0).sum())
    ids = mixture.chosen_ids(chosen, count)
    if step.name.endswith((WEIGHTS, OUTPUTS)):
        by_place = np.asarray(wrong.reshape(*ids.shape, -1).any(axis=-1))
        return mixture.describe_experts(by_place, ids, chosen.values.shape[1])
    return mixture.describe_common(np.asarray(wrong.any(axis=1)), ids)


def looked_at_choice(
    step: Operation, dump: Dump, expected: Measured, recomputed: tuple[str, ...], preferred: Measured
) -> tuple[Check, list[Finding]]:
    ids, experts = dump.tensors[step.name], preferred.values.shape[1]
    judged_ids = mixture.judged(ids, preferred)
    check = Check(step.name, float(judged_ids.errors.max()), mixture.says_nothing(expected, BLUNT))
    if not (judged_ids.errors > 1.0).any():
        return check, []
    channels = mixture.describe_choices(ids, judged_ids, experts)
    choice = mixture.in_words(ids, judged_ids, *worst_of(judged_ids.errors), experts)
    first, bounds = len(expected.values) - len(ids), LIMIT * judged_ids.noise
    return check, [
        finding(step, dump, recomputed, first, judged_ids.errors, judged_ids.instead, bounds, channels, choice=choice)
    ]


def worst_of(errors: Array) -> tuple[int, int]:
    row, channel = np.unravel_index(np.argmax(errors), errors.shape)
    return int(row), int(channel)


def finding(
    step: Operation,
    dump: Dump,
    recomputed: tuple[str, ...],
    first: int,
    errors: Array,
    expected: Array,
    bounds: Array,
    channels: str,
    experts: str = "",
    choice: str = "",
) -> Finding:
    """The tensor's largest error, and the pattern of all that exceed their bounds.

    Arrays are of the dumped rows, those from `first` on.
    """
    values, wrong = dump.tensors[step.name], errors > 1.0
    row, channel = worst_of(errors)
    rows = np.zeros(first + len(values), bool)
    rows[first:] = wrong.any(axis=1)
    in_steps = describe_steps(rows, dump.steps, step.per)
    if isinstance(step.per, Context):
        in_words = describe_reads(rows, dump.steps, step.per)
    else:
        in_words = in_steps if step.per == STEP and in_steps else describe_rows(rows, first, step.per)
    return Finding(
        name=step.name,
        operation=step.words,
        layer=step.layer,
        recomputed=recomputed,
        error=float(errors[row, channel]),
        bound=float(bounds[row, channel]),
        row=first + row,
        channel=channel,
        value=float(values[row, channel]),
        expected=float(expected[row, channel]),
        wrong_numbers=int(wrong.sum()),
        numbers=wrong.size,
        rows=in_words,
        channels=channels,
        steps=in_steps,
        place=dump.steps.place(step.per, first + row),
        noun=step.noun,
        experts=experts,
        choice=choice,
    )
