"""How far off a right engine may be, at each position.

The network runs under the declared format as several emulated engines (emulate.py); the differences between their
log-probabilities and the exact ones are the noise that the format allows there. One number for all positions would be
wrong both ways: the noise differs tenfold between positions of one sequence.

The scale of a token's error (allowed.py) is the mean of two variances: that of logits which all err by tau, estimated
from all tokens, is steady; that of the emulated engines' differences at this very token knows what is special.

In a mixture of experts the emulated engines take the truth's routes, so the noise is that of the arithmetic alone. With
their own routes they have a second, larger noise, where rounding sends some token elsewhere: see position.py.

An emulated engine has the same orders and roundings whatever is computed beside a sequence. Only its products are the
machine's float32, which may round differently in another batch.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import Numerics
from lfm2np.arithmetic.pieces import over_pieces, pieces
from lfm2np.checkpoint.files import read_tensors
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.engine import uncached
from lfm2np.engine.teacher_forcing import LOGITS_AT_ONCE
from lfm2np.engine.work.place import AnyPlace, Work, compute
from lfm2np.oracle.judging.allowed import Allowed, most_shift, resolution, shape
from lfm2np.oracle.judging.emulate import Emulated, emulated
from lfm2np.oracle.judging.formats import format_named, inputs_of
from lfm2np.oracle.judging.routes import routed
from lfm2np.oracle.judging.truth import Truth, given_routes, num_fed_tokens, num_shared_tokens
from lfm2np.truth import reference
from lfm2np.truth.rope import RotaryTable, rotary_table
from lfm2np.truth.weights import ModelWeights
from lfm2np.values import Progress

Array = NDArray[Any]
DRAWS = tuple(range(8))  # numbers of emulated engines
FIRST = (1, 6)  # they differ in every choice that is made both ways (emulate.emulated)
ALL = slice(None)
LEAST = 2.0**-40  # nats: a certain token's log-probability has no noise at all


@dataclass(frozen=True, eq=False)
class Noise:
    """Errors of K emulated engines: their log-probabilities minus the exact ones, at the columns of a Truth.

    Rows of the Truth that are not wanted are 0.
    """

    draws: tuple[int, ...]  # their numbers, ascending
    errors: NDArray[np.float32]  # [K, T, J]
    spread: NDArray[np.float64]  # [T] tau: the size of the logits' errors
    route_errors: NDArray[np.float32] | None = None  # [K, T, L, N] of a Truth's `preferred`
    rerouted: NDArray[np.bool_] | None = None  # [K, T] where an engine took other experts than the Truth

    @cached_property
    def squares(self) -> NDArray[np.float32] | None:
        """[T, L, N] mean squares of `route_errors`."""
        return None if self.route_errors is None else np.mean(np.square(self.route_errors), axis=0)

    def scales(self, truth: Truth, rows: slice = ALL) -> NDArray[np.float64]:
        """[R, J] standard deviations of log-probabilities."""
        p = np.exp(truth.logprobs[rows])
        variances = self.spread[rows, None] ** 2 * shape(p, np.maximum(0.0, truth.squares[rows, None] - p * p))
        mean_squares = np.mean(np.square(self.errors[:, rows], dtype=np.float64), axis=0)
        return np.asarray(np.maximum(LEAST, np.sqrt((mean_squares + variances) / 2.0)))

    def gap_scales(self, ones: NDArray[np.int64], rows: slice = ALL) -> NDArray[np.float64]:
        """[R, J] standard deviations of the differences of log-probabilities, which are those of logits: between each
        row's token at a column, `ones` [R], and all its tokens.
        """
        errors = self.errors[:, rows]
        difference = errors.astype(np.float64) - np.take_along_axis(errors, ones[None, :, None], axis=2)
        both = (np.mean(difference**2, axis=0) + 2.0 * self.spread[rows, None] ** 2) / 2.0
        return np.asarray(np.maximum(LEAST, np.sqrt(both)))


def allowed_by(truth: Truth, noise: Noise, bits: int, wanted: slice = ALL) -> dict[int, Allowed]:
    """What a format with so many bits allows at each row of these that the Truth has, by the row's number."""
    first, stop, _ = (max(0, index - truth.first) for index in wanted.indices(truth.first + len(truth.best)))
    units, shift = resolution(truth.largest, bits), most_shift(truth.vocab_size)
    by_row: dict[int, Allowed] = {}
    for part in pieces(max(0, stop - first), len(noise.errors) * noise.errors.shape[2]):
        rows = slice(first + part.start, first + part.stop)
        best = np.argmax(truth.columns[rows] == truth.best[rows, None], axis=1)
        logprobs, scales = truth.logprobs[rows], noise.scales(truth, rows)
        gaps = np.take_along_axis(logprobs, best[:, None], axis=1) - logprobs
        leads = np.maximum(0.0, gaps - units[rows, None]) / noise.gap_scales(best, rows)
        others = logprobs.copy()
        others[np.arange(len(best)), best] = -np.inf
        following = np.take_along_axis(leads, np.argmax(others, axis=1)[:, None], axis=1)[:, 0]
        for at, index in enumerate(range(rows.start, rows.stop)):
            by_row[truth.first + index] = Allowed(
                int(truth.best[index]),
                truth.columns[index],
                logprobs[at],
                scales[at],
                leads[at],
                float(following[at]) if leads.shape[1] > 1 else math.inf,
                float(units[index]),
                shift,
            )
    return by_row


