"""Checks of one request's answer by the definitions of plain.py, whatever noise an engine draws its tokens with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle.engines.protocol import Factory
from lfm2np.oracle.engines.records import Request
from lfm2np.suite import plain
from lfm2np.suite.draining import Violation
from lfm2np.suite.properties.driver import generate, make, reference_logits, require_truth, samples
from lfm2np.suite.properties.endings import require_ending
from lfm2np.suite.properties.rounding import format_of, require_scores
from lfm2np.suite.strategies.scenarios import Scenario
from lfm2np.suite.strategies.talks import trained, trained_model
from lfm2np.suite.strategies.tiny_models import AnyModel, TinyModel, checkpoint, loaded

DRAWS = 400  # of one token
FALSE_ALARM = 1e-9  # the most that the probability of a right engine's failure is, in each comparison of counts
TOLERANCE = 1e-4  # of the largest logit: float32 activations against float64, where a wrong formula is off by tenths
LEAST_MARGIN = 1e-4  # of an expert's score, between 0 and 1


def ends_where_it_must(factory: Factory, scenario: Scenario) -> None:
    """Number of tokens, finish reason, stop reason and text of each answer, by the tokens that the engine drew."""
    for sample in samples(scenario, generate(factory, scenario)):
        require_ending(scenario.model, sample.where, sample.request, sample.answer)


def follows_its_processors(factory: Factory, scenario: Scenario) -> None:
    """Each greedy token is the largest logit of the reference after penalties, biases and masks."""
    eos = tuple(sorted(loaded(scenario.model).config.eos_token_ids))
    for sample in samples(scenario, generate(factory, scenario)):
        prompt, ids = sample.request.prompt_token_ids, sample.answer.ids
        rows = reference_logits(scenario.model, (*prompt, *ids[:-1]))[len(prompt) - 1 :]
        for position, (token, row) in enumerate(zip(ids, rows.tolist(), strict=True)):
            expected = plain.probabilities(row, sample.request.params, prompt, ids[:position], eos).index(1.0)
            if token != expected:
                raise Violation(f"{sample.where}, output token {position}: {token}, by definition {expected}")


def draws_the_distribution(factory: Factory, scenario: Scenario) -> None:
    """One token of the first request, drawn under many seeds: each comes as often as its probability says."""
    request = scenario.requests[0]
    params = replace(request.params, n=1, max_tokens=1, min_tokens=min(1, request.params.min_tokens))
    many = [replace(request, request_id=str(seed), params=replace(params, seed=seed)) for seed in range(DRAWS)]
    outcome = generate(factory, scenario, many)
    counts = Counter(answer.ids[0] for (answer,) in outcome.completions.values())
    row = reference_logits(scenario.model, request.prompt_token_ids)[-1].tolist()
    eos = tuple(sorted(loaded(scenario.model).config.eos_token_ids))
    expected = plain.probabilities(row, params, request.prompt_token_ids, (), eos)
    for token, probability in enumerate(expected):
        if DRAWS * divergence(counts[token] / DRAWS, probability) > math.log(2 / FALSE_ALARM):
            raise Violation(f"token {token}: drawn {counts[token]} of {DRAWS} times, its probability is {probability}")


def divergence(share: float, probability: float) -> float:
    """Kullback and Leibler's, of one event. n draws have such a share or one further off with at most
    2 exp(-n * divergence), by Chernoff's bound."""
    total = 0.0
    for a, b in ((share, probability), (1 - share, 1 - probability)):
        if a > 0.0:
            total += a * math.log(a / b) if b > 0.0 else math.inf
    return total


def has_raw_logprobs(factory: Factory, scenario: Scenario) -> None:
    """The log-probabilities of prompt and output are those before temperature, penalties, biases and filters."""
    for sample in samples(scenario, generate(factory, scenario)):
        answer, ids = sample.answer, (*sample.request.prompt_token_ids, *sample.answer.ids)
        if answer.logprobs is None or answer.prompt_logprobs is None:
            raise Violation(f"{sample.where}: no log-probabilities, which it was asked for")
        require_logprobs(factory, scenario.model, ids, (*answer.prompt_logprobs, *answer.logprobs))


