"""How far a right engine may be off, at each position by itself.

The network runs under the declared format as several engines that could be (emulate.py); what their log-probabilities
differ by from the exact ones is the noise that the format is entitled to there. One number for all positions would be
wrong both ways: the noise differs tenfold between positions of one sequence.

With errors d[v] of the logits, independent and of one size tau, the error of token y's log-probability is
d[y] - sum p[v] d[v], of variance tau^2 ((1 - p[y])^2 + sum over v != y of p[v]^2): next to nothing for a token that is
nearly certain. That is one estimate, from all tokens; the other is what the emulations differ by at this very token.
The scale is the mean of the two variances: the first is steady, the second knows what is special.

In a mixture of experts the emulations take the truth's routes, so that the noise is that of the arithmetic alone. With
routes of their own they have a second, larger noise, where a rounding sends some token elsewhere: see answer.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfm2np import reference
from lfm2np.checkpoint.files import read_tensors
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.weights import ModelWeights, prepare_weights
from lfm2np.errors import NumericsError
from lfm2np.network import ragged
from lfm2np.numerics import Numerics, elementary
from lfm2np.numerics.grids import exact_sum
from lfm2np.numerics.pieces import pieces
from lfm2np.oracle.judging.emulate import emulated
from lfm2np.oracle.judging.formats import format_named
from lfm2np.oracle.judging.inputs import inputs_of
from lfm2np.oracle.judging.routes import OWN, from_key, routed
from lfm2np.oracle.judging.verdict import tie_chance
from lfm2np.progress import Progress
from lfm2np.scoring.teacher_forcing import LOGITS_AT_ONCE
from lfm2np.work.place import AnyPlace, Work, compute, cut, place_of

Array = NDArray[Any]
Ids = tuple[int, ...]
DRAWS = 8  # engines that could be
FARTHEST = 80.0  # of a rival, in units of the noise: tie_chance is 0 beyond
LEAST = 2.0**-40  # nats: a certain token's log-probability has no noise at all
LIKELY, OTHERS = 48, 80  # tokens of each position that are looked at: the likeliest, and some others


class Spoken(NamedTuple):
    """One sequence, and the routes that its tokens were told to have taken: see routes.as_key."""

    token_ids: Ids
    routes: bytes = b""


@dataclass(frozen=True, eq=False)
class Truth:
    """The exact log-probabilities of one sequence, at T positions and J tokens each; row t predicts token t + 1.

    The distribution's own numbers (best, certainty) are over the whole vocabulary. L sparse layers, N experts, K of a
    token; where there are none, `routes` and `preferred` are None.
    """

    spoken: Spoken
    columns: NDArray[np.int64]  # [T, J] token ids, ascending
    logprobs: NDArray[np.float64]  # [T, J]
    best: NDArray[np.int64]  # [T] the greedy token
    squares: NDArray[np.float64]  # [T] sum of p^2
    largest: NDArray[np.float64]  # [T] the largest logit, in absolute value
    vocab_size: int
    routes: NDArray[np.int64] | None = None  # [T, L, K] that the tokens took: those told, the network's own otherwise
    preferred: NDArray[np.float32] | None = None  # [T, L, N] scores by which they are chosen

    @property
    def token_ids(self) -> Ids:
        return self.spoken.token_ids

    def at(self, row: int, token_id: int) -> int:
        """The column of a token. KeyError if it was not among those looked at."""
        column = int(np.searchsorted(self.columns[row], token_id))
        if column == self.columns.shape[1] or self.columns[row, column] != token_id:
            raise KeyError(token_id)
        return column

    def covers(self, wanted: Mapping[int, Iterable[int]]) -> bool:
        """Whether all tokens wanted, by row, are among those looked at."""
        return all(np.isin(list(tokens), self.columns[row]).all() for row, tokens in wanted.items())


@dataclass(frozen=True, eq=False)
class Noise:
    """Errors of K engines that could be: their log-probabilities minus the exact ones, at the columns of a Truth."""

    errors: NDArray[np.float32]  # [K, T, J]
    spread: NDArray[np.float64]  # [T] tau: the size of the logits' errors
    squares: NDArray[np.float32] | None = None  # [T, L, N] mean squares of the errors of a Truth's `preferred`
    rerouted: NDArray[np.bool_] | None = None  # [K, T] where an engine took other experts than the Truth

    def scale(self, truth: Truth, row: int, column: int) -> float:
        """Standard deviation of one token's log-probability."""
        p = float(np.exp(truth.logprobs[row, column]))
        shape = (1.0 - p) ** 2 + max(0.0, float(truth.squares[row]) - p * p)
        own = float(np.mean(np.square(self.errors[:, row, column], dtype=np.float64)))
        return max(LEAST, float(np.sqrt((own + self.spread[row] ** 2 * shape) / 2.0)))

    def gap_scale(self, row: int, one: int, other: int) -> float:
        """Standard deviation of the difference of two tokens' log-probabilities, which is that of their logits."""
        difference = self.errors[:, row, one].astype(np.float64) - self.errors[:, row, other]
        return max(LEAST, float(np.sqrt((np.mean(difference**2) + 2.0 * self.spread[row] ** 2) / 2.0)))

    def gap_scales(self, row: int, one: int) -> NDArray[np.float64]:
        """That of one token and each other [V]."""
        difference = self.errors[:, row].astype(np.float64) - self.errors[:, row, one, None]
        both = (np.mean(difference**2, axis=0) + 2.0 * self.spread[row] ** 2) / 2.0
        return np.asarray(np.maximum(LEAST, np.sqrt(both)))