def noise_of(
    model: LoadedModel,
    truths: Sequence[Truth],
    format_name: str,
    draws: Sequence[int] = DRAWS,
    seed: int = 0,
    place: AnyPlace = None,
    progress: Progress | None = None,
    own_routes: bool = False,
) -> list[Noise]:
    """The noise of these engines at these sequences' positions; `progress(done, total)` counts tokens.

    Engines take the routes of the truth; with `own_routes` those that they choose themselves.
    NumericsError where the format can't hold the model's numbers at all.
    """
    if not truths:
        return []
    ascending = tuple(sorted(draws))
    items = [
        {"format": format_name, "seed": seed, "draw": draw, **noise_item(truth, own_routes)}
        for draw in ascending
        for truth in truths
    ]
    results = compute(NOISE, model, items, place, progress)
    return [noise_from(truth, ascending, results[index :: len(truths)]) for index, truth in enumerate(truths)]


def noise_item(truth: Truth, own_routes: bool = False) -> dict[str, Any]:
    """The input of `said_by` for one sequence: its tokens, and the rows and columns to return."""
    return {
        "token_ids": list(truth.token_ids),
        "rows": truth.known_rows,
        "columns": truth.columns[truth.stored],
        "routes": None if own_routes else truth.routes,
    }


def noise_from(truth: Truth, draws: tuple[int, ...], said: Sequence[Mapping[str, Array]]) -> Noise:
    """From what each engine said of one sequence."""

    def of_all(name: str) -> Array:
        return np.stack([each[name] for each in said])

    errors = np.zeros((len(draws), *truth.logprobs.shape), np.float32)
    errors[:, truth.stored] = of_all("logprobs") - truth.logprobs[truth.stored]
    if truth.preferred is None or truth.routes is None:
        return Noise(draws, errors, spread_of(errors))
    same = np.sort(of_all("chosen"), axis=-1) == np.sort(truth.routes, axis=-1)
    route_errors = np.asarray(of_all("preferred") - truth.preferred, np.float32)
    return Noise(draws, errors, spread_of(errors), route_errors, ~same.all(axis=(2, 3)))


def joined(noise: Noise, other: Noise) -> Noise:
    """One sequence's noise of two disjoint sets of engines."""
    draws = noise.draws + other.draws
    order = np.argsort(draws)

    def of_both(name: str) -> Any:
        parts = getattr(noise, name), getattr(other, name)
        return None if parts[0] is None else np.concatenate(parts)[order]

    errors = of_both("errors")
    return Noise(tuple(sorted(draws)), errors, spread_of(errors), of_both("route_errors"), of_both("rerouted"))


def noise_items(model: LoadedModel, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Array]]:
    """The results of emulated engines, one ragged pass per engine."""
    results: list[dict[str, Array]] = []
    for engine, group in itertools.groupby(items, lambda item: (item["format"], item["seed"], item["draw"])):
        numerics, weights = engine_of(model, *engine)
        results += said_by(model, weights, numerics, list(group), numerics.rotary_table)
    return results


def engine_of(model: LoadedModel, format_name: str, seed: int, draw: int) -> tuple[Emulated, ModelWeights]:
    engine = format_name, seed, draw
    with _preparing:
        engines, prepared = _engines.setdefault(model, {}), _prepared.get(model)
        if engine in engines and prepared and prepared[0] == engines[engine].weights_key:
            return engines[engine], prepared[1]
        tensors = read_tensors(model.path, model.config)
        inputs = inputs_of(format_named(format_name), model.path, model.config, tensors, draw)
        numerics = engines[engine] = emulated(format_name, seed, draw, inputs)
        if not prepared or prepared[0] != numerics.weights_key:
            _prepared.pop(model, None)  # before others take memory
            _prepared[model] = numerics.weights_key, prepare_weights(tensors, model.config, numerics)
        return numerics, _prepared[model][1]


