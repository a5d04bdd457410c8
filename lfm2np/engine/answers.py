"""A step's drafts, and what comes of it: who gets drafts; each sample's tokens and log-probabilities, or its error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.acceptance import Guess, next_token
from lfm2np.engine.drafters import Draft, DraftContext, Drafter
from lfm2np.engine.proposals import Proposals
from lfm2np.engine.samples import Answer, Drawn, Group, Sample
from lfm2np.engine.sampling.logprobs import token_logprobs
from lfm2np.engine.step import StepResult
from lfm2np.errors import Lfm2npError
from scheduler import BatchPlan, ScheduledTokens, most_drafts


def contexts_of(
    plan: BatchPlan, groups: Mapping[str, tuple[Group, Sample]], drafter: Drafter, most: int, room: int
) -> list[DraftContext]:
    """Who gets drafts in a planned step that leaves `room` tokens: at most `most` each.

    Sampled drafts decide a token even where they are not computed with, so every position needs one.
    """
    contexts = []
    for entry in plan.scheduled:
        takes = entry.samples == (entry.request_id,)
        alive = [groups[name] for name in entry.samples if name in groups]  # one may be aborted before it is split off
        for group, sample in alive:
            count = min(most, room, most_drafts(sample.request)) if takes else 0
            may_draft = not sample.request.is_finished and sample.draft_error is None
            if may_draft and (count or (drafter.is_random and group.params.temperature != 0.0)):
                contexts.append(
                    DraftContext(
                        request_id=sample.request.request_id,
                        token_ids=tuple(sample.request.token_ids),
                        num_prompt_tokens=sample.request.num_prompt_tokens,
                        params=group.params,
                        seed=sample.seed,
                        sample_index=sample.index,
                        count=count,
                    )
                )
    return contexts


def answer_step(
    model: LoadedModel, groups: Mapping[str, tuple[Group, Sample]], result: StepResult, proposals: Proposals
) -> tuple[dict[str, Answer], dict[str, Lfm2npError]]:
    """Tokens for every sample whose last row was computed; one that fails gets an error instead.

    Outputs, texts and prompt log-probabilities go on here; the scheduler's counters follow in update().
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


def decide(
    model: LoadedModel, group: Group, sample: Sample, entry: ScheduledTokens, rows: NDArray[Any], draft: Draft
) -> Answer:
    """The tokens of one sample: accepted drafts, then one token more, unless a token ends the request.

    rows  [rows, V], the last one of the entry's last token
    The sample's output and text go on. Lfm2npError if a token can't be chosen.
    """
    request, params = sample.request, group.params
    eos = tuple(sorted(model.config.eos_token_ids))
    output, text, drawn = sample.token_ids, sample.text, []
    accepted = 0
    for index, row in enumerate(rows[-1 - entry.num_drafts :]):
        guess = None
        if draft.weights is not None and index < len(draft.token_ids):
            guess = Guess(draft.token_ids[index], draft.weights[index])
        token = next_token(row, params, request.prompt_token_ids, output, eos, sample.seed, sample.index, guess)
        output.append(token)
        count = params.logprobs
        logprobs = None if count is None else token_logprobs(model.numerics, row, token, count)
        drawn.append(Drawn(token, request.num_tokens - 1 + index, row, logprobs))
        ending = request.reason_to_end(token, len(output))
        text.push(token, len(output) > params.min_tokens, ending)
        holds = index < entry.num_drafts and token == entry.drafts[index]
        accepted += holds
        if not holds or ending is not None or text.stopped_by is not None:
            break
    return Answer(tuple(drawn), entry.num_drafts, accepted)


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
