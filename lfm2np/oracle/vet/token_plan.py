"""Before anything is asked: how many tokens it takes to tell each pair of hypotheses apart, and what that costs.

The claimed checkpoint answers a few questions of each kind itself, as it is claimed to be sampled. At every position of
these answers the distributions of all hypotheses are compared over the whole vocabulary: what a token adds to the
gambler's capital (betting.py), on the average, if one of them is true, against each other. The questions that are then
asked are of the kinds on which the pair that is hardest to tell apart differs most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine import ragged
from lfm2np.engine.engine import Engine
from lfm2np.engine.sampling import choice
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.engine.work.place import MAX_NUM_BATCHED_TOKENS, cut
from lfm2np.errors import NumericsError, RequestError
from lfm2np.oracle.judging.noise import DRAWS, noise_of
from lfm2np.oracle.judging.truth import Spoken, Truth, spoken_truths
from lfm2np.oracle.judging.views import processed
from lfm2np.oracle.vet.betting import ALIGNED, factors_of
from lfm2np.oracle.vet.hypotheses import Candidate, Hypotheses
from lfm2np.oracle.vet.likelihoods import RAW, Scorer, cells_of, rounding_scales, tolerance_of
from lfm2np.oracle.vet.questions import Question
from lfm2np.oracle.vet.reported import RIGHT, expected_gain
from lfm2np.truth import reference
from lfm2np.values import Progress

Float64 = NDArray[np.float64]
Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]  # prompts and answers
EXCLUDED = -700.0  # nats, of a token that filters exclude
LEAST_GROWTH = 1e-9  # nats a token: less is a rounding of the sums
MOST_SPREAD = 1.0  # nats: a format with larger errors says nothing


@dataclass(frozen=True, eq=False)
class Plan:
    """H hypotheses. Rows: what is true; columns: what is to be rejected.

    kl        [H, H] mean divergence a token, nats; infinite where filters exclude what the truth may say
    tokens    [H, H] expected until rejected, by tokens alone; infinite: closer than rounding errors
    reported  [H, H] the same with reported log-probabilities
    kinds     of questions to ask, the most telling first
    spreads   tau of each candidate's logits in its format, nats
    entropy   of the claim's tokens, nats
    """

    kl: Float64
    tokens: Float64
    reported: Float64
    kinds: tuple[str, ...]
    spreads: tuple[float, ...]
    entropy: float
    num_answers: int
    num_tokens: int
    prompt_tokens: float  # of a question, on the average
    answer_tokens: float

    def needed(self, hypotheses: Hypotheses, number: int, with_reported: bool) -> float:
        """Tokens until all but a hypothesis and those like it are rejected, if it is true.

        Decisions come at ends of answers: half of one more, in whole answers.
        """
        table = self.reported if with_reported else self.tokens
        most = max((float(table[number, other]) for other in hypotheses.rivals(number)), default=0.0)
        length = max(1.0, self.answer_tokens)
        return most if math.isinf(most) else math.ceil(most / length + 0.5) * length


def planned(
    hypotheses: Hypotheses,
    questions: Sequence[Question],
    max_tokens: int,
    alpha: float,
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """`progress(done, total)` counts answers. RequestError if the claim answers nothing."""
    scorer = Scorer(hypotheses)
    claim, sampling = hypotheses.claim.model, hypotheses.samplings[0]
    prompts = [scorer.prompts(question) for question in questions]
    answers = sampled(claim, [ids[0] for ids in prompts], sampling, max_tokens, seed)
    asked = [question for question, answer in zip(questions, answers, strict=True) if answer]
    if not asked:
        raise RequestError("the claimed checkpoint gives empty answers to all questions of the plan")
    by_pair = [
        [(ids[place], answer) for ids, answer in zip(prompts, answers, strict=True) if answer]
        for place in range(len(scorer.pairs))
    ]
    spreads = tuple(spread_of(candidate, by_pair[0]) for candidate in hypotheses.candidates)
    states = [
        states_of(scorer.networks[number], sequences)
        for (number, _), sequences in zip(scorer.pairs, by_pair, strict=True)
    ]
    tables: list[list[Float64]] = []
    for index in range(len(asked)):
        of_answer = [(part[index], *sequences[index]) for part, sequences in zip(states, by_pair, strict=True)]
        tables.append(compared(hypotheses, scorer, of_answer, spreads))
        if progress:
            progress(index + 1, len(asked))
    ranked, others = halves(asked)
    telling = kinds_of(hypotheses, [asked[index] for index in ranked], [tables[index] for index in ranked])
    chosen = [index for index in others if asked[index].kind in telling]
    kl, factors, squares, within, entropy = (
        np.concatenate([tables[index][part] for index in chosen], axis=-1) for part in range(5)
    )
    growth = growth_of(hypotheses, factors, squares, within, spreads)
    gain = reported_gain(hypotheses, scorer, [[sequences[index] for index in chosen] for sequences in by_pair])
    pairs = [scorer.pairs.index(each.pair) for each in hypotheses.each]
    nats = -math.log(alpha) + math.log(2.0 * max(1, len(growth) - 1))  # that a bet has to win: its stake is a share
    return Plan(
        kl.mean(axis=-1),
        tokens_for(nats, growth),
        tokens_for(nats + math.log(2.0 * len(RIGHT)), growth + gain[np.ix_(pairs, pairs)]),
        telling,
        spreads,
        float(entropy.mean()),
        len(chosen),
        kl.shape[-1],
        float(np.mean([len(ids[0]) for ids in prompts])),
        float(np.mean([len(answer) for answer in answers])),
    )


def sampled(
    model: LoadedModel, prompts: Sequence[Sequence[int]], sampling: SamplingParams, max_tokens: int, seed: int
) -> list[list[int]]:
    """The claim's answers, the end token included."""
    room = [min(len(ids) + max_tokens, model.config.max_position_embeddings) for ids in prompts]
    engine = Engine(model, room_for=room)
    for number, ids in enumerate(prompts):
        params = replace(sampling, max_tokens=max(1, room[number] - len(ids)), seed=seed + number)
        engine.add_request(str(number), ids, params)
    ended = {output.request_id: output.outputs[0] for output in engine.stream() if output.finished}
    samples = [ended[str(number)] for number in range(len(prompts))]
    for sample in samples:
        if sample.error:
            raise NumericsError(f"{model.path}: {sample.error}")
    return [list(sample.token_ids) for sample in samples]


