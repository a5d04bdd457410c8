"""What comes of a step: each sequence's tokens, text and log-probabilities, or its error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.acceptance import Guess, next_token
from lfm2np.engine.drafters import Draft
from lfm2np.engine.outputs import RunMetrics
from lfm2np.engine.sampling.logprobs import token_logprobs
from lfm2np.engine.sequence import Sequence
from lfm2np.engine.step import StepResult
from lfm2np.errors import Lfm2npError
from scheduler import ScheduledTokens


@dataclass(frozen=True, eq=False)
class Chosen:
    """One token, and the row [V] of its position that it was chosen from."""

    token_id: int
    position: int
    row: NDArray[Any]


def sample_step(
    model: LoadedModel,
    sequences: Mapping[str, Sequence],
    result: StepResult,
    drafts: Mapping[str, Draft],
    metrics: RunMetrics,
) -> tuple[dict[str, list[Chosen]], dict[str, Lfm2npError]]:
    """Tokens for every sequence whose last row was computed; one that fails gets an error instead.

    Outputs, texts, log-probabilities and metrics go on here; the scheduler's counters follow in update().
    """
    chosen: dict[str, list[Chosen]] = {}
    errors: dict[str, Lfm2npError] = dict(result.errors)
    for entry in (segment.entry for segment in result.segments):
        rows = result.logits.get(entry.request_id)
        if entry.request_id in errors or rows is None:
            continue
        keep_prompt_logprobs(model, sequences[entry.request_id], entry, rows)
        for name in entry.samples:
            try:
                chosen[name] = decide(model, sequences[name], entry.drafts, rows, drafts.get(name, Draft()), metrics)
            except Lfm2npError as error:
                errors[name] = error
                if name == entry.request_id:
                    break  # its samples lose it, and compute the prompt themselves
    return chosen, errors


def decide(
    model: LoadedModel,
    sequence: Sequence,
    fed: tuple[int, ...],
    rows: NDArray[Any],
    draft: Draft,
    metrics: RunMetrics,
) -> list[Chosen]:
    """The tokens of one sequence: accepted drafts, then one token more, unless a token ends it.

    rows  [rows, V], the last one of the entry's last token
    The sequence's output, text and log-probabilities go on. Lfm2npError if a token can't be chosen.
    """
    params, output, chosen = sequence.params, sequence.output, list[Chosen]()
    eos, accepted = tuple(sorted(model.config.eos_token_ids)), 0
    for index, row in enumerate(rows[-1 - len(fed) :]):
        guess = None
        if draft.weights is not None and index < len(draft.token_ids):
            guess = Guess(draft.token_ids[index], draft.weights[index])
        prompt = sequence.prompt_token_ids
        token = next_token(row, params, prompt, output, eos, sequence.seed, sequence.index, guess)
        chosen.append(Chosen(token, sequence.num_tokens - 1 + index, row))
        output.append(token)
        if params.logprobs is not None:
            sequence.logprobs.append(token_logprobs(model.numerics, row, token, params.logprobs))
        ending = sequence.reason_to_end(token, len(output))
        sequence.push_text(token, len(output) > params.min_tokens, ending)
        holds = index < len(fed) and token == fed[index]
        accepted += holds
        if not holds or ending is not None or sequence.stop_string is not None:
            break
    sequence.num_drafts += len(fed)
    sequence.num_accepted += accepted
    metrics.count_answer(len(fed), accepted, len(chosen))
    return chosen


def keep_prompt_logprobs(model: LoadedModel, sequence: Sequence, entry: ScheduledTokens, rows: NDArray[Any]) -> None:
    """Row p predicts prompt token p + 1; each position is kept once, however often it is computed.

    rows  [rows, V], of the positions from entry.first_logits on
    """
    kept, count, prompt = sequence.prompt_logprobs, sequence.params.prompt_logprobs, sequence.prompt_token_ids
    if kept is None or count is None:
        return
    for position in range(entry.first_logits, min(entry.stop, len(prompt) - 1)):
        if position + 1 == len(kept):
            row = rows[position - entry.first_logits]
            kept.append(token_logprobs(model.numerics, row, prompt[position + 1], count))
