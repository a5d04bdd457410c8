"""The exact log-probabilities of a network with one error, the same in all else: what a hypothesis predicts.

A variant is plain data, one for each sequence; {} has no error:

{"before": [[ids], ...], "conv": bool, "attend": bool}
            sequences before this one in its row: whether the convolution, and attention, see them as if they were its
            own beginning (a pack without borders, padding without a mask)
{"borders": [positions], "attend": bool}
            the convolution's state is lost before these tokens; with `attend` False keys and values are, too
{"head_bits": 8, "rounds_inputs": bool}
            logits rounded to so many bits, and the head's inputs before
{"routes": "own"}
            experts as the network chooses them, whatever was reported
{"part": name}
            one part of the weights is that of another checkpoint: see part_names
{"late": 1}
            a token's log-probability is of the logits so many positions after those that predict it

Everything else is exact, so what such an engine reports is known to within the rounding of its format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine import ragged
from lfm2np.engine.ragged import Run
from lfm2np.engine.work.place import Source, Work, load_source
from lfm2np.errors import NumericsError
from lfm2np.oracle.judging.routes import OWN, routed
from lfm2np.oracle.judging.truth import given_routes
from lfm2np.oracle.judging.views import rounded, views_of_rows
from lfm2np.truth.reference import Mixing, final_states

Array = NDArray[Any]
Item = Mapping[str, Any]
ALL_WEIGHTS, EMBEDDING, FINAL_NORM = "all weights", "embedding and head", "final norm"


def variant_work(previous: LoadedModel | Source | None = None) -> Work:
    """Items of views.VIEWS with a `variant`, all of one kind of error; `previous` has the weights of {"part": ...}."""
    return Work("variants", partial(variant_items, previous), num_tokens_of)


def num_tokens_of(item: Item) -> int:
    """Those that go through the network."""
    return sum(map(len, segments_of(item)))


def segments_of(item: Item) -> list[list[int]]:
    """What stands before the sequence, and the sequence without the tokens at its end that nothing is read from."""
    stop = len(item["token_ids"]) - 1 + item["variant"].get("late", 0)
    return [*item["variant"].get("before", ()), item["token_ids"][:stop]]


def variant_items(
    previous: LoadedModel | Source | None, model: LoadedModel, items: Sequence[Item]
) -> list[dict[str, Any]]:
    """Of each item what views_of_rows has under its variant, or `error`. All in one flat batch, of one error."""
    part = items[0]["variant"].get("part")
    model = model if part is None else with_part(model, previous, part)
    layouts, ids, positions = laid_out(items)
    sequences = [[*chain.from_iterable(segments_of(item))] for item in items]
    numerics, _ = routed(model.numerics, given_routes(model, sequences, list(map(routes_of, items))))
    convolved = [run for conv, _, _ in layouts for run in conv]
    attended = [run for _, attention, _ in layouts for run in attention]
    mixing = Mixing(partial(ragged.convolve, numerics, convolved), partial(ragged.attend, numerics, attended))
    states = final_states(model.weights, model.config, numerics, ids, positions, mixing)
    results: list[dict[str, Any]] = []
    for item, (_, attention, rows) in zip(items, layouts, strict=True):
        error, variant = next((run.error for run in attention if run.error), None), item["variant"]
        try:
            if error:
                raise error
            chosen = states[rows.start + item["start"] - 1 + variant.get("late", 0) : rows.stop]
            if variant.get("rounds_inputs"):
                chosen = rounded(chosen, variant["head_bits"])
            results.append(dict(views_of_rows(model, chosen, {**item, "head_bits": variant.get("head_bits")})))
        except NumericsError as problem:
            results.append({"error": str(problem)})
    return results


def routes_of(item: Item) -> Array | None:
    """Reported routes of the sequence, OWN ones for what stands before it and behind; None: all are the network's."""
    routes = item.get("routes")
    if routes is None or item["variant"].get("routes") == "own":
        return None
    *before, own = segments_of(item)
    routes = np.asarray(routes)[: len(own)]
    shape = routes.shape[1:]
    first, rest = sum(map(len, before)), len(own) - len(routes)
    return np.concatenate([np.full((first, *shape), OWN, np.int64), routes, np.full((rest, *shape), OWN, np.int64)])


Layout = tuple[list[Run], list[Run], slice]  # runs of the convolution, of attention, and the sequence's own rows


def laid_out(items: Sequence[Item]) -> tuple[list[Layout], NDArray[np.int64], NDArray[np.int64]]:
    """The layout of each item in one flat array, all tokens [T] and their positions [T]."""
    layouts: list[Layout] = []
    ids: list[int] = []
    positions: list[int] = []
    for item in items:
        variant, segments = item["variant"], segments_of(item)
        ends = np.cumsum([len(ids), *map(len, segments)]).tolist()
        own = slice(ends[-2], ends[-1])
        inside = [own.start + border for border in variant.get("borders", ()) if 0 < border < own.stop - own.start]
        borders = [*ends[:-1], *inside, ends[-1]]
        attends = bool(variant.get("before")) and variant["attend"]
        loses_keys = "borders" in variant and not variant.get("attend", True)
        conv = [ends[0], ends[-1]] if variant.get("conv") else borders
        attention = [ends[0], ends[-1]] if attends else borders if loses_keys else ends
        layouts.append((runs_between(conv), runs_between(attention), own))
        first = 0
        for segment in segments:
            ids += segment
            positions += range(first, first + len(segment))
            first = first + len(segment) if attends else 0
    return layouts, np.array(ids, np.int64), np.array(positions, np.int64)


def runs_between(borders: Sequence[int]) -> list[Run]:
    return [Run(slice(start, stop)) for start, stop in pairwise(borders)]


def part_names(model: LoadedModel) -> list[str]:
    """What a checkpoint's weights may be taken by: all, a layer, and what stands before and behind the layers."""
    return [ALL_WEIGHTS, EMBEDDING, *(f"layer {index}" for index in range(len(model.weights.layers))), FINAL_NORM]


@lru_cache(maxsize=1)
def loaded(source: Source) -> LoadedModel:
    """In a worker, whose own model load_source keeps."""
    return load_source(source)


@lru_cache(maxsize=4)
def with_part(model: LoadedModel, previous: LoadedModel | Source | None, part: str) -> LoadedModel:
    """The model with one part of the previous checkpoint's weights."""
    assert previous is not None
    weights = (loaded(previous) if isinstance(previous, Source) else previous).weights
    if part == ALL_WEIGHTS:
        return replace(model, weights=weights)
    if part == EMBEDDING:
        return replace(model, weights=replace(model.weights, embedding=weights.embedding, head=weights.head))
    if part == FINAL_NORM:
        return replace(model, weights=replace(model.weights, final_norm=weights.final_norm))
    layers, index = list(model.weights.layers), part_names(model).index(part) - 2
    layers[index] = weights.layers[index]
    return replace(model, weights=replace(model.weights, layers=tuple(layers)))