def compared(
    hypotheses: Hypotheses,
    scorer: Scorer,
    of_answer: Sequence[tuple[NDArray[Any], Sequence[int], Sequence[int]]],
    spreads: Sequence[float],
) -> list[Float64]:
    """At each of R positions: divergences [H, H, R], expected factors and their squares [H, H, R], sum p^2 and the
    entropy [H, R].

    of_answer  by pair the hidden states [R, D], the prompt and the answer
    """
    logits = []
    for (number, _), (states, _, _) in zip(scorer.pairs, of_answer, strict=True):
        network = scorer.networks[number]
        logits.append(reference.output_logits(network.weights, network.numerics, states))
    logprobs, upper = [], []
    for each in hypotheses.each:
        pair = scorer.pairs.index(each.pair)
        _, prompt, answer = of_answer[pair]
        sampling, tolerance = hypotheses.samplings[each.sampling], tolerance_of(spreads[each.candidate])
        exact, most = distribution(logits[pair], sampling, [*prompt, *answer], len(prompt), tolerance)
        logprobs.append(exact)
        upper.append(most)
    count, rows = len(logprobs), len(logits[0])
    kl, factors, squares = np.zeros((3, count, count, rows))
    within, entropy = np.zeros((2, count, rows))
    for true, expected in enumerate(logprobs):
        p = np.exp(expected)
        within[true] = (p * p).sum(axis=1)
        entropy[true] = -(p * np.where(p > 0, expected, 0.0)).sum(axis=1)
        for other in range(count):
            if other != true:
                gain = factors_of(expected, upper[other])
                kl[true, other] = np.where(p > 0, p * (expected - upper[other]), 0.0).sum(axis=1)
                factors[true, other], squares[true, other] = (p * gain).sum(axis=1), (p * gain**2).sum(axis=1)
    return [kl, factors, squares, within, entropy]


def states_of(model: LoadedModel, sequences: Sequences) -> list[NDArray[Any]]:
    """[R, D] of each answer: the hidden states that predict its tokens."""
    states: list[NDArray[Any]] = []
    fed = [[*ids, *answer[:-1]] for ids, answer in sequences]
    for run in cut(range(len(fed)), [len(ids) for ids in fed], MAX_NUM_BATCHED_TOKENS):
        rows, parts = ragged.hidden_states(model.weights, model.config, model.numerics, [fed[index] for index in run])
        for index, part in zip(run, parts, strict=True):
            if part.error:
                raise part.error
            states.append(rows[part.rows][len(sequences[index][0]) - 1 :])
    return states


def distribution(
    logits: NDArray[Any], sampling: SamplingParams, ids: Sequence[int], start: int, tolerance: float
) -> tuple[Float64, Float64]:
    """[R, V] log-probabilities that tokens are drawn by, EXCLUDED where filters exclude one; and the most that a right
    engine may give them, whose logits are off by a tolerance.
    """
    rows = processed(logits, sampling, ids, range(start, start + len(logits)), start)
    plain = SamplingParams(top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
    if plain == RAW:
        exact = normalised(rows)
        return exact, exact
    slack = tolerance / sampling.temperature
    loose = replace(
        plain, top_p=min(1.0, sampling.top_p + slack), min_p=sampling.min_p * math.exp(-math.sqrt(2.0) * slack)
    )
    kept, most = (np.stack([choice.filtered(row, view)[0] for row in rows]) for view in (plain, loose))
    kept, most = np.maximum(kept, EXCLUDED), np.maximum(most, EXCLUDED)
    return normalised(kept), np.where(most > EXCLUDED, most - np.log(np.exp(kept).sum(axis=1, keepdims=True)), EXCLUDED)


def normalised(rows: Float64) -> Float64:
    return np.asarray(rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)))


