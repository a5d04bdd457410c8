"""A whole comparison: the base's greedy answers, both predictions at every position, the weights' errors, figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from lfm2np.arithmetic.pieces import pieces
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.stored import require_finite, widen
from lfm2np.engine.engine import Engine
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.work.place import Place, Source, Work, compute
from lfm2np.errors import NumericsError, RequestError
from lfm2np.oracle.compare.figures import Figures, digest, figures_of
from lfm2np.oracle.compare.pair import Files, Part, files_of, longest, part_name, parts_of, require_same_network
from lfm2np.oracle.compare.positions import compare_work, sum_of_squares
from lfm2np.oracle.compare.sequences import GREEDY, REQUESTS, Scored, continued
from lfm2np.values import Progress, ProgressOf

GENERATING, COMPARING, WEIGHTS = "generating", "comparing", "weights"  # stages that progress reports


@dataclass(frozen=True, eq=False)
class Quantised:
    """A checkpoint to compare with the base: its files, their digest, and what differs from the base."""

    files: Files
    sha256: str
    errors: tuple[WeightError, ...]

    @property
    def changed(self) -> set[str]:
        """Tensors with other numbers; a layer's experts count as one."""
        return {tensor_error.name for tensor_error in self.errors if tensor_error.error}


@dataclass(frozen=True, eq=False)
class Compared:
    """The result. figures: one entry per checkpoint, in their order; failed: why sequences could not be computed."""

    base: LoadedModel
    quantised: tuple[Quantised, ...]
    scored: tuple[Scored, ...]
    by: str
    figures: tuple[Figures, ...]
    failed: tuple[str, ...]

    @property
    def digest(self) -> str:
        return digest(self.figures)

    @property
    def sources(self) -> dict[str, dict[str, int]]:
        """By what was scored: sequences, and compared positions."""
        counts_by_source: dict[str, dict[str, int]] = {}
        for sequence in self.scored:
            counts = counts_by_source.setdefault(sequence.source, {"sequences": 0, "positions": 0})
            counts["sequences"] += 1
            counts["positions"] += sequence.stop - sequence.start
        return counts_by_source


def quantised_of(base: Files, path: str, sha256: Callable[[Files], str], progress: ProgressOf) -> Quantised:
    """With the errors of its weights. RequestError unless it is the same network."""
    files = files_of(path)
    require_same_network(base, files)
    tensors = parts_of(base.config, files.config, list(base.tensors), "tensor")
    errors = weight_errors(base, files, tensors, partial(progress, WEIGHTS))
    return Quantised(files, sha256(files), tuple(errors))


def compare(
    model: LoadedModel,
    quantised: Sequence[Quantised],
    others: Mapping[str, LoadedModel | Source],
    scored: Sequence[Scored],
    by: str,
    max_tokens: int,
    place: Place,
    progress: ProgressOf,
) -> Compared:
    """The whole comparison of some checkpoints with the base.

    others      loaded checkpoints, or where workers find them, by SHA-256
    max_tokens  of greedy answers, 0: none
    errors      RequestError if nothing is left to compare; NumericsError if no sequence can be computed
    """
    base, sparse = files_of(model.path), model.config.sparse_layers
    parts = [parts_of(model.config, each.files.config, list(base.tensors), by) for each in quantised]
    tried = [
        [part.name for part in checkpoint_parts if {part_name(name, "tensor") for name in part.tensors} & each.changed]
        for checkpoint_parts, each in zip(parts, quantised, strict=True)
    ]
    most = longest(model.config, [each.files.config for each in quantised])
    answers = greedy_answers(model, scored, max_tokens, most, place, progress) if max_tokens else []
    everything = [*scored, *answers]
    asked = [{"sha256": each.sha256, "by": by, "parts": names} for each, names in zip(quantised, tried, strict=True)]
    nothing = [{**entry, "by": "none", "parts": []} for entry in asked]
    items = [sequence.item(nothing if sequence.source == GREEDY else asked) for sequence in everything]
    results = compute(compare_work(others), model, items, place, partial(progress, COMPARING))
    figures = [
        figures_of(everything, results, number, [part.name for part in parts[number]], tried[number], sparse)
        | {"bits_a_weight": stored_bits(checkpoint.files)}
        | {"tensors": [asdict(error) for error in checkpoint.errors]}
        for number, checkpoint in enumerate(quantised)
    ]
    failed = failures(model, quantised, everything, results)
    if not any(entry["positions"] for entry in figures):
        raise NumericsError(f"no sequence can be computed, {failed[0]}")
    return Compared(model, tuple(quantised), tuple(everything), by, tuple(figures), failed)


