"""The exact log-probabilities of a sequence: teacher forcing in exact arithmetic, at the rows that are judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic.grids import exact_sum
from lfm2np.arithmetic.pieces import over_pieces, pieces
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine import uncached
from lfm2np.engine.teacher_forcing import LOGITS_AT_ONCE
from lfm2np.engine.work.place import AnyPlace, Work, compute
from lfm2np.errors import NumericsError
from lfm2np.oracle.judging.routes import OWN, from_key, routed
from lfm2np.truth import elementary, reference
from lfm2np.values import Progress

Array = NDArray[Any]
Ids = tuple[int, ...]
Wanted = Mapping[int, Iterable[int]]  # tokens, by row
LIKELY, OTHERS = 48, 80  # columns of each position: the likeliest tokens, and some others
LATE = 1024  # rows before the first wanted that are too many to store: a row takes some 3 KB
UNKNOWN = -1  # instead of a column, in rows that are not wanted


class Spoken(NamedTuple):
    """One sequence, and the routes that its tokens are reported to have taken: see routes.as_key."""

    token_ids: Ids
    routes: bytes = b""


@dataclass(frozen=True, eq=False)
class Truth:
    """The exact log-probabilities of one sequence, at T positions and J tokens each; row t predicts token t + 1.

    The arrays begin at row `first` of the sequence, which is 0 except for late rows of long sequences. Of rows that are
    not wanted only the routes are known; their columns are UNKNOWN. `best` and `squares` are over the
    whole vocabulary. L sparse layers, N experts, K of a token; without a mixture `routes` and `preferred` are None.
    """

    spoken: Spoken
    columns: NDArray[np.int64]  # [T, J] token ids, ascending
    logprobs: NDArray[np.float64]  # [T, J]
    best: NDArray[np.int64]  # [T] the greedy token
    squares: NDArray[np.float64]  # [T] sum of p^2
    largest: NDArray[np.float64]  # [T] the largest logit, in absolute value
    vocab_size: int
    routes: NDArray[np.int64] | None = None  # [T, L, K] that the tokens took: reported, else the network's
    preferred: NDArray[np.float32] | None = None  # [T, L, N] scores by which they are chosen
    first: int = 0

    @property
    def token_ids(self) -> Ids:
        return self.spoken.token_ids

    @property
    def stored(self) -> NDArray[np.int64]:
        """Where the known rows stand in the arrays."""
        return np.flatnonzero(self.columns[:, 0] != UNKNOWN)

    @property
    def known_rows(self) -> NDArray[np.int64]:
        """Their numbers in the sequence."""
        return self.first + self.stored

    def at(self, row: int, token_id: int) -> int:
        """The column of a token. KeyError if it is not among the columns."""
        columns = self.columns[row - self.first]
        column = int(np.searchsorted(columns, token_id))
        if column == len(columns) or columns[column] != token_id:
            raise KeyError(token_id)
        return column

    def covers(self, wanted: Wanted) -> bool:
        """Whether all wanted tokens are among the columns, one or more a row."""
        pairs = np.array([(row - self.first, token) for row, tokens in wanted.items() for token in tokens], np.int64)
        rows, tokens = pairs.T
        inside = rows.min() >= 0 and rows.max() < len(self.columns)
        return bool(inside and (self.columns[rows] == tokens[:, None]).any(axis=1).all())


def spoken_truths(
    model: LoadedModel, wanted: Mapping[Spoken, Wanted], place: AnyPlace = None, progress: Progress | None = None
) -> list[Truth]:
    """The truth of each sequence, in ragged passes; `progress(done, total)` counts tokens.

    wanted  tokens to include beside the likeliest, by row; only these rows are computed, or all if there are none
    errors  NumericsError if exact arithmetic can't hold the model's numbers
    """
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
    return over_states(
        model, items, lambda item, states, routes: truth_rows(model, states, dict(item["wanted"])) | routes
    )


def over_states(
    model: LoadedModel,
    items: Sequence[Mapping[str, Any]],
    result_of: Callable[[Mapping[str, Any], Array, dict[str, Array]], dict[str, Any]],
) -> list[dict[str, Any]]:
    """result_of(item, states [T, D], routes) of each item, all in one ragged pass over their tokens but the last; or
    `error`, where attention or the function meets a number that is not finite. `routes` has a Truth's `routes` and
    `preferred`; without experts nothing.
    """
    sequences = [item["token_ids"][:-1] for item in items]
    given = given_routes(model, sequences, [item.get("routes") for item in items])
    numerics, kept = routed(model.numerics, given)
    states, runs = uncached.hidden_states(model.weights, model.config, numerics, sequences)
    chosen = {} if given is None else {"routes": kept.chosen(), "preferred": kept.preferred()}
    results: list[dict[str, Any]] = []
    for item, run in zip(items, runs, strict=True):
        try:
            if run.error:
                raise run.error
            results.append(result_of(item, states[run.rows], {name: rows[run.rows] for name, rows in chosen.items()}))
        except NumericsError as error:
            results.append({"error": str(error)})
    return results


def given_routes(
    model: LoadedModel, sequences: Sequence[Sequence[int]], reported: Sequence[NDArray[np.int64] | None]
) -> NDArray[np.int64] | None:
    """Of a ragged pass [all T, L, K], OWN for sequences without reported routes; None if there are no experts."""
    if not model.config.sparse_layers:
        return None
    assert model.config.mixture is not None
    shape = (len(model.config.sparse_layers), model.config.mixture.num_experts_per_tok)
    parts = [
        np.full((len(ids), *shape), OWN, np.int64) if routes is None else np.asarray(routes, np.int64)[: len(ids)]
        for ids, routes in zip(sequences, reported, strict=True)
    ]
    return np.concatenate(parts)


def truth_rows(model: LoadedModel, states: Array, wanted: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """The arrays of a Truth from hidden states [T, D]; as many rows at once as LOGITS_AT_ONCE allows."""
    vocabulary = model.config.vocab_size
    named = max((len(set(ids)) for ids in wanted.values()), default=0)
    count = min(vocabulary, named + LIKELY + OTHERS)
    # Rows before the first wanted are not stored where they are many, unless for their routes.
    first = min(wanted, default=0)
    first = first if first >= LATE and not model.config.sparse_layers else 0
    states = states[first:]
    arrays = {
        "columns": np.full((len(states), count), UNKNOWN, np.int64),
        "logprobs": np.zeros((len(states), count)),
        "best": np.full(len(states), UNKNOWN, np.int64),
        "squares": np.zeros(len(states)),
        "largest": np.zeros(len(states)),
    }
    wanted = {row - first: tokens for row, tokens in wanted.items()}
    chosen = np.array([row for row in sorted(wanted) if row < len(states)] or range(len(states)), np.int64)
    for part in pieces(len(chosen), vocabulary, LOGITS_AT_ONCE):
        logits = reference.output_logits(model.weights, model.numerics, states[chosen[part]])
        fill_rows(arrays, logits, chosen[part], wanted)
    return {**arrays, "first": first} if first else arrays


def fill_rows(
    arrays: dict[str, Array], logits: Array, numbers: NDArray[np.int64], wanted: Mapping[int, Sequence[int]]
) -> None:
    """Writes results of logits [t, V] into the arrays of a Truth, at these rows [t]."""

    def compute(rows: slice) -> None:
        piece, at = logits[rows], numbers[rows]
        tokens = {index: wanted.get(row, ()) for index, row in enumerate(at.tolist())}
        columns = chosen_columns(piece, tokens, arrays["columns"].shape[1])
        arrays["columns"][at] = columns
        arrays["logprobs"][at], arrays["squares"][at] = distribution(piece, columns)
        arrays["best"][at] = np.argmax(piece, axis=1)
        arrays["largest"][at] = np.abs(piece).max(axis=1)

    over_pieces(compute, len(logits), logits.shape[1])


def distribution(logits: Array, columns: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Log-probabilities [T, J] at the columns, bit for bit those of exact.log_softmax, and the sums [T] of p^2.

    Logits [T, V]. Both sums are exact (grids.exact_sum); all else is elementwise.
    """
    below = logits.astype(np.float64)
    below -= below.max(-1, keepdims=True)
    shares = elementary.exp(below)
    totals = exact_sum(shares, signed=False)
    logprobs = np.take_along_axis(below, columns, axis=1) - elementary.log(totals)[:, None]
    shares *= shares
    return logprobs, exact_sum(shares, signed=False) / (totals * totals)


