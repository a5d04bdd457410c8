"""How long a step takes, by what it computes: a formula that is plain data, from measured steps or published figures.

    seconds = overhead + the largest of one or several sums of coefficient * feature

A feature is "1", a field of StepShape, or a part of one: "tokens[8:64]" counts the tokens that a slice of them would
have, so a sum may rise with tokens along several slopes. Measured steps give one sum (fit.py); a roofline is the larger
of two, what is computed and what is read from memory. Times are whole nanoseconds: a clock adds them exactly.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lfm2np.errors import RequestError
from lfm2np.system import write_whole
from lfm2np.values import show_json
from scheduler import BatchPlan

Count = Any  # int, or for many steps at once an int64 array [steps]


class StepShape(NamedTuple):
    """What a step's time depends on."""

    tokens: Count  # computed
    requests: Count  # that have tokens in the step
    attended: Count  # pairs of a computed token and a position that it sees, itself included
    read: Count  # positions whose keys and values are read, once for each request
    sampled: Count  # tokens whose logits are computed
    checkpoints: Count  # states written beside a block that became full
    moved_blocks: Count  # copied


def shape_of(plan: BatchPlan) -> StepShape:
    tokens = attended = read = sampled = checkpoints = 0
    for entry in plan.scheduled:
        count, stop = len(entry.token_ids), entry.stop
        tokens += count
        attended += pairs(count, stop)
        read += stop
        sampled += stop - entry.first_logits
        checkpoints += len(entry.checkpoints)
    moved = sum(move.kind.endswith("block") for move in plan.moves)
    return StepShape(tokens, len(plan.scheduled), attended, read, sampled, checkpoints, moved)


def pairs(count: int, stop: int) -> int:
    """Of the last `count` of `stop` positions and what each sees: the numbers from stop - count + 1 to stop, added."""
    return count * (2 * stop - count + 1) // 2


CONSTANT, WHOLE = "1", (0, math.inf)
MOST_SECONDS = 1e3  # of a coefficient: sums then stay within 64 bits of nanoseconds


def parse_feature(feature: str) -> tuple[int, tuple[float, float]]:
    """The field's index, and the slice of its units that counts. RequestError for another name."""
    match = re.fullmatch(r"(\w+?)(?:\[(\d*):(\d*)\])?", feature)
    if match is None or match[1] not in StepShape._fields or (match[3] and int(match[2] or 0) >= int(match[3])):
        known = ", ".join(StepShape._fields)
        raise RequestError(f"feature {feature!r}: expected 1, {known}, or a part such as tokens[8:64]")
    part = (int(match[2] or 0), int(match[3])) if match[3] else (int(match[2] or 0), math.inf)
    return StepShape._fields.index(match[1]), part


def amount(shape: StepShape, index: int, part: tuple[float, float]) -> Count:
    """How many units of a feature each step has."""
    first, end = part
    return shape[index] if part == WHOLE else np.minimum(np.maximum(shape[index] - first, 0), end - first)


@dataclass(frozen=True)
class CostModel:
    """See above. `forms`: seconds for each unit of a feature. RequestError for a feature that can't be."""

    name: str
    origin: str  # "measured on ..." or "published figures, not measured: ..."
    forms: tuple[Mapping[str, float], ...]
    overhead: float = 0.0  # seconds
    errors: Mapping[str, float] | None = None  # on steps that it was not fitted to: see fit.errors_of
    largest: Mapping[str, int] | None = None  # fields of the largest steps that it was fitted to

    def __post_init__(self) -> None:
        for feature, seconds in [("overhead", self.overhead), *(item for form in self.forms for item in form.items())]:
            if type(seconds) not in (int, float) or not 0.0 <= seconds <= MOST_SECONDS:
                raise RequestError(f"{feature} {show_json(seconds)}: expected seconds, 0 to {MOST_SECONDS:g}")
        _ = self._sums  # a wrong feature is named now

    @cached_property
    def _sums(self) -> list[tuple[float, list[tuple[float, int, tuple[float, float]]]]]:
        """Of each form its constant, and the coefficient, field and slice of the others, in nanoseconds."""
        return [
            (
                form.get(CONSTANT, 0.0) * 1e9,
                [(value * 1e9, *parse_feature(name)) for name, value in form.items() if name != CONSTANT],
            )
            for form in self.forms
        ]

    def nanoseconds(self, shape: StepShape) -> Any:
        """Of one step, or an array of many: the same multiplications and additions, hence the same bits. At least 1."""
        longest: Any = 0.0 * shape.read
        for total, terms in self._sums:
            for coefficient, index, part in terms:
                total = total + coefficient * amount(shape, index, part)
            longest = np.maximum(longest, total)
        return np.maximum(np.rint(self.overhead * 1e9 + longest), 1).astype(np.int64)

    def is_beyond(self, shape: StepShape) -> Any:
        """Whether a step is larger than any that was measured: there the model only guesses."""
        return sum(getattr(shape, name) > most for name, most in (self.largest or {}).items()) > 0

    def as_json(self) -> dict[str, Any]:
        return {"kind": KIND, **asdict(self)}

    def write(self, path: str | Path) -> None:
        """As read_cost_model reads it."""
        write_whole(path, json.dumps(self.as_json(), indent=2) + "\n")


