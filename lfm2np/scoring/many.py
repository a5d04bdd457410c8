"""Many sequences scored: in ragged passes of bounded size, here or on any executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.errors import NumericsError, RequestError
from lfm2np.progress import Progress
from lfm2np.scoring.teacher_forcing import TokenScore, scorable, score_batch, token_scores
from lfm2np.work.place import AnyPlace, Work, compute


def score_many(
    model: LoadedModel,
    prompts: Sequence[str | Sequence[int]],
    executor: AnyPlace = None,
    progress: Progress | None = None,
) -> list[list[TokenScore] | NumericsError]:
    """`model.score` of each prompt, text or token ids, bit for bit; an overflow is the result of its own prompt.

    executor  None: here; a concurrent.futures.Executor, or a function that makes one anew when its workers die; or a
              work.Place, which may have a record: what that knows is not computed, and what is computed goes there
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