def scores_lfm2(factory: Factory, example: tuple[TinyModel, tuple[int, ...]]) -> None:
    model, ids = example
    require_logprobs(factory, model, ids, make(factory, model, {}).score(ids))


def generates_lfm2(factory: Factory, example: tuple[TinyModel, tuple[int, ...]]) -> None:
    """What an engine generates comes by another way through its code than what it scores."""
    model, ids = example
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    scenario = Scenario(model, (Request("a", ids, params),))
    outcome = generate(factory, scenario)
    if format_of(factory) is not None:
        require_truth(factory, scenario, outcome)
        return
    (answer,) = outcome.completions["a"]
    if len(answer.ids) != 1:
        raise Violation(f"{len(answer.ids)} tokens, expected one")
    rows, tolerance = plain_logits(model, ids)
    token = answer.ids[0]
    for last in rows[len(ids) - 1 :]:
        if not last[token] >= max(last) - 2 * tolerance:
            raise Violation(f"token {token}: its logit is {max(last) - last[token]:.6f} below the largest of LFM2")
    if answer.prompt_logprobs is not None and len(answer.prompt_logprobs) != len(ids) - 1:
        raise Violation(f"{len(answer.prompt_logprobs)} prompt log-probabilities of {len(ids) - 1}")
    require_near(rows, tolerance, (*ids, token), answer.prompt_logprobs or ())
    require_near(rows, tolerance, (*ids, token), answer.logprobs or (), first=len(ids))


def require_logprobs(factory: Factory, model: AnyModel, ids: tuple[int, ...], scores: Sequence[float]) -> None:
    """Violation unless these are the log-probabilities of all tokens but the first."""
    if len(scores) != len(ids) - 1:
        raise Violation(f"{len(scores)} log-probabilities for {len(ids)} tokens, expected one each but the first")
    number_format = format_of(factory)
    if number_format is not None:
        require_scores(number_format, model, ids, scores)
    else:
        require_near(*plain_logits(model, ids), ids, scores)


def plain_logits(model: AnyModel, ids: Sequence[int]) -> tuple[list[list[float]], float]:
    """Logits [T][V] by plain.py, and how far a log-probability may be off them.

    Rows end before the first where float32 may choose another expert: which that is, the other properties demand.
    """
    rows, margins = plain.logits_and_margins(*plain.read_checkpoint(checkpoint(model)), ids)
    certain = next((row for row, margin in enumerate(margins) if margin < LEAST_MARGIN), len(rows))
    return rows[:certain], TOLERANCE * max(1.0, max(abs(value) for row in rows for value in row))


def require_near(
    rows: list[list[float]], tolerance: float, ids: Sequence[int], scores: Sequence[float], first: int = 1
) -> None:
    """Scores of the tokens from position `first` on, as far as there are rows [T][V] of logits before them."""
    for position, score in enumerate(scores, start=first):
        for row in rows[position - 1 : position]:
            expected = plain.log_softmax(row)[ids[position]]
            if not abs(score - expected) <= tolerance:
                raise Violation(f"token {position + 1}: log-probability {score:.6f}, LFM2 has {expected:.6f}")


def has_one_bos(factory: Factory, text: str) -> None:
    """A prompt and a chat begin with the BOS token, once, and are the reference's tokens."""
    engine, model = make(factory, trained(), {}), trained_model()
    chat = [{"role": "user", "content": text}]
    for prompt, expected in ((text, model.prompt_ids(text)), (chat, model.tokenizer.encode_chat(chat))):
        ids, bos = list(engine.encode(prompt)), model.config.bos_token_id
        if ids[:1] != [bos] or ids.count(bos) != 1:
            raise Violation(f"{prompt!r}: {ids.count(bos)} BOS tokens in {ids}, expected one, at the beginning")
        if ids != list(expected):
            raise Violation(f"{prompt!r}: tokens {ids}, expected {list(expected)}")