KIND = "cost model"


def read_cost_model(path: str | Path) -> CostModel:
    """As `write` wrote it. RequestError, with the file's name, for anything else."""
    text = read_text(path)
    try:
        raw = json.loads(text)
        if raw.pop("kind") != KIND:
            raise ValueError(f"kind: expected {KIND}")
        return CostModel(**raw)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise RequestError(f"{path}: expected a file that simulate --fit wrote: {problem}") from None
    except RequestError as problem:
        raise RequestError(f"{path}: {problem}") from None


def read_text(path: str | Path) -> str:
    """RequestError for what can't be read, or is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise RequestError(f"{path}: can't be read: {getattr(problem, 'strerror', None) or 'not UTF-8'}") from None


# --- published figures

GPUS = {  # dense bfloat16 operations and bytes of memory bandwidth a second, from NVIDIA's data sheets
    "H100": (989.5e12, 3.35e12),  # SXM: 1,979 teraFLOPS with sparsity
    "H200": (989.5e12, 4.8e12),  # SXM: 1,979 teraFLOPS with sparsity
    "A100": (312e12, 2.039e12),  # 80GB SXM
    "L4": (121e12, 0.3e12),  # 242 teraFLOPS with sparsity
}
COMPUTE, BANDWIDTH = 0.5, 0.7  # shares of the peak rates; assumed, not measured
STEP_SECONDS = 0.001  # launches, scheduling, sampling; assumed
BYTES, VOCAB, PRESET_BLOCK = 2, 65536, 16


class Sizes(NamedTuple):
    """Of a dense LFM2, as follows from its config.json."""

    layers_parameters: int  # all but the embedding, which is the head, too
    hidden: int
    attention_layers: int
    key_value_numbers: int  # of one position
    state_numbers: int  # of one request's convolutions

    def num_blocks(self, gigabytes: float, block_size: int) -> int:
        """Blocks in so much memory: a block holds keys and values of its tokens, and one state."""
        return int(gigabytes * 1e9) // (BYTES * (block_size * self.key_value_numbers + self.state_numbers))


MODELS = {
    "LFM2-350M": Sizes(287_375_104, 1024, 6, 6_144, 20_480),
    "LFM2-700M": Sizes(641_826_048, 1536, 6, 6_144, 30_720),
    "LFM2-1.2B": Sizes(1_036_122_880, 2048, 6, 6_144, 40_960),
    "LFM2-2.6B": Sizes(2_435_054_592, 2048, 8, 8_192, 90_112),
}
KNOWN = f"GPU:MODEL, of {', '.join(GPUS)} and {', '.join(MODELS)}"


def preset(name: str) -> CostModel:
    """A roofline of "GPU:MODEL": what the GPU could do at best, times the shares assumed above. Activations, norms and
    gates are not counted. It shows which policy suits which load; what a server takes, only its own steps say."""
    gpu, _, model = name.partition(":")
    if gpu not in GPUS or model not in MODELS:
        raise RequestError(f"cost {name!r}: expected a file, or {KNOWN}")
    (flops, bandwidth), sizes = GPUS[gpu], MODELS[model]
    multiply_add, number = 2 * (1.0 / (flops * COMPUTE)), BYTES / (bandwidth * BANDWIDTH)  # seconds
    compute = {
        "tokens": sizes.layers_parameters * multiply_add,
        "sampled": VOCAB * sizes.hidden * multiply_add,
        "attended": 2 * sizes.attention_layers * sizes.hidden * multiply_add,  # scores, and values
    }
    memory = {
        CONSTANT: sizes.layers_parameters * number,
        "sampled[:1]": VOCAB * sizes.hidden * number,
        "read": sizes.key_value_numbers * number,
        "tokens": sizes.key_value_numbers * number,  # written
        "requests": 2 * sizes.state_numbers * number,  # read and written
        "checkpoints": sizes.state_numbers * number,
        "moved_blocks": 2 * PRESET_BLOCK * sizes.key_value_numbers * number,
    }
    assumptions = (
        f"assumed {COMPUTE:.0%} of {flops / 1e12:g} TFLOP/s, {BANDWIDTH:.0%} of {bandwidth / 1e12:g} TB/s, "
        f"{STEP_SECONDS * 1e3:g} ms a step"
    )
    return CostModel(name, f"published figures, not measured: {assumptions}", (compute, memory), STEP_SECONDS)
