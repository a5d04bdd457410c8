"""Where an engine goes wrong: the first operation whose output its own inputs do not explain.

Each dumped tensor is compared with what the operation computes in float64 from the engine's OWN dumped inputs, so that
an error counts where it arises, and not again later. An input that was not dumped is recomputed from its own inputs,
with what the format may lose there: the fault may then be in any recomputed operation. spread.py says how far off a
right engine may be.

A dumped number has the spread of one rounding when it is read: a fused kernel may have continued with the unrounded
number. A number that is not finite is reported, then replaced by the expected one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lfm2np.checkpoint.stored import StoredTensor
from lfm2np.oracle.locate import choice
from lfm2np.oracle.locate.dump import Dump, default_format
from lfm2np.oracle.locate.operations import CHOSEN, Operation, Oracle, operations, preferred
from lfm2np.oracle.locate.patterns import describe_channels, describe_place
from lfm2np.oracle.locate.spread import LIMIT, PRECISIONS, Array, Measured, Precision, joined, precision_named, rounded
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.processor import require_ieee
from lfm2np.values import Progress

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
    rounds_inputs: bool | None  # of q8: whether its products round their inputs to 8 bits

    @property
    def is_conclusive(self) -> bool:
        """Whether a fault was found, or could have been found in a tensor after the embeddings."""
        return bool(self.findings) or any(check.name != EMBEDDINGS and not check.is_blunt for check in self.checks)


@dataclass(frozen=True, eq=False)
class Walk:
    """What was computed and judged on the way through the operations, by their names."""

    values: dict[str, Measured] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


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
    oracle = oracle_of(tensors, config, dump, precision)
    steps = operations(config, dump.tensors)
    needed = needed_names(steps, dump)
    walked, rounds = walk(oracle, steps, needed, dump, progress), oracle.rounds_inputs
    if walked.findings and rounds:  # an engine may also multiply what it has
        other = walk(replace(oracle, rounds_inputs=False), steps, needed, dump, progress)
        walked = min(walked, other, key=lambda walked: len(walked.findings))
        rounds = walked is not other
    return Report(
        format=oracle.precision.name,
        num_tokens=len(dump.token_ids),
        checks=tuple(walked.checks),
        findings=tuple(walked.findings),
        unreached=tuple(step.name for step in steps if step.name not in needed),
        unknown=dump.unknown,
        narrower=narrower_format(dump, oracle.precision),
        rounds_inputs=rounds if oracle.rounds_inputs else None,
    )


def oracle_of(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, dump: Dump, precision: str | None = None
) -> Oracle:
    chosen = precision_named(precision or default_format(dump))
    return Oracle(tensors, config, chosen, dump.token_ids, dump.steps, chosen.rounds_inputs)


def logits_at(tensors: Mapping[str, StoredTensor], config: ModelConfig, dump: Dump, row: int) -> Array:
    """[V] at a position: as dumped, or what the last dumped tensors give."""
    dumped = dump.tensors.get("lm_head", np.empty((0, config.vocab_size)))
    if (place := row - len(dump.token_ids)) >= -len(dumped):
        return np.asarray(dumped[place])
    steps = operations(config, dump.tensors)
    walked = walk(oracle_of(tensors, config, dump), steps, [step.name for step in steps], dump)
    return np.asarray(walked.values["lm_head"].values[row])


def needed_names(steps: Sequence[Operation], dump: Dump) -> set[str]:
    """Dumped tensors, their inputs, and what has to be recomputed for them."""
    needed = set(dump.tensors)
    for step in reversed(steps):
        if step.name in needed:
            needed.update(step.inputs)
    return needed


def walk(
    oracle: Oracle, steps: Sequence[Operation], needed: Collection[str], dump: Dump, progress: Progress | None = None
) -> Walk:
    """Computes the needed operations one after another, and judges those that are dumped."""
    walked = Walk()
    behind: dict[str, tuple[str, ...]] = {}  # by name, what was recomputed to get it
    with np.errstate(all="ignore"):
        for done, step in enumerate(steps, start=1):
            if step.name in needed:
                expected = step.compute(oracle, step, *(walked.values[name] for name in step.inputs))
                recomputed = tuple(dict.fromkeys(name for source in step.inputs for name in behind[source]))
                walked.values[step.name], behind[step.name] = expected, (*recomputed, step.name)
            if step.name in dump.tensors:
                judge(step, oracle, dump, walked, recomputed)
                walked.values[step.name], behind[step.name] = as_read(dump, step, expected, oracle), ()
            if progress:
                progress(done, len(steps))
    return walked


def as_read(dump: Dump, step: Operation, expected: Measured, oracle: Oracle) -> Measured:
    """A dumped tensor as an input: with the spread of a rounding; missing or not finite numbers as expected."""
    values, precision = dump.tensors[step.name], oracle.precision
    if step.is_choice:
        return choice.as_read(values, expected, oracle.mixture.num_experts)
    first = len(expected) - len(values)
    values = np.where(np.abs(values) <= LARGEST, values, expected.values[first:])
    stored = PRECISIONS.get(dump.stored.get(step.name, ""), precision)
    return joined([expected[:first], rounded(values, max(stored, precision, key=lambda form: form.unit))])


def narrower_format(dump: Dump, precision: Precision) -> str | None:
    """The coarsest format below `precision` that holds all dumped numbers after the embeddings.

    The coarsest: numbers of bfloat16 that happen not to be tiny are numbers of float16, too, hardly ever the reverse.
    """
    tensors = [values for name, values in dump.tensors.items() if name != EMBEDDINGS and not name.endswith(CHOSEN)]
    for coarser in sorted(PRECISIONS.values(), key=lambda coarser: coarser.unit, reverse=True):
        if tensors and coarser.unit > precision.unit and all(np.array_equal(coarser.keep(x), x) for x in tensors):
            return coarser.name
    return None


def judge(step: Operation, oracle: Oracle, dump: Dump, walked: Walk, recomputed: tuple[str, ...]) -> None:
    """A dumped tensor against the expected one, of which it may be the last rows only: its check, and finding."""
    values, expected = dump.tensors[step.name], walked.values[step.name]
    first = len(expected) - len(values)
    if step.is_choice:
        by_preference = preferred(oracle, step, walked.values[step.inputs[0]])
        ids = choice.judged(values, by_preference)
        errors, right, bounds = ids.errors, ids.instead, LIMIT * ids.noise
        is_blunt = choice.share_open(by_preference, values.shape[1]) > BLUNT
    else:
        coarser = PRECISIONS.get(dump.stored.get(step.name, ""))  # the file may hold it rounded once more
        stored = (rounded(expected.values, coarser, expected.spread) if coarser else expected)[first:]
        right, bounds = stored.values, stored.bound()
        errors = np.nan_to_num(np.abs(values - right) / bounds, nan=0.0)
        errors = np.where(np.abs(values) <= LARGEST, errors, np.inf)
        size, of_rows = np.sqrt(np.square(right).mean()), np.sqrt(np.square(bounds).mean(axis=1))
        is_blunt = bool(np.median(of_rows) > BLUNT * size > 0.0)
    walked.checks.append(Check(step.name, float(errors.max()), is_blunt))
    wrong = errors > 1.0
    if not wrong.any():
        return
    row, channel = (int(index) for index in np.unravel_index(np.argmax(errors), errors.shape))
    whose = ""
    if step.chosen:
        chosen, by_place = walked.values[step.chosen].values[first:], not step.name.endswith("mixed")
        whose = choice.describe_whose(wrong, chosen, oracle.mixture.num_experts, by_place)
    channels = ids.described() if step.is_choice else describe_channels(wrong, step.heads, step.parts, step.noun)
    rows, in_steps = describe_place(np.asarray(wrong.any(axis=1)), first, dump.steps, step.per)
    walked.findings.append(
        Finding(
            name=step.name,
            operation=step.words,
            layer=step.layer,
            recomputed=recomputed,
            error=float(errors[row, channel]),
            bound=float(bounds[row, channel]),
            row=first + row,
            channel=channel,
            value=float(values[row, channel]),
            expected=float(right[row, channel]),
            wrong_numbers=int(wrong.sum()),
            numbers=wrong.size,
            rows=rows,
            channels=channels,
            steps=in_steps,
            place=dump.steps.place(step.per, first + row),
            noun=step.noun,
            experts=whose,
            choice=ids.in_words(row, channel) if step.is_choice else "",
        )
    )
