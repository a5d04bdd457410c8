"""The exact log-probabilities of a network with one error, the same in all else: what a hypothesis predicts.

A variant is plain data, one for each sequence; {} has no error:

{"before": [[ids], ...], "conv": bool, "attend": bool}
            sequences before this one in its row: whether the convolution, and attention, see them as if they were its
            own beginning (a pack without borders, padding without a mask)
{"borders": [positions], "attend": bool}
            the convolution's state is lost before these tokens; with `attend` False keys and values are, too
{"head_bits": 8, "rounds_inputs": bool}
            logits rounded to so many bits, and the head's inputs before
{"late": 1}
            a token's log-probability is of the logits so many positions after those that predict it

Everything else is exact, so what such an engine reports is known to within the rounding of its format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine import uncached
from lfm2np.engine.uncached import Run
from lfm2np.engine.work.place import Work
from lfm2np.errors import NumericsError
from lfm2np.oracle.judging.routes import OWN, routed
from lfm2np.oracle.judging.truth import given_routes
from lfm2np.oracle.judging.views import rounded, views_of_rows
from lfm2np.truth.reference import Mixing, final_states

Array = NDArray[Any]
Item = Mapping[str, Any]


def num_tokens_of(item: Item) -> int:
    """Those that go through the network."""
    return sum(map(len, segments_of(item)))


def segments_of(item: Item) -> list[list[int]]:
    """What stands before the sequence, and the sequence without the tokens at its end that nothing is read from."""
    stop = len(item["token_ids"]) - 1 + item["variant"].get("late", 0)
    return [*item["variant"].get("before", ()), item["token_ids"][:stop]]


def variant_items(model: LoadedModel, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Of each item what views_of_rows has under its variant, or `error`. All in one flat batch."""
    layouts, ids, positions = laid_out(items)
    sequences = [[*chain.from_iterable(segments_of(item))] for item in items]
    numerics, _ = routed(model.numerics, given_routes(model, sequences, list(map(routes_of, items))))
    convolved = [run for conv, _, _ in layouts for run in conv]
    attended = [run for _, attention, _ in layouts for run in attention]
    mixing = Mixing(partial(uncached.convolve, numerics, convolved), partial(uncached.attend, numerics, attended))
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
    if routes is None:
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


def with_parts(model: LoadedModel, previous: LoadedModel) -> Iterator[tuple[str, LoadedModel]]:
    """The model with one part of another checkpoint's weights, or all."""
    ours, theirs = model.weights, previous.weights
    yield "all weights", replace(model, weights=theirs)
    yield "embedding and head", replace(model, weights=replace(ours, embedding=theirs.embedding, head=theirs.head))
    for index, layer in enumerate(theirs.layers):
        layers = [*ours.layers]
        layers[index] = layer
        yield f"layer {index}", replace(model, weights=replace(ours, layers=tuple(layers)))
    yield "final norm", replace(model, weights=replace(ours, final_norm=theirs.final_norm))


VARIANTS = Work("variants", variant_items, num_tokens_of)  # items of views.VIEWS with a `variant`
