"""The exact log-probabilities of a network with one error, the same in all else: what a hypothesis predicts.

A variant is plain data, one for each sequence:

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
            one part of the weights is that of another checkpoint: see tensors_by_part

Everything else is exact, so what such an engine reports is known to within the rounding of its format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.files import read_tensors
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine import ragged
from lfm2np.engine.ragged import Run
from lfm2np.engine.work.place import Source, Work
from lfm2np.errors import NumericsError
from lfm2np.oracle.compare.positions import loaded
from lfm2np.oracle.judging.routes import OWN, routed
from lfm2np.oracle.judging.truth import given_routes
from lfm2np.oracle.judging.views import rounded, views_of_rows
from lfm2np.truth.layers import expected_tensors
from lfm2np.truth.reference import Mixing, final_states
from lfm2np.truth.weights import EMBEDDING, HEAD

Array = NDArray[Any]
Item = Mapping[str, Any]
ALL_WEIGHTS, LAYER = "all weights", "layer "
OUTSIDE_LAYERS = {"embedding": EMBEDDING, "final_norm": "model.embedding_norm.weight", "head": HEAD}  # by field


def variant_work(previous: LoadedModel | Source | None = None) -> Work:
    """Items of views.VIEWS with a `variant`; `previous` has the weights of {"part": ...}."""
    return Work("variants", partial(variant_items, previous), num_tokens_of)


def num_tokens_of(item: Item) -> int:
    """Those that go through the network: of the sequence but the last, and of those before it."""
    return len(item["token_ids"]) - 1 + sum(map(len, item["variant"].get("before", ())))


def variant_items(
    previous: LoadedModel | Source | None, model: LoadedModel, items: Sequence[Item]
) -> list[dict[str, Any]]:
    """Of each item what views_of_rows has under its variant, or `error`."""
    results: list[dict[str, Any]] = [{} for _ in items]
    by_part: dict[str | None, list[int]] = {}
    for index, item in enumerate(items):
        by_part.setdefault(item["variant"].get("part"), []).append(index)
    for part, indices in by_part.items():
        changed = model if part is None else with_part(model, previous, part)
        for index, result in zip(indices, run(changed, [items[index] for index in indices]), strict=True):
            results[index] = result
    return results


def run(model: LoadedModel, items: Sequence[Item]) -> list[dict[str, Any]]:
    """All in one flat batch; items that differ only in the head are one sequence of it."""
    keys = [key_of(item) for item in items]
    distinct = [items[keys.index(key)] for key in dict.fromkeys(keys)]
    layouts, ids, positions = laid_out(distinct)
    sequences = [(*flat(item), *item["token_ids"][:-1]) for item in distinct]
    given = given_routes(model, sequences, list(map(routes_of, distinct)))
    numerics, _ = routed(model.numerics, given)
    convolved = [run for layout in layouts for run in layout[0]]
    attended = [run for layout in layouts for run in layout[1]]
    mixing = Mixing(partial(ragged.convolve, numerics, convolved), partial(ragged.attend, numerics, attended))
    states = final_states(model.weights, model.config, numerics, ids, positions, mixing)
    results: list[dict[str, Any]] = []
    by_key = dict(zip(dict.fromkeys(keys), layouts, strict=True))
    for item, key in zip(items, keys, strict=True):
        _, attention, rows = by_key[key]
        error = next((run.error for run in attention if run.error), None)
        try:
            if error:
                raise error
            chosen = states[rows.start + item["start"] - 1 : rows.stop]
            variant = item["variant"]
            if variant.get("rounds_inputs"):
                chosen = rounded(chosen, variant["head_bits"])
            results.append(dict(views_of_rows(model, chosen, {**item, "head_bits": variant.get("head_bits")})))
        except NumericsError as problem:
            results.append({"error": str(problem)})
    return results


def key_of(item: Item) -> str:
    """The same for items whose network differs in nothing before the head."""
    variant = {name: value for name, value in item["variant"].items() if name not in ("head_bits", "rounds_inputs")}
    routes = item.get("routes")
    return repr((item["token_ids"], variant, None if routes is None else np.asarray(routes).tolist()))


def routes_of(item: Item) -> Array | None:
    """Reported routes of the sequence behind OWN ones for what stands before it; None: all are the network's."""
    routes = item.get("routes")
    if routes is None or item["variant"].get("routes") == "own":
        return None
    routes = np.asarray(routes)[: len(item["token_ids"]) - 1]
    before = np.full((len(flat(item)), *routes.shape[1:]), OWN, np.int64)
    return np.concatenate([before, routes])