def truths_of_answers(model: LoadedModel, sequences: Sequences) -> list[Truth]:
    """Of the rows that predict the answers."""
    wanted = {
        Spoken((*ids, *answer)): {row: [token] for row, token in enumerate(answer, len(ids) - 1)}
        for ids, answer in sequences
    }
    return spoken_truths(model, wanted)


def spread_of(candidate: Candidate, sequences: Sequences) -> float:
    """The size of the rounding error of a candidate's logits: the root of its mean square where answers stand."""
    try:
        truths = truths_of_answers(candidate.model, sequences)
        noises = noise_of(candidate.model, truths, candidate.base_format, DRAWS[:4])
    except NumericsError:
        return MOST_SPREAD
    spreads = [noise.spread[truth.stored] for truth, noise in zip(truths, noises, strict=True)]
    return min(MOST_SPREAD, float(np.sqrt(np.mean(np.concatenate(spreads) ** 2))))


def halves(questions: Sequence[Question]) -> tuple[list[int], list[int]]:
    """Of each kind every second one, and the others: those that choose kinds would make them seem better than they are.
    A kind with one question is in both.
    """
    by_kind: dict[str, list[int]] = {}
    for index, question in enumerate(questions):
        by_kind.setdefault(question.kind, []).append(index)
    first = sorted(index for kind in by_kind.values() for index in kind[::2])
    return first, sorted(index for kind in by_kind.values() for index in kind[1::2] or kind)


def kinds_of(
    hypotheses: Hypotheses, questions: Sequence[Question], tables: Sequence[Sequence[Float64]]
) -> tuple[str, ...]:
    """Half of the kinds: those on which the pair differs most that differs least on the whole."""
    by_kind: dict[str, list[Float64]] = {}
    for question, table in zip(questions, tables, strict=True):
        by_kind.setdefault(question.kind, []).append(table[1])
    pairs = [(true, other) for true in range(len(hypotheses.each)) for other in hypotheses.rivals(true)]
    means = {kind: np.concatenate(parts, axis=-1).mean(axis=-1) for kind, parts in by_kind.items()}
    if not pairs:
        return tuple(by_kind)
    whole = np.mean(list(means.values()), axis=0)
    hardest = min(pairs, key=lambda pair: float(whole[pair]))
    ranked = sorted(means, key=lambda kind: -float(means[kind][hardest]))
    return tuple(ranked[: max(1, (len(ranked) + 1) // 2)])


def growth_of(
    hypotheses: Hypotheses, factors: Float64, squares: Float64, within: Float64, spreads: Sequence[float]
) -> Float64:
    """[H, H] what a token adds to the capital; 0 where rounding explains as much."""
    count = len(factors)
    growth = np.zeros((count, count))
    for true in range(count):
        for other in range(count):
            tau = spreads[hypotheses.each[other].candidate] / hypotheses.temperature(other)
            outside = float(np.mean(1.0 - within[other]))
            price = ALIGNED * tau * math.sqrt(outside * float(squares[true, other].mean()))
            growth[true, other] = max(0.0, float(factors[true, other].mean()) - price)
    return growth


def tokens_for(nats: float, growth: Float64) -> Float64:
    """Until the capital has grown by so much; infinite where it does not grow."""
    return np.where(growth > LEAST_GROWTH, nats / np.maximum(growth, LEAST_GROWTH), np.inf)


def reported_gain(hypotheses: Hypotheses, scorer: Scorer, by_pair: Sequence[Sequences]) -> Float64:
    """[P, P] what one reported log-probability adds, on the average, if the first pair is true, against the second."""
    raw, scales = [], []
    for (number, _), sequences in zip(scorer.pairs, by_pair, strict=True):
        truths = truths_of_answers(scorer.networks[number], sequences)
        starts = [len(ids) for ids, _ in sequences]
        raw.append(np.concatenate([t.logprobs[cells_of(t, start)] for t, start in zip(truths, starts, strict=True)]))
        try:
            scales.append(np.concatenate(rounding_scales(hypotheses.candidates[number], truths, starts)))
        except NumericsError:
            scales.append(np.full(len(raw[-1]), np.inf))
    count = len(scorer.pairs)
    gain = np.zeros((count, count))
    for true in range(count):
        for other in range(count):
            if true != other:
                gain[true, other] = float(expected_gain((raw[true] - raw[other]) / scales[other]).mean())
    return gain