def failures(
    base: LoadedModel, quantised: Sequence[Quantised], scored: Sequence[Scored], results: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    """Each sequence that could not be computed, for which checkpoint, and why; if the base failed, only that."""
    failed = []
    for sequence, result in zip(scored, results, strict=True):
        others = zip((checkpoint.files.path for checkpoint in quantised), result["quantised"], strict=True)
        for path, columns in [(base.path, result["base"])] if "error" in result["base"] else others:
            if "error" in columns:
                failed.append(f"{sequence.source} {sequence.name}: {path}: {columns['error']}")
    return tuple(failed)


# --- greedy answers of the base


def greedy_answers(
    model: LoadedModel, scored: Sequence[Scored], max_tokens: int, most: int, place: Place, progress: ProgressOf
) -> list[Scored]:
    """The prompts of requests followed by the base's greedy answer, as far as the context goes.

    The quantised network is fed the base's answer: up to the first different greedy token it would have written the
    same. RequestError if no prompt leaves room for a token.
    """
    prompts = [sequence for sequence in scored if sequence.source == REQUESTS]
    fitting = [sequence for sequence in prompts if sequence.prompt < most]
    if not fitting:
        raise RequestError(f"--max-tokens {max_tokens}: no prompt leaves room for a token in a context of {most}")
    items = [
        {"prompt": list(sequence.token_ids[: sequence.prompt]), "max_tokens": min(max_tokens, most - sequence.prompt)}
        for sequence in fitting
    ]
    answers = compute(GREEDY_WORK, model, items, place, partial(progress, GENERATING))
    errors = [result["error"] for result in answers if "error" in result]
    if errors:
        raise NumericsError(f"{model.path}: {errors[0]}")
    return [continued(sequence, result["token_ids"]) for sequence, result in zip(fitting, answers, strict=True)]


def greedy_items(model: LoadedModel, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each prompt's greedy tokens by the engine, to an end of sequence or `max_tokens`; or `error`."""
    engine = Engine(model, room_for=[len(item["prompt"]) + item["max_tokens"] for item in items])
    for number, item in enumerate(items):
        engine.add_request(str(number), item["prompt"], SamplingParams(temperature=0.0, max_tokens=item["max_tokens"]))
    finished = {output.request_id: output.outputs[0] for output in engine.stream() if output.finished}
    ended = [finished[str(number)] for number in range(len(items))]
    return [{"error": str(end.error)} if end.error else {"token_ids": list(end.token_ids)} for end in ended]


def num_tokens(item: Mapping[str, Any]) -> int:
    return len(item["prompt"]) + int(item["max_tokens"])


GREEDY_WORK = Work("greedy", greedy_items, num_tokens)


# --- errors of the weights themselves: the same bits on every machine


@dataclass(frozen=True)
class WeightError:
    """Of one tensor, or a layer's experts together.

    error: root of the sum of the differences' squares over that of the base's; of the former alone where that is 0.
    """

    name: str
    base_type: str
    type: str
    weights: int
    error: float


def weight_errors(
    base: Files, other: Files, tensors: Sequence[Part], progress: Progress | None = None
) -> list[WeightError]:
    """Of each part by tensor; `progress(done, total)` counts them.

    CheckpointError names the first weight, or scale, that is not a number.
    """
    errors = []
    for done, part in enumerate(tensors, 1):
        differences, squares, weights = list[float](), list[float](), 0
        names = part.tensors[:1] if part.layer is None else part.tensors  # a tied head is the embedding again
        for name in names:
            ours, theirs = base.tensors[name], other.tensors[name]
            require_finite(ours)
            require_finite(theirs)
            weights += math.prod(ours.shape)
            for rows in pieces(ours.shape[0], math.prod(ours.shape[1:])):
                base_values, other_values = (
                    widen(side.values[rows], side.dtype).astype(np.float64).reshape(rows.stop - rows.start, -1)
                    * files.factor(name)
                    for side, files in ((ours, base), (theirs, other))
                )
                squares += sum_of_squares(base_values).tolist()
                differences += sum_of_squares(other_values - base_values).tolist()
        size = math.fsum(squares)
        error = math.sqrt(math.fsum(differences) / (size or 1.0))
        errors.append(WeightError(part.name, types_of(base, names), types_of(other, names), weights, error))
        if progress:
            progress(done, len(tensors))
    return errors


def types_of(files: Files, names: Sequence[str]) -> str:
    return ", ".join(sorted({files.tensors[name].dtype for name in names}))


def stored_bits(files: Files) -> float:
    """Bits of the file per weight, over all tensors; a tied head counts once."""
    tensors = {id(tensor.values): tensor for tensor in files.tensors.values()}.values()
    return 8 * sum(tensor.values.nbytes for tensor in tensors) / sum(math.prod(tensor.shape) for tensor in tensors)