def flat(item: Item) -> list[int]:
    return [token for ids in item["variant"].get("before", ()) for token in ids]


Layout = tuple[list[Run], list[Run], slice]  # runs of the convolution, of attention, and the sequence's own rows


def laid_out(items: Sequence[Item]) -> tuple[list[Layout], NDArray[np.int64], NDArray[np.int64]]:
    """The layout of each item in one flat array, all tokens [T] and their positions [T]."""
    layouts: list[Layout] = []
    ids: list[int] = []
    positions: list[int] = []
    for item in items:
        segments = [*item["variant"].get("before", ()), item["token_ids"][:-1]]
        ends = np.cumsum([len(ids), *map(len, segments)]).tolist()
        conv = one_run(ends) if item["variant"].get("conv") else separate_runs(ends)
        attention = one_run(ends) if item["variant"].get("before") and item["variant"].get("attend") else None
        layout = conv, attention or separate_runs(ends), slice(ends[-2], ends[-1])
        layouts.append(with_borders(layout, item["variant"]))
        first = 0
        for segment in segments:
            ids += segment
            positions += range(first, first + len(segment))
            first = first + len(segment) if attention else 0
    return layouts, np.array(ids, np.int64), np.array(positions, np.int64)


def one_run(ends: Sequence[int]) -> list[Run]:
    return [Run(slice(ends[0], ends[-1]))]


def separate_runs(ends: Sequence[int]) -> list[Run]:
    return [Run(slice(start, stop)) for start, stop in pairwise(ends)]


def with_borders(layout: Layout, variant: Mapping[str, Any]) -> Layout:
    """The sequence's own run cut before these tokens, for the convolution, and for attention if it is lost too."""
    if "borders" not in variant:
        return layout
    conv, attention, rows = layout
    inside = [rows.start + border for border in variant["borders"] if 0 < border < rows.stop - rows.start]
    cut = separate_runs([rows.start, *inside, rows.stop])
    return [*conv[:-1], *cut], attention if variant.get("attend", True) else [*attention[:-1], *cut], rows


@lru_cache(maxsize=4)
def with_part(model: LoadedModel, previous: LoadedModel | Source | None, part: str) -> LoadedModel:
    """The model with one part of the previous checkpoint's weights."""
    assert previous is not None
    other = loaded(previous) if isinstance(previous, Source) else previous
    ours, theirs = model.weights, other.weights
    if part == ALL_WEIGHTS:
        return replace(model, weights=theirs)
    if part.startswith(LAYER):
        index = int(part.removeprefix(LAYER))
        return replace(
            model, weights=replace(ours, layers=(*ours.layers[:index], theirs.layers[index], *ours.layers[index + 1 :]))
        )
    names = tensors_by_part(model, other)[part]
    changed = {field: getattr(theirs, field) for field, name in OUTSIDE_LAYERS.items() if name in names}
    return replace(model, weights=replace(ours, **changed))


def part_names(model: LoadedModel, previous: LoadedModel) -> list[str]:
    """All, and the parts whose weights differ between the checkpoints, in the network's order."""
    before, after = (read_tensors(side.path, side.config) for side in (previous, model))

    def is_changed(name: str) -> bool:
        every = slice(None)
        old, new = (tensors.get(name, tensors[EMBEDDING]) for tensors in (before, after))
        return not np.array_equal(old.rows(every), new.rows(every))

    parts = tensors_by_part(model, previous)
    return [ALL_WEIGHTS, *(part for part, names in parts.items() if any(map(is_changed, names)))]


def tensors_by_part(model: LoadedModel, previous: LoadedModel) -> dict[str, list[str]]:
    """The names of tensors that are one part: a layer's, or one outside. An embedding that is the head in both
    checkpoints is one part with it."""
    parts: dict[str, list[str]] = {}
    is_tied = model.config.tie_word_embeddings and previous.config.tie_word_embeddings
    named = {name: field.replace("_", " ") for field, name in OUTSIDE_LAYERS.items()}
    for name in dict.fromkeys([*expected_tensors(model.config), HEAD]):
        layer = name.removeprefix("model.layers.").partition(".")[0]
        part = "embedding" if name == HEAD and is_tied else named.get(name, LAYER + layer)
        parts.setdefault(part, []).append(name)
    return parts
