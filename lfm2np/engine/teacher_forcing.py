"""Teacher forcing: how likely the model finds the tokens that it is given; one sequence, or many on any executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import Numerics
from lfm2np.arithmetic.pieces import over_pieces, pieces
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.checkpoint.text.tokenizer import require_ids
from lfm2np.engine import uncached
from lfm2np.engine.work.place import AnyPlace, Work, compute
from lfm2np.errors import NumericsError, RequestError
from lfm2np.truth import reference
from lfm2np.truth.config import ModelConfig
from lfm2np.truth.weights import ModelWeights
from lfm2np.values import Progress

LOGITS_AT_ONCE = 2**23  # bounds the memory of the logits; under exact no choice can change a bit
Array = NDArray[Any]
Columns = dict[str, Array]  # logprobs [T] float64, ranks [T] int64, margins [T] float64, greedy_token_ids [T] int64


@dataclass(frozen=True)
class TokenScore:
    """One given token against the model's distribution for its position."""

    position: int  # of the token; 0 has no prediction, so the first score stands at 1
    token_id: int
    logprob: float  # natural logarithm, from the raw logits
    rank: int  # 1 for the greedy token; among equal logits the lower id comes first
    margin: float  # its logit minus the best other one: positive if it is the greedy token
    greedy_token_id: int


def score(
    weights: ModelWeights,
    config: ModelConfig,
    numerics: Numerics,
    token_ids: Sequence[int],
    progress: Progress | None = None,
) -> list[TokenScore]:
    """Scores of tokens 1 to T-1 given those before each, by reference.py; `progress(done, total)` counts layers.

    RequestError for fewer than two tokens, more than `max_position_embeddings`, or an id outside the vocabulary.
    """
    ids = scorable(token_ids, config)
    states = reference.hidden_states(weights, config, numerics, ids[:-1], progress)
    columns, overflows = score_rows(weights, numerics, states, np.array(ids[1:], np.int64))
    error = overflow(overflows, range(len(states)), numerics)
    if error:
        raise error
    return token_scores(ids, columns)


def score_batch(
    weights: ModelWeights, config: ModelConfig, numerics: Numerics, sequences: Sequence[Sequence[int]]
) -> list[Columns | NumericsError]:
    """What `score` says of each sequence, all of them in one ragged pass; an overflow harms only its own sequence."""
    states, runs = uncached.hidden_states(weights, config, numerics, [ids[:-1] for ids in sequences])
    following = np.array([token for ids in sequences for token in ids[1:]], np.int64)
    columns, overflows = score_rows(weights, numerics, states, following)
    results: list[Columns | NumericsError] = []
    for run in runs:
        rows = range(run.rows.start, run.rows.stop)
        error = run.error or overflow(overflows, rows, numerics)
        results.append(error or {name: values[run.rows].copy() for name, values in columns.items()})
    return results


def scorable(token_ids: Sequence[int], config: ModelConfig) -> list[int]:
    ids = require_ids(token_ids, config.vocab_size)
    most = config.max_position_embeddings
    if not 2 <= len(ids) <= most:
        tokens = "token" if len(ids) == 1 else "tokens"
        raise RequestError(f"{len(ids)} {tokens} to score: expected 2 to max_position_embeddings={most}")
    return ids


def score_rows(
    weights: ModelWeights, numerics: Numerics, states: Array, token_ids: NDArray[np.int64]
) -> tuple[Columns, dict[int, tuple[int, float]]]:
    """Hidden states [T, D] against the tokens [T] that follow; as many rows at once as LOGITS_AT_ONCE allows.

    Also, by row, the first token whose logit is not finite, and that logit: the columns say nothing of such a row.
    """
    columns: Columns = {
        "logprobs": np.empty(len(states)),
        "ranks": np.empty(len(states), np.int64),
        "margins": np.empty(len(states)),
        "greedy_token_ids": np.empty(len(states), np.int64),
    }
    overflows: dict[int, tuple[int, float]] = {}
    for part in pieces(len(states), weights.head.outputs, LOGITS_AT_ONCE):
        with np.errstate(all="ignore"):
            logits = numerics.linear(states[part], weights.head)  # [t, V]

        def compute(piece: slice, logits: Array = logits, first: int = part.start) -> None:
            rows, piece_logits = slice(first + piece.start, first + piece.stop), logits[piece]
            for index in np.flatnonzero(~np.isfinite(piece_logits).all(axis=1)).tolist():
                token_id = int(np.argmin(np.isfinite(piece_logits[index])))
                overflows[rows.start + index] = token_id, float(piece_logits[index, token_id])
                piece_logits[index] = 0.0
            for name, values in score_logits(numerics, piece_logits, token_ids[rows]).items():
                columns[name][rows] = values

        over_pieces(compute, len(logits), logits.shape[1])
    return columns, overflows