def flip_chance(truth: Truth, noise: Noise, row: int, best: int, unit: float) -> float:
    """That any of the greedy token's rivals is before it: no more than their chances together.

    The runner-up's alone would be at most a half; a model that has no idea has hundreds within the noise of bfloat16.
    """
    gaps = truth.logprobs[row, best] - truth.logprobs[row].astype(np.float64)
    ratios = np.maximum(0.0, gaps - unit) / noise.gap_scales(row, best)
    rivals = np.flatnonzero(ratios < FARTHEST)
    return min(1.0, math.fsum(tie_chance(ratios[one]) for one in rivals if one != best))


def truth_of(model: LoadedModel, token_ids: Ids, wanted: Mapping[int, Sequence[int]]) -> Truth:
    """Teacher forcing in exact arithmetic: `wanted` are the tokens to look at, by row, beside the likeliest."""
    return truths_of(model, {tuple(token_ids): wanted})[0]


def truths_of(
    model: LoadedModel,
    wanted: Mapping[Ids, Mapping[int, Sequence[int]]],
    place: AnyPlace = None,
    progress: Progress | None = None,
) -> list[Truth]:
    """The truth of each sequence, all of them in ragged passes; `progress(done, total)` counts tokens.

    NumericsError if exact arithmetic can't hold the model's numbers.
    """
    return spoken_truths(model, {Spoken(ids): rows for ids, rows in wanted.items()}, place, progress)


def spoken_truths(
    model: LoadedModel,
    wanted: Mapping[Spoken, Mapping[int, Sequence[int]]],
    place: AnyPlace = None,
    progress: Progress | None = None,
) -> list[Truth]:
    """The same of sequences that were told to have taken certain routes."""
    items = []
    for spoken, rows in wanted.items():
        item = {"token_ids": list(spoken.token_ids), "wanted": [[row, list(tokens)] for row, tokens in rows.items()]}
        items.append(item | ({"routes": from_key(spoken.routes, model.config)} if spoken.routes else {}))
    truths = []
    for spoken, result in zip(wanted, compute(TRUTH, model, items, place, progress), strict=True):
        if "error" in result:
            raise NumericsError(result["error"])
        truths.append(Truth(spoken=spoken, vocab_size=model.config.vocab_size, **result))
    return truths