def chosen_columns(logits: Array, wanted: Mapping[int, Sequence[int]], count: int) -> NDArray[np.int64]:
    """[T, J] ids, ascending in each row: the wanted, the likeliest, and others spread over the vocabulary."""
    rows, vocabulary = logits.shape
    if vocabulary <= count:
        return np.tile(np.arange(vocabulary), (rows, 1))
    chosen = likeliest(logits, LIKELY)
    for row, ids in wanted.items():
        chosen[row, list(ids)] = True
    spread = np.linspace(0, vocabulary - 1, count, dtype=np.int64)  # `count` different ones: enough for any row
    others = ~chosen[:, spread]
    others &= np.cumsum(others, axis=1) <= count - np.count_nonzero(chosen, axis=1)[:, None]
    chosen[:, spread] |= others
    return np.nonzero(chosen)[1].reshape(rows, count)


def likeliest(logits: Array, count: int) -> NDArray[np.bool_]:
    """[T, V]: whether a token is among so many of the largest of its row; of equal ones those of the lowest ids are."""
    least = np.partition(logits, logits.shape[1] - count, axis=1)[:, logits.shape[1] - count]
    is_likeliest = logits >= least[:, None]
    for row in np.flatnonzero(np.count_nonzero(is_likeliest, axis=1) > count):
        equal = np.flatnonzero(logits[row] == least[row])
        is_likeliest[row, equal[count - np.count_nonzero(logits[row] > least[row]) :]] = False
    return is_likeliest


def num_fed_tokens(item: Mapping[str, Any]) -> int:
    """Tokens that go through the network: all but the last."""
    return len(item["token_ids"]) - 1


def num_shared_tokens(model: LoadedModel, item: Mapping[str, Any], before: Mapping[str, Any]) -> int:
    """Tokens that go through the network once if both are computed in one pass: see uncached.hidden_states."""
    if model.config.sparse_layers:
        return 0
    return uncached.common_prefix(item["token_ids"][:-1], before["token_ids"][:-1])


TRUTH = Work("truth-rows", truth_items, num_fed_tokens, num_shared=num_shared_tokens)
