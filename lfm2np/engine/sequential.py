"""Each request alone, through reference.py: what every batched run has to equal, token for token and bit for bit.

Under `exact` the reference computes in integers, which share nothing with it, as far as the work allows:
LoadedModel.truth_of says how far.

`alone` computes the whole sequence anew for each token, with the engine's sampler and no other part of the engine;
`answer_alone` tells a whole request so, in the engine's words.
`first_difference` holds a recorded run against the reference in one pass over prompt and output: by causality row t
of that pass is what `alone` computes for token t + 1, as long as the tokens before agree, and they are compared too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.arithmetic import Numerics
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.acceptance import Guess, next_token
from lfm2np.engine.drafters import DraftContext, Drafter
from lfm2np.engine.engine import OnLogits
from lfm2np.engine.outputs import CompletionOutput, RequestOutput
from lfm2np.engine.sampling.choice import choose, request_seed
from lfm2np.engine.sampling.logprobs import TokenLogprobs, token_logprobs
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.sampling.stop_strings import StopChecker
from lfm2np.engine.sequence import require_possible, sample_name
from lfm2np.errors import Lfm2npError, told
from lfm2np.truth import reference
from lfm2np.values import Progress


@dataclass(frozen=True, eq=False)
class Step:
    """One token, the row [V] that it was chosen from, and why it was the last, if it was."""

    token_id: int
    logits: NDArray[Any]
    text: str  # that may be shown from now on; empty without a tokenizer
    finish_reason: str | None
    stop_reason: int | str | None  # the stop token id or stop string; None for EOS


def alone(
    model: LoadedModel,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    seed: int,
    sample_index: int,
    drafter: Drafter | None = None,
    progress: Progress | None = None,
) -> Iterator[Step]:
    """The tokens of one sample; `seed` as lfm2np.engine.sampling.choice.request_seed gives it.

    A drafter matters only if it draws its guesses: it is then asked for one at each position. `progress(done, total)`
    counts the layers of each token's pass. RequestError for a request that the model can't meet.
    """
    config = model.config
    eos = tuple(sorted(config.eos_token_ids))
    stop_ids = set(params.stop_token_ids) | set(() if params.ignore_eos else eos)
    room = require_possible(model, prompt_ids, params)
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    stream = model.tokenizer.stream() if model.has_tokenizer else None
    stops = StopChecker(params.stop, params.include_stop_str_in_output)
    output: list[int] = []
    reason: str | None = None
    truth = model.truth_of(tokens_of_passes(len(prompt_ids), most))
    while reason is None:
        states = reference.hidden_states(truth.weights, config, truth.numerics, [*prompt_ids, *output], progress)
        row = reference.output_logits(truth.weights, truth.numerics, states[-1:])[0]
        guess = None
        if drafter is not None and drafter.is_random:
            guess = _guess(drafter, prompt_ids, output, params, seed, sample_index)
        token = next_token(row, params, prompt_ids, output, eos, seed, sample_index, guess)
        output.append(token)
        stopped = token in stop_ids and len(output) >= params.min_tokens
        text, stopped_by = "", None
        if stream is not None and not stopped:
            text, stopped_by = stops.push(stream.push(token), len(output) > params.min_tokens)
        if stopped or stopped_by is not None:
            reason = "stop"
        elif len(output) >= most:
            reason = "length"
        if reason is not None and stopped_by is None and stream is not None:
            held, stopped_by = stops.finish(stream.finish())
            text, reason = text + held, reason if stopped_by is None else "stop"
        stop_id = token if stopped and (params.ignore_eos or token not in eos) else None
        yield Step(token, row, text, reason, stop_id if stopped_by is None else stopped_by)


def tokens_of_passes(prompt: int, most: int) -> int:
    """Of all the passes of a request that generates `most` tokens, each of which begins anew."""
    return prompt * most + most * (most - 1) // 2


def answer_alone(
    model: LoadedModel,
    request_id: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    engine_seed: int,
    drafter: Drafter | None = None,
    on_logits: OnLogits | None = None,
    progress: Progress | None = None,
) -> Iterator[RequestOutput]:
    """A request as an engine of that seed tells it, after each token; its samples one after the other, no metrics.

    A sample whose numbers overflow ends with that error. RequestError for a request that the model can't meet.
    """
    require_possible(model, prompt_ids, params)
    seed = request_seed(params, engine_seed, request_id)
    told_prompt: tuple[TokenLogprobs | None, ...] | None = None
    samples: list[CompletionOutput] = []
    for index in range(params.n):
        name = sample_name(request_id, index)
        empty = () if params.logprobs is not None else None
        samples.append(CompletionOutput(index, "" if model.has_tokenizer else None, (), empty, None, None))
        try:
            if params.prompt_logprobs is not None and index == 0:
                told_prompt = _prompt_logprobs(model, prompt_ids, params.prompt_logprobs)
            for step in alone(model, prompt_ids, params, seed, index, drafter, progress):
                if on_logits:
                    position = len(prompt_ids) + len(samples[index].token_ids) - 1
                    on_logits(name, position, step.logits, step.token_id)
                samples[index] = _with_step(samples[index], step, params, model.numerics)
                yield _output(request_id, prompt_ids, told_prompt, samples)
        except Lfm2npError as error:
            samples[index] = replace(samples[index], finish_reason="error", error=told(error))
            yield _output(request_id, prompt_ids, told_prompt, samples)


def _with_step(sample: CompletionOutput, step: Step, params: SamplingParams, numerics: Numerics) -> CompletionOutput:
    """The sample with one token more."""
    logprobs = sample.logprobs
    if logprobs is not None and params.logprobs is not None:
        logprobs = (*logprobs, token_logprobs(numerics, step.logits, step.token_id, params.logprobs))
    return replace(
        sample,
        text=None if sample.text is None else sample.text + step.text,
        token_ids=(*sample.token_ids, step.token_id),
        logprobs=logprobs,
        finish_reason=step.finish_reason,
        stop_reason=step.stop_reason,
    )


def _output(
    request_id: str,
    prompt_ids: Sequence[int],
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None,
    samples: Sequence[CompletionOutput],
) -> RequestOutput:
    finished = all(sample.finish_reason for sample in samples)
    return RequestOutput(request_id, None, tuple(prompt_ids), prompt_logprobs, tuple(samples), finished, None)


def _prompt_logprobs(model: LoadedModel, prompt_ids: Sequence[int], count: int) -> tuple[TokenLogprobs | None, ...]:
    """Row p of the logits predicts prompt token p + 1; the first has no prediction."""
    truth = model.truth_of(len(prompt_ids))
    rows = reference.logits(truth.weights, truth.config, truth.numerics, prompt_ids)
    pairs = zip(rows, prompt_ids[1:], strict=False)
    return (None, *(token_logprobs(model.numerics, row, token_id, count) for row, token_id in pairs))


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
        detail = f"logit of token {place} is {row[place]!s}, alone it is {truth[place]!s}"
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