def score_logits(numerics: Numerics, logits: Array, token_ids: NDArray[np.int64]) -> Columns:
    """Logits [t, V] against the tokens [t] that follow; overwrites the logits of these."""
    chosen = token_ids[:, None]  # [t, 1]
    chosen_logits = np.take_along_axis(logits, chosen, axis=1)  # [t, 1]
    logprobs = np.take_along_axis(numerics.log_softmax(logits), chosen, axis=1)
    ahead = np.count_nonzero(logits > chosen_logits, axis=1)
    ahead += np.count_nonzero((logits == chosen_logits) & (np.arange(logits.shape[1]) < chosen), axis=1)
    greedy = np.argmax(logits, axis=1)
    np.put_along_axis(logits, chosen, -np.inf, axis=1)
    return {
        "logprobs": logprobs[:, 0],
        "ranks": ahead.astype(np.int64) + 1,
        "margins": chosen_logits[:, 0].astype(np.float64) - logits.max(axis=1),  # without another token: infinite
        "greedy_token_ids": greedy.astype(np.int64),
    }


def overflow(overflows: Mapping[int, tuple[int, float]], rows: range, numerics: Numerics) -> NumericsError | None:
    """The error for the first of these rows whose logits are not all finite."""
    for row in rows:
        if row in overflows:
            token_id, value = overflows[row]
            place = f"logit of token {token_id} in row {row - rows.start}"
            return NumericsError(f"{place} is {value}: these weights overflow {numerics.name}")
    return None


def token_scores(token_ids: Sequence[int], columns: Columns) -> list[TokenScore]:
    lists = (columns[name].tolist() for name in ("logprobs", "ranks", "margins", "greedy_token_ids"))
    return [TokenScore(row + 1, token_ids[row + 1], *each) for row, each in enumerate(zip(*lists, strict=True))]


def score_many(
    model: LoadedModel,
    prompts: Sequence[str | Sequence[int]],
    executor: AnyPlace = None,
    progress: Progress | None = None,
) -> list[list[TokenScore] | NumericsError]:
    """`model.score` of each prompt, text or token ids, bit for bit; an overflow is the result of its own prompt.

    executor  None: here; a concurrent.futures.Executor, as work.Workers, which survives the death of its processes;
              or a work.Place, which may have a record: results it has are not computed, new ones go there
    progress  called with (tokens done, tokens in all)
    errors    RequestError that names a prompt that can't be scored, before anything is; WorkerError
    """
    sequences = checked(model, prompts)
    scores: list[list[TokenScore] | NumericsError] = []
    for ids, result in zip(sequences, compute(SCORE, model, sequences, executor, progress), strict=True):
        scores.append(NumericsError(result["error"]) if "error" in result else token_scores(ids, result))
    return scores


def checked(model: LoadedModel, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
    sequences = []
    for index, prompt in enumerate(prompts):
        try:
            sequences.append(scorable(model.prompt_ids(prompt), model.config))
        except RequestError as problem:
            raise RequestError(f"prompt {index}: {problem}") from None
    return sequences


def score_items(model: LoadedModel, items: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Of each sequence the columns of teacher_forcing.score_batch, or `error`."""
    results = score_batch(model.weights, model.config, model.numerics, items)
    return [{"error": str(result)} if isinstance(result, NumericsError) else dict(result) for result in results]


def num_predictions(ids: Sequence[int]) -> int:
    """Tokens that go through the network: all but the last."""
    return len(ids) - 1


SCORE = Work("score", score_items, num_predictions)
