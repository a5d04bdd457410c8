"""How far a right engine may be off, at each position by itself.

The network runs under the declared format as several engines that could be (emulate.py); what their log-probabilities
differ by from the exact ones is the noise that the format is entitled to there. One number for all positions would be
wrong both ways: the noise differs tenfold between positions of one sequence.

With errors d[v] of the logits, independent and of one size tau, the error of token y's log-probability is
d[y] - sum p[v] d[v], of variance tau^2 ((1 - p[y])^2 + sum over v != y of p[v]^2): next to nothing for a token that is
nearly certain. That is one estimate, from all tokens; the other is what the emulations differ by at this very token.
The scale is the mean of the two variances: the first is steady, the second knows what is special.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np import reference
from lfm2np.checkpoint import open_checkpoint
from lfm2np.errors import NumericsError
from lfm2np.loading import Model
from lfm2np.numerics import Numerics
from lfm2np.oracle.emulate import emulated
from lfm2np.weights import ModelWeights, prepare_weights

Array = NDArray[Any]
Ids = tuple[int, ...]
DRAWS = 8  # engines that could be
LEAST = 2.0**-40  # nats: a certain token's log-probability has no noise at all
LIKELY, OTHERS = 48, 80  # tokens of each position that are looked at: the likeliest, and some others


@dataclass(frozen=True, eq=False)
class Truth:
    """The exact log-probabilities of one sequence, at T positions and J tokens each; row t predicts token t + 1.

    The distribution's own numbers (best, certainty) are over the whole vocabulary.
    """

    token_ids: Ids
    columns: NDArray[np.int64]  # [T, J] token ids, ascending
    logprobs: NDArray[np.float64]  # [T, J]
    best: NDArray[np.int64]  # [T] the greedy token
    squares: NDArray[np.float64]  # [T] sum of p^2
    largest: NDArray[np.float64]  # [T] the largest logit, in absolute value
    vocab_size: int

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


def truth_of(model: Model, token_ids: Ids, wanted: Mapping[int, Sequence[int]]) -> Truth:
    """Teacher forcing in exact arithmetic: `wanted` are the tokens to look at, by row, beside the likeliest."""
    states = reference.hidden_states(model.weights, model.config, model.numerics, token_ids[:-1])
    logits = reference.output_logits(model.weights, model.numerics, states)
    logprobs = model.numerics.log_softmax(logits)
    columns = chosen_columns(logits, wanted)
    probabilities = np.exp(logprobs)
    return Truth(
        token_ids=tuple(token_ids),
        columns=columns,
        logprobs=np.take_along_axis(logprobs, columns, axis=1),
        best=np.argmax(logits, axis=1),
        squares=np.sum(probabilities**2, axis=1),
        largest=np.max(np.abs(logits), axis=1).astype(np.float64),
        vocab_size=logits.shape[1],
    )


def chosen_columns(logits: Array, wanted: Mapping[int, Sequence[int]]) -> NDArray[np.int64]:
    """[T, J] ids, ascending in each row: those wanted, the likeliest, and others spread over the vocabulary."""
    rows, vocabulary = logits.shape
    most = max((len(set(ids)) for ids in wanted.values()), default=0)
    count = min(vocabulary, most + LIKELY + OTHERS)
    spread = np.linspace(0, vocabulary - 1, min(vocabulary, count), dtype=np.int64)
    likely = np.argsort(-logits, axis=1, kind="stable")[:, :LIKELY] if vocabulary > count else None
    columns = np.empty((rows, count), np.int64)
    for row in range(rows):
        if likely is None:
            columns[row] = np.arange(count)
            continue
        first = dict.fromkeys([*wanted.get(row, ()), *likely[row].tolist()])
        fill = (one for one in [*spread.tolist(), *range(vocabulary)] if one not in first)
        while len(first) < count:
            first[next(fill)] = None
        columns[row] = sorted(first)
    return columns


def noise_of(
    model: Model,
    truths: Sequence[Truth],
    format_name: str,
    draws: int = DRAWS,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Noise]:
    """The noise at each of these sequences' positions; `progress(done, total)` counts passes.

    NumericsError where the format can't hold the model's numbers at all.
    """
    errors = [np.empty((draws, *truth.logprobs.shape), np.float32) for truth in truths]
    done = 0
    if not truths:
        return []
    for draw, (weights, numerics) in enumerate(engines(model, format_name, draws, seed)):
        for truth, own in zip(truths, errors, strict=True):
            own[draw] = logprobs_under(model, weights, numerics, truth) - truth.logprobs
            done += 1
            if progress:
                progress(done, draws * len(truths))
    return [Noise(own, spread_of(own)) for own in errors]


def engines(model: Model, format_name: str, draws: int, seed: int) -> Iterator[tuple[ModelWeights, Numerics]]:
    """One after another, so that the weights of one are in memory."""
    for draw in range(draws):
        numerics = emulated(format_name, seed, draw)
        yield prepare_weights(open_checkpoint(model.path, model.config), model.config, numerics), numerics


def logprobs_under(model: Model, weights: ModelWeights, numerics: Numerics, truth: Truth) -> Array:
    """[T, J] log-probabilities of a truth's columns under another arithmetic."""
    states = reference.hidden_states(weights, model.config, numerics, truth.token_ids[:-1])
    logits = reference.output_logits(weights, numerics, states)
    if not np.isfinite(logits).all():
        raise NumericsError(f"{numerics.name} can't hold this model's numbers: a logit is not finite")
    return np.take_along_axis(numerics.log_softmax(logits), truth.columns, axis=1)


def spread_of(errors: NDArray[np.float32]) -> NDArray[np.float64]:
    """[T] tau of errors [K, T, J]: what is common to a row's tokens is the normalisation, not the logits."""
    wide = errors.astype(np.float64)
    centred = wide - wide.mean(axis=2, keepdims=True)
    return np.asarray(np.sqrt(np.mean(centred**2, axis=(0, 2))))