def truth_items(model: LoadedModel, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each sequence the arrays of its Truth, or `error`: the same bits on every machine."""
    sequences = [item["token_ids"][:-1] for item in items]
    given = given_routes(model, sequences, [item.get("routes") for item in items])
    numerics, kept = routed(model.numerics, given)
    states, runs = ragged.hidden_states(model.weights, model.config, numerics, sequences)
    found: list[dict[str, Any]] = []
    for item, run in zip(items, runs, strict=True):
        try:
            if run.error:
                raise run.error
            result = truth_rows(model, states[run.rows], dict(item["wanted"]))
            if given is not None:
                result |= {"routes": kept.chosen()[run.rows], "preferred": kept.preferred()[run.rows]}
            found.append(result)
        except NumericsError as error:
            found.append({"error": str(error)})
    return found


def given_routes(
    model: LoadedModel, sequences: Sequence[Sequence[int]], told: Sequence[NDArray[np.int64] | None]
) -> NDArray[np.int64] | None:
    """Of a ragged pass [all T, L, K], OWN for sequences of which none were told; None if there are no experts."""
    if not model.config.sparse_layers:
        return None
    assert model.config.mixture is not None
    shape = (len(model.config.sparse_layers), model.config.mixture.num_experts_per_tok)
    parts = [
        np.full((len(ids), *shape), OWN, np.int64) if routes is None else np.asarray(routes, np.int64)[: len(ids)]
        for ids, routes in zip(sequences, told, strict=True)
    ]
    return np.concatenate(parts)


def truth_rows(model: LoadedModel, states: Array, wanted: Mapping[int, Sequence[int]]) -> dict[str, Array]:
    """The arrays of a Truth from hidden states [T, D]; as many rows at once as LOGITS_AT_ONCE allows."""
    vocabulary = model.config.vocab_size
    count = num_columns(wanted, vocabulary)
    parts = []
    for rows in pieces(len(states), vocabulary, LOGITS_AT_ONCE):
        logits = reference.output_logits(model.weights, model.numerics, states[rows])
        logprobs = model.numerics.log_softmax(logits)
        own = {row - rows.start: ids for row, ids in wanted.items() if rows.start <= row < rows.stop}
        columns = chosen_columns(logits, own, count)
        probabilities = elementary.exp(logprobs)
        parts.append(
            {
                "columns": columns,
                "logprobs": np.take_along_axis(logprobs, columns, axis=1),
                "best": np.argmax(logits, axis=1).astype(np.int64),
                "squares": exact_sum(probabilities * probabilities),
                "largest": np.max(np.abs(logits), axis=1).astype(np.float64),
            }
        )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def num_columns(wanted: Mapping[int, Sequence[int]], vocab_size: int) -> int:
    """J: room for what is wanted in any row, the likeliest and some others."""
    return min(vocab_size, max((len(set(ids)) for ids in wanted.values()), default=0) + LIKELY + OTHERS)


def chosen_columns(logits: Array, wanted: Mapping[int, Sequence[int]], count: int) -> NDArray[np.int64]:
    """[T, J] ids, ascending in each row: those wanted, the likeliest, and others spread over the vocabulary."""
    rows, vocabulary = logits.shape
    spread = np.linspace(0, vocabulary - 1, count, dtype=np.int64).tolist()
    likely = np.argsort(-logits, axis=1, kind="stable")[:, :LIKELY] if vocabulary > count else None
    columns = np.empty((rows, count), np.int64)
    for row in range(rows):
        if likely is None:
            columns[row] = np.arange(count)
            continue
        first = dict.fromkeys([*wanted.get(row, ()), *likely[row].tolist()])
        fill = (one for one in itertools.chain(spread, range(vocabulary)) if one not in first)
        while len(first) < count:
            first[next(fill)] = None
        columns[row] = sorted(first)
    return columns


def noise_of(
    model: LoadedModel,
    truths: Sequence[Truth],
    format_name: str,
    draws: int = DRAWS,
    seed: int = 0,
    place: AnyPlace = None,
    progress: Progress | None = None,
    own_routes: bool = False,
) -> list[Noise]:
    """The noise at each of these sequences' positions; `progress(done, total)` counts tokens.

    The engines that could be take the routes of the truth; with `own_routes` those that they choose themselves.

    Sequences go through an emulated engine in this order, some of them in one ragged pass, and each pass takes its
    engine's next random numbers: so an executor gets whole engines. Their products are the machine's float32, so no
    record keeps them.
    NumericsError where the format can't hold the model's numbers at all.
    """
    if not truths:
        return []
    rows = [[list(one.token_ids), one.columns, one.logprobs, one.routes, one.preferred] for one in truths]
    most = place_of(place).max_num_batched_tokens
    engine = {"format": format_name, "seed": seed, "max_num_batched_tokens": most, "own_routes": own_routes}
    engine["truths"] = rows
    items = [{**engine, "draw": draw} for draw in range(draws)]
    found = compute(NOISE, model, items, place, progress)
    return [noise_from(of_engines) for of_engines in zip(*found, strict=True)]


def noise_from(of_engines: Sequence[Mapping[str, Array]]) -> Noise:
    """Of one sequence, from what each engine erred by: see errors_under."""
    errors = np.stack([own["errors"] for own in of_engines])
    if "squares" not in of_engines[0]:
        return Noise(errors, spread_of(errors))
    squares = np.mean([own["squares"] for own in of_engines], axis=0)
    return Noise(errors, spread_of(errors), squares, np.stack([own["rerouted"] for own in of_engines]))


def noise_items(model: LoadedModel, items: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Array]]]:
    """Of each engine that could be what it errs by at each truth: see errors_under."""
    found = []
    for item in items:
        tensors, draw = read_tensors(model.path, model.config), item["draw"]
        inputs = inputs_of(format_named(item["format"]), model.path, model.config, tensors, draw)
        numerics = emulated(item["format"], item["seed"], draw, inputs)
        weights = prepare_weights(tensors, model.config, numerics)
        truths = item["truths"]
        own: list[dict[str, Array]] = []
        sizes = [len(truth[0]) - 1 for truth in truths]
        for indices in cut(range(len(truths)), sizes, item["max_num_batched_tokens"]):
            own += errors_under(model, weights, numerics, [truths[index] for index in indices], item["own_routes"])
        found.append(own)
    return found


def errors_under(
    model: LoadedModel, weights: ModelWeights, numerics: Numerics, truths: Sequence[Sequence[Any]], own_routes: bool
) -> list[dict[str, Array]]:
    """What another arithmetic errs by at each truth, all of them in one ragged pass.

    errors    [T, J] of log-probabilities, at the truth's columns
    squares   [T, L, N] of the errors of experts' scores, and
    rerouted  [T] where a token took other experts: only in a mixture of experts
    """
    sequences, columns, exact, routes, preferred = zip(*truths, strict=True)
    given = given_routes(model, [ids[:-1] for ids in sequences], [None] * len(truths) if own_routes else routes)
    arithmetic, kept = routed(numerics, given)
    rounded = logprobs_under(model, weights, arithmetic, sequences, columns)
    found = [{"errors": (own - right).astype(np.float32)} for own, right in zip(rounded, exact, strict=True)]
    if given is None:
        return found
    ends = np.cumsum([len(one["errors"]) for one in found])[:-1]
    scores, chosen = np.split(kept.preferred(), ends), np.split(kept.chosen(), ends)
    for index, one in enumerate(found):
        one["squares"] = np.square(scores[index] - preferred[index], dtype=np.float32)
        same = np.sort(chosen[index], axis=-1) == np.sort(routes[index], axis=-1)
        one["rerouted"] = ~same.all(axis=(1, 2))
    return found


def logprobs_under(
    model: LoadedModel,
    weights: ModelWeights,
    numerics: Numerics,
    sequences: Sequence[Sequence[int]],
    columns: Sequence[NDArray[np.int64]],
) -> list[Array]:
    """Of each sequence the log-probabilities [T, J] of its `columns` under another arithmetic, in one ragged pass."""
    states, runs = ragged.hidden_states(weights, model.config, numerics, [ids[:-1] for ids in sequences])
    overflow = next((one.error for one in runs if one.error), None)
    if overflow:
        raise overflow
    wanted = np.zeros((len(states), max(one.shape[1] for one in columns)), np.int64)  # [all T, widest J]
    for run, own in zip(runs, columns, strict=True):
        wanted[run.rows, : own.shape[1]] = own
    logprobs = np.empty(wanted.shape, np.float64)
    for rows in pieces(len(states), model.config.vocab_size, LOGITS_AT_ONCE):
        logits = reference.output_logits(weights, numerics, states[rows])
        logprobs[rows] = np.take_along_axis(numerics.log_softmax(logits), wanted[rows], axis=1)
    return [logprobs[run.rows, : own.shape[1]] for run, own in zip(runs, columns, strict=True)]


def spread_of(errors: NDArray[np.float32]) -> NDArray[np.float64]:
    """[T] tau of errors [K, T, J]: what is common to a row's tokens is the normalisation, not the logits."""
    return np.asarray(np.sqrt(np.mean(centred_squares(errors), axis=0)))


def centred_squares(errors: NDArray[np.float32]) -> NDArray[np.float64]:
    """[K, T] mean squares of errors [K, T, J] without what is common to a row's tokens."""
    wide = errors.astype(np.float64)
    return np.asarray(np.mean((wide - wide.mean(axis=2, keepdims=True)) ** 2, axis=2))


def loosened(noises: Sequence[Noise]) -> list[Noise]:
    """Noises of engines with routes of their own, each with a spread that is at least that of all rerouted tokens.

    A token whose experts are near a tie may go elsewhere in an engine though it did not in those that were drawn.
    """
    rerouted = [centred_squares(one.errors)[one.rerouted] for one in noises if one.rerouted is not None]
    pooled = np.concatenate(rerouted) if rerouted else np.zeros(0)
    least = math.sqrt(float(np.mean(pooled))) if len(pooled) else 0.0
    return [replace(one, spread=np.maximum(one.spread, least)) for one in noises]


def num_truth_tokens(item: Mapping[str, Any]) -> int:
    """Tokens that go through the network: all but the last."""
    return len(item["token_ids"]) - 1


def num_noise_tokens(item: Mapping[str, Any]) -> int:
    return sum(len(truth[0]) - 1 for truth in item["truths"])


TRUTH = Work("truth", truth_items, num_truth_tokens)
NOISE = Work("noise", noise_items, num_noise_tokens, is_exact=False)
