"""Each request alone, through reference.py: what every batched run has to equal, token for token and bit for bit.

`alone` computes the whole sequence anew for each token, with the engine's sampler and no other part of the engine.
`first_difference` holds a recorded run against the reference in one pass over prompt and output: by causality row t
of that pass is what `alone` computes for token t + 1, as long as the tokens before agree, and they are compared too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np import reference
from lfm2np.acceptance import Guess, next_token
from lfm2np.drafters import DraftContext, Drafter
from lfm2np.loaded import LoadedModel
from lfm2np.sampling import choose
from lfm2np.sampling_params import SamplingParams
from lfm2np.stop_strings import StopChecker


@dataclass(frozen=True, eq=False)
class Step:
    """One token, the row [V] that it was chosen from, and why it was the last, if it was."""

    token_id: int
    logits: NDArray[Any]
    finish_reason: str | None


def alone(
    model: LoadedModel,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    seed: int,
    sample_index: int,
    drafter: Drafter | None = None,
) -> Iterator[Step]:
    """The tokens of one sample; `seed` as lfm2np.sampling.request_seed gives it.

    A drafter matters only if it draws its guesses: it is then asked for one at each position.
    """
    config = model.config
    eos = tuple(sorted(config.eos_token_ids))
    stop_ids = set(params.stop_token_ids) | set(() if params.ignore_eos else eos)
    room = config.max_position_embeddings - len(prompt_ids)
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    stream = model.tokenizer.stream() if model.has_tokenizer else None
    stops = StopChecker(params.stop, params.include_stop_str_in_output)
    output: list[int] = []
    reason: str | None = None
    while reason is None:
        states = reference.hidden_states(model.weights, config, model.numerics, [*prompt_ids, *output])
        row = reference.output_logits(model.weights, model.numerics, states[-1:])[0]
        guess = None
        if drafter is not None and drafter.is_random:
            guess = _guess(drafter, prompt_ids, output, params, seed, sample_index)
        token = next_token(row, params, prompt_ids, output, eos, seed, sample_index, guess)
        output.append(token)
        stopped = token in stop_ids and len(output) >= params.min_tokens
        if not stopped and stream is not None:
            stopped = stops.push(stream.push(token), len(output) > params.min_tokens)[1] is not None
        if stopped:
            reason = "stop"
        elif len(output) >= most:
            ended = stream is not None and stops.finish(stream.finish())[1] is not None
            reason = "stop" if ended else "length"
        yield Step(token, row, reason)


def _guess(
    drafter: Drafter,
    prompt_ids: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    seed: int,
    sample_index: int,
) -> Guess | None:
    context = DraftContext("0", (*prompt_ids, *output), len(prompt_ids), params, seed, sample_index, 0)
    draft = drafter.propose([context])[0]
    return Guess(draft.token_ids[0], draft.weights[0]) if draft.weights else None


@dataclass(frozen=True)
class Difference:
    """Where a run first differs from the reference."""

    position: int  # of the token in the output
    what: str  # "token" or "logits"
    detail: str

    def __str__(self) -> str:
        return f"output token {self.position}: {self.what}: {self.detail}"


def difference_at(
    position: int, token: int, row: NDArray[Any], expected: int, truth: NDArray[Any]
) -> Difference | None:
    """Logits first, bit for bit; then the token."""
    if row.tobytes() != truth.tobytes():
        place = int(np.argmax(row != truth)) if (row != truth).any() else 0
        detail = f"logit of token {place} is {row[place]!r}, alone it is {truth[place]!r}"
        return Difference(position, "logits", detail)
    if token != expected:
        return Difference(position, "token", f"{token}, alone it is {expected}")
    return None


def first_difference(
    model: LoadedModel,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    seed: int,
    sample_index: int,
    token_ids: Sequence[int],
    rows: Sequence[NDArray[Any]],
) -> Difference | None:
    """None if tokens and logits [len(token_ids), V] of one sample equal the reference's."""
    if not token_ids:
        return None
    eos = tuple(sorted(model.config.eos_token_ids))
    sequence = [*prompt_ids, *token_ids[:-1]]
    states = reference.hidden_states(model.weights, model.config, model.numerics, sequence)
    truth = reference.output_logits(model.weights, model.numerics, states[len(prompt_ids) - 1 :])
    for position, (token, row) in enumerate(zip(token_ids, rows, strict=True)):
        output = token_ids[:position]
        expected = choose(truth[position], params, prompt_ids, output, eos, seed, sample_index)
        found = difference_at(position, token, row, expected, truth[position])
        if found:
            return found
    return None