_engines: WeakKeyDictionary[LoadedModel, dict[tuple[str, int, int], Emulated]] = WeakKeyDictionary()
# The last weights that were prepared for a model: most engines of a format, and most formats, share them.
_prepared: WeakKeyDictionary[LoadedModel, tuple[Any, ModelWeights]] = WeakKeyDictionary()
_preparing = threading.Lock()


def said_by(
    model: LoadedModel,
    weights: ModelWeights,
    numerics: Numerics,
    items: Sequence[Mapping[str, Any]],
    table: RotaryTable = rotary_table,
) -> list[dict[str, Array]]:
    """What an arithmetic, with its table of angles, computes for each sequence, all in one ragged pass.

    logprobs   [R, J] at the R wanted rows and their columns
    preferred  [T, L, N] and chosen [T, L, K] its experts' scores and its choice: only in a mixture of experts
    """
    sequences = [item["token_ids"][:-1] for item in items]
    given = given_routes(model, sequences, [item["routes"] for item in items])
    arithmetic, kept = routed(numerics, given)
    states, runs = uncached.hidden_states(weights, model.config, arithmetic, sequences, table)
    overflow = next((run.error for run in runs if run.error), None)
    if overflow:
        raise overflow
    results: list[dict[str, Array]] = [
        {"logprobs": logprobs_at(weights, arithmetic, states[run.rows][item["rows"]], item["columns"])}
        for run, item in zip(runs, items, strict=True)
    ]
    if given is not None:
        preferred, chosen = kept.preferred(), kept.chosen()
        for run, result in zip(runs, results, strict=True):
            result |= {"preferred": preferred[run.rows], "chosen": chosen[run.rows]}
    return results


def logprobs_at(
    weights: ModelWeights, numerics: Numerics, states: Array, columns: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Log-probabilities [T, J] at the columns, from hidden states [T, D]; in pieces that memory allows."""
    logprobs = np.empty(columns.shape)
    for part in pieces(len(states), weights.head.outputs, LOGITS_AT_ONCE):
        logits = reference.output_logits(weights, numerics, states[part])

        def compute(rows: slice, logits: Array = logits, first: int = part.start) -> None:
            at = slice(first + rows.start, first + rows.stop)
            logprobs[at] = np.take_along_axis(numerics.log_softmax(logits[rows]), columns[at], axis=1)

        over_pieces(compute, len(logits), logits.shape[1])
    return logprobs


def spread_of(errors: NDArray[np.float32]) -> NDArray[np.float64]:
    """[T] tau of errors [K, T, J]: what is common to a row's tokens is the normalisation, not the logits."""
    return np.asarray(np.sqrt(np.mean(centred_squares(errors), axis=0)))


def centred_squares(errors: NDArray[np.float32]) -> NDArray[np.float64]:
    """[K, T] mean squares of errors [K, T, J] without what is common to a row's tokens."""
    wide = errors.astype(np.float64)
    return np.asarray(np.mean((wide - wide.mean(axis=2, keepdims=True)) ** 2, axis=2))


def rerouted_spread(noises: Sequence[Noise]) -> float:
    """The spread of all rerouted tokens together, of engines with routes of their own; 0.0 without any.

    A token whose experts nearly tie may go elsewhere in an engine though it did not in those that were drawn.
    """
    rerouted = [centred_squares(noise.errors)[noise.rerouted] for noise in noises if noise.rerouted is not None]
    pooled = np.concatenate(rerouted) if rerouted else np.zeros(0)
    return math.sqrt(float(np.mean(pooled))) if len(pooled) else 0.0


def at_least(noise: Noise, spread: float) -> Noise:
    """With this spread at positions where it is smaller."""
    return replace(noise, spread=np.maximum(noise.spread, spread))


def loosened(noises: Sequence[Noise]) -> list[Noise]:
    """Noises of engines with routes of their own, each with a spread that is at least that of all rerouted tokens."""
    least = rerouted_spread(noises)
    return [at_least(noise, least) for noise in noises]


def num_shared_of_engine(model: LoadedModel, item: Mapping[str, Any], before: Mapping[str, Any]) -> int:
    """As truth.num_shared_tokens, of one engine."""
    same = all(item[name] == before[name] for name in ("format", "seed", "draw"))
    return num_shared_tokens(model, item, before) if same else 0


NOISE = Work("noise", noise_items, num_fed_tokens, is_exact=False, num_shared=num_shared_of_engine)
