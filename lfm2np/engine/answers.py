"""From a step's logits to each sample's tokens and log-probabilities, or its error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.drafting import decide
from lfm2np.engine.samples import Answer, Group, Sample
from lfm2np.errors import Lfm2npError
from lfm2np.network.step import StepResult
from lfm2np.sampling.logprobs import token_logprobs
from lfm2np.speculation.drafters import Draft
from lfm2np.speculation.proposals import Proposals


def answer_step(
    model: LoadedModel, groups: Mapping[str, tuple[Group, Sample]], result: StepResult, proposals: Proposals
) -> tuple[dict[str, Answer], dict[str, Lfm2npError]]:
    """Tokens for every sample whose last row was computed; one that fails gets an error instead.

    No sample changes here, so that an interrupted step leaves no trace; prompt log-probabilities are kept, but they are
    the same whenever they are computed.
    """
    answers: dict[str, Answer] = {}
    errors: dict[str, Lfm2npError] = dict(result.errors)
    for entry in (segment.entry for segment in result.segments):
        rows = result.logits.get(entry.request_id)
        if entry.request_id in errors or rows is None:
            continue
        keep_prompt_logprobs(model, groups[entry.request_id][0], entry.first_logits, entry.stop, rows)
        for name in entry.samples:
            if name not in groups:
                continue  # a sample that was aborted before it was split off
            group, sample = groups[name]
            if sample.request.is_finished:
                continue
            try:
                answers[name] = decide(model, group, sample, entry, rows, proposals.drafts.get(name, Draft()))
            except Lfm2npError as error:
                errors[name] = error
    return answers, errors


def keep_prompt_logprobs(model: LoadedModel, group: Group, first: int, stop: int, rows: NDArray[Any]) -> None:
    """Row p predicts prompt token p + 1; each position is kept once, however often it is computed.

    rows  [rows, V], of the positions from `first` on; `stop` is the end of what was computed
    """
    kept, count = group.prompt_logprobs, group.params.prompt_logprobs
    if kept is None or count is None:
        return
    prompt = group.samples[0].request.prompt_token_ids
    for position in range(first, min(stop, len(prompt) - 1)):
        if position + 1 == len(kept):
            kept.append(token_logprobs(model.numerics, rows[position - first], prompt[position + 1], count))
