"""Each request alone, through reference.py: what every batched run has to equal, token for token and bit for bit.

Under `exact` the reference computes in integers, which share nothing with it, as far as the work allows:
LoadedModel.truth_of says how far.

`alone` computes the whole sequence anew for each token; of the engine it has the sampler and the sequence, not the
scheduler, the cache and the step. `answer_alone` reports a whole request so, in the engine's words.
`first_difference` compares a recorded run with the reference in one pass over prompt and output: by causality row t
of that pass is what `alone` computes for token t + 1, as long as the tokens before agree, and they are compared too.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.drafters import Draft, DraftContext, Drafter
from lfm2np.engine.engine import OnLogits
from lfm2np.engine.outputs import RequestOutput, RunMetrics
from lfm2np.engine.sampler import Chosen, decide
from lfm2np.engine.sampling.choice import choose
from lfm2np.engine.sampling.logprobs import TokenLogprobs, token_logprobs
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.sequence import Sequence, make_sequences, request_output
from lfm2np.errors import Lfm2npError, told
from lfm2np.truth import reference
from lfm2np.values import Progress
from scheduler import FinishReason, Status


def alone(
    model: LoadedModel, sample: Sequence, drafter: Drafter | None = None, progress: Progress | None = None
) -> Iterator[Chosen]:
    """Yields each token of one sample, which it brings forward, until that is finished.

    A drafter matters only if it draws its guesses: it is then asked for one at each position. `progress(done, total)`
    counts the layers of each token's pass.
    """
    truth = model.truth_of(tokens_of_passes(sample.num_prompt_tokens, sample.max_tokens))
    while not sample.is_finished:
        states = reference.hidden_states(truth.weights, model.config, truth.numerics, sample.token_ids, progress)
        logits = reference.output_logits(truth.weights, truth.numerics, states[-1:])  # [1, V]
        (chosen,) = decide(model, sample, (), logits, _guess(drafter, sample), RunMetrics())
        sample.append(chosen.token_id)
        if sample.stop_string is not None:
            sample.finish_reason = FinishReason.STOP
        sample.note_stop(chosen.token_id, model.config.eos_token_ids)
        sample.status = sample.status if sample.finish_reason is None else Status.FINISHED
        yield chosen


def tokens_of_passes(prompt: int, most: int) -> int:
    """Of all the passes of a request that generates `most` tokens, each of which begins anew."""
    return prompt * most + most * (most - 1) // 2


def answer_alone(
    model: LoadedModel,
    request_id: str,
    prompt_ids: abc.Sequence[int],
    params: SamplingParams,
    engine_seed: int,
    drafter: Drafter | None = None,
    on_logits: OnLogits | None = None,
    progress: Progress | None = None,
) -> Iterator[RequestOutput]:
    """A request as an engine of that seed reports it, after each token; one sample after the other, no metrics.

    A sample whose numbers overflow ends with that error. RequestError for a request that the model can't meet.
    """
    samples = make_sequences(model, request_id, prompt_ids, params, 0, "", engine_seed, 0.0)
    for sample in samples:
        try:
            if params.prompt_logprobs is not None and sample is samples[0]:
                sample.prompt_logprobs = _prompt_logprobs(model, prompt_ids, params.prompt_logprobs)
            for chosen in alone(model, sample, drafter, progress):
                if on_logits:
                    on_logits(sample.request_id, chosen.position, chosen.row, chosen.token_id)
                yield replace(request_output(samples), metrics=None)
        except Lfm2npError as error:
            sample.error, sample.finish_reason, sample.status = told(error), FinishReason.ERROR, Status.FINISHED
            yield replace(request_output(samples), metrics=None)


def _prompt_logprobs(model: LoadedModel, prompt_ids: abc.Sequence[int], count: int) -> list[TokenLogprobs | None]:
    """Row p of the logits predicts prompt token p + 1; the first has no prediction."""
    truth = model.truth_of(len(prompt_ids))
    rows = reference.logits(truth.weights, truth.config, truth.numerics, prompt_ids)
    pairs = zip(rows, prompt_ids[1:], strict=False)
    return [None, *(token_logprobs(model.numerics, row, token_id, count) for row, token_id in pairs)]


def _guess(drafter: Drafter | None, sample: Sequence) -> Draft:
    """A guess that decides the next token, if they are drawn."""
    if drafter is None or not drafter.is_random:
        return Draft()
    place = (tuple(sample.token_ids), sample.num_prompt_tokens, sample.params, sample.seed, sample.index)
    return drafter.propose([DraftContext("0", *place, 0)])[0]


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
        detail = f"logit of token {place} is {row[place]!s}, alone it is {truth[place]!s}"
        return Difference(position, "logits", detail)
    if token != expected:
        return Difference(position, "token", f"{token}, alone it is {expected}")
    return None


def first_difference(
    model: LoadedModel,
    prompt_ids: abc.Sequence[int],
    params: SamplingParams,
    seed: int,
    sample_index: int,
    token_ids: abc.Sequence[int],
    rows: abc.Sequence[NDArray[Any]],
) -> Difference | None:
    """None if tokens and logits [len(token_ids), V] of one sample equal the reference's."""
    if not token_ids:
        return None
    eos = tuple(sorted(model.config.eos_token_ids))
    sequence = [*prompt_ids, *token_ids[:-1]]
    alone = model.truth_of(len(sequence))
    states = reference.hidden_states(alone.weights, alone.config, alone.numerics, sequence)
    logits = reference.output_logits(alone.weights, alone.numerics, states[len(prompt_ids) - 1 :])
    for position, (token, row) in enumerate(zip(token_ids, rows, strict=True)):
        output = token_ids[:position]
        expected = choose(logits[position], params, prompt_ids, output, eos, seed, sample_index)
        difference = difference_at(position, token, row, expected, logits[position])
        if difference:
            return difference
    return None
