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

from lfm2np import reference
from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.engine import Engine
from lfm2np.errors import NumericsError, RequestError
from lfm2np.network import ragged
from lfm2np.oracle.judging.noise import DRAWS, noise_of
from lfm2np.oracle.judging.truth import Spoken, spoken_truths
from lfm2np.oracle.judging.views import processed
from lfm2np.oracle.vet.betting import ALIGNED, factors_of
from lfm2np.oracle.vet.hypotheses import Hypotheses
from lfm2np.oracle.vet.likelihoods import RAW, Scorer, rounding_scales, tolerance_of
from lfm2np.oracle.vet.questions import Question
from lfm2np.oracle.vet.reported import RIGHT, expected_gain
from lfm2np.progress import Progress
from lfm2np.sampling import choice
from lfm2np.sampling.params import SamplingParams
from lfm2np.work.place import MAX_NUM_BATCHED_TOKENS, cut

Float64 = NDArray[np.float64]
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
        others = [other for other in range(len(table)) if not hypotheses.is_alike(number, other)]
        most, length = max((float(table[number, other]) for other in others), default=0.0), max(1.0, self.answer_tokens)
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
    standing = scorer.pairs.index((0, 0))
    answers = sampled(claim, [ids[standing] for ids in prompts], sampling, max_tokens, seed)
    sequences = [(ids[standing], answer) for ids, answer in zip(prompts, answers, strict=True) if answer]
    if not sequences:
        raise RequestError("the claimed checkpoint gives empty answers to all questions of the plan")
    spreads = tuple(spread_of(candidate, sequences) for candidate in hypotheses.candidates)
    states = [
        states_of(scorer.networks[number], [ids[place] for ids in prompts], answers)
        for place, (number, _) in enumerate(scorer.pairs)
    ]
    tables: list[list[Float64]] = []
    for done, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
        if answer:
            tables.append(compared(hypotheses, scorer, [of_pair[done] for of_pair in states], ids, answer, spreads))
        if progress:
            progress(done + 1, len(prompts))
    asked = [question for question, answer in zip(questions, answers, strict=True) if answer]
    ranked, others = halves(asked)
    telling = kinds_of(hypotheses, [asked[index] for index in ranked], [tables[index] for index in ranked])
    chosen = [index for index in others if asked[index].kind in telling]
    kl, factors, squares, within, entropy = (
        np.concatenate([tables[index][part] for index in chosen], axis=-1) for part in range(5)
    )
    tokens, growth = expected_tokens(hypotheses, factors, squares, within, spreads, alpha)
    answered = prompts_of(prompts, answers)
    gain = reported_gain(
        hypotheses, scorer, [sequences[index] for index in chosen], [answered[index] for index in chosen]
    )
    lengths = [len(answer) for answer in answers]
    return Plan(
        kl.mean(axis=-1),
        tokens,
        with_reported(hypotheses, growth, gain, alpha),
        telling,
        spreads,
        float(entropy.mean()),
        len(chosen),
        kl.shape[-1],
        float(np.mean([len(ids[standing]) for ids in prompts])),
        float(np.mean(lengths)),
    )


def prompts_of(prompts: Sequence[Any], answers: Sequence[Sequence[int]]) -> list[Any]:
    return [ids for ids, answer in zip(prompts, answers, strict=True) if answer]


def sampled(
    model: LoadedModel, prompts: Sequence[Sequence[int]], sampling: SamplingParams, max_tokens: int, seed: int
) -> list[list[int]]:
    """The claim's answers, the end token included."""
    room = [min(len(ids) + max_tokens, model.config.max_position_embeddings) for ids in prompts]
    engine = Engine(model, room_for=room)
    fields = {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}
    for number, ids in enumerate(prompts):
        params = SamplingParams(**{**fields, "max_tokens": max(1, room[number] - len(ids)), "seed": seed + number})
        engine.add_request(str(number), ids, params)
    ended = {output.request_id: output.outputs[0] for output in engine.stream() if output.finished}
    errors = [ended[str(number)].error for number in range(len(prompts)) if ended[str(number)].error]
    if errors:
        raise NumericsError(f"{model.path}: {errors[0]}")
    return [list(ended[str(number)].token_ids) for number in range(len(prompts))]


def compared(
    hypotheses: Hypotheses,
    scorer: Scorer,
    states: Sequence[NDArray[Any]],
    prompts: Sequence[Sequence[int]],
    answer: Sequence[int],
    spreads: Sequence[float],
) -> list[Float64]:
    """At each of R positions: divergences [H, H, R], expected factors and their squares [H, H, R], sum p^2 and the
    entropy [H, R].
    """
    logits = []
    for (number, _), of_answer in zip(scorer.pairs, states, strict=True):
        network = scorer.networks[number]
        logits.append(reference.output_logits(network.weights, network.numerics, of_answer))
    logprobs, upper = [], []
    for each in hypotheses.each:
        pair = scorer.pairs.index((each.candidate, each.rendering))
        ids, tolerance = [*prompts[pair], *answer], tolerance_of(spreads[each.candidate])
        sampling, start = hypotheses.samplings[each.sampling], len(prompts[pair])
        exact, most = distribution(logits[pair], sampling, ids, start, tolerance)
        logprobs.append(exact)
        upper.append(most)
    count, rows = len(logprobs), len(answer)
    kl, factors, squares = (
        np.zeros((count, count, rows)),
        np.zeros((count, count, rows)),
        np.zeros((count, count, rows)),
    )
    within, entropy = np.zeros((count, rows)), np.zeros((count, rows))
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


def states_of(
    model: LoadedModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[NDArray[Any]]:
    """[R, D] of each answer: the hidden states that predict its tokens."""
    states: list[NDArray[Any]] = []
    sequences = [[*ids, *answer[:-1]] for ids, answer in zip(prompts, answers, strict=True)]
    for run in cut(range(len(sequences)), [len(ids) for ids in sequences], MAX_NUM_BATCHED_TOKENS):
        rows, parts = ragged.hidden_states(
            model.weights, model.config, model.numerics, [sequences[index] for index in run]
        )
        for index, part in zip(run, parts, strict=True):
            if part.error:
                raise part.error
            states.append(rows[part.rows][len(prompts[index]) - 1 :])
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


def spread_of(candidate: Any, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
    """The size of the rounding error of a candidate's logits: the root of its mean square where answers stand."""
    wanted = {
        Spoken((*ids, *answer)): {
            row: [answer[row - len(ids) + 1]] for row in range(len(ids) - 1, len(ids) + len(answer) - 1)
        }
        for ids, answer in sequences
    }
    try:
        truths = spoken_truths(candidate.model, wanted)
        noises = noise_of(candidate.model, truths, candidate.format_name.partition(" kv:")[0], DRAWS[:4])
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
    pairs = [
        (true, other)
        for true in range(len(hypotheses.each))
        for other in range(len(hypotheses.each))
        if not hypotheses.is_alike(true, other)
    ]
    means = {kind: np.concatenate(parts, axis=-1).mean(axis=-1) for kind, parts in by_kind.items()}
    if not pairs:
        return tuple(by_kind)
    whole = np.mean(list(means.values()), axis=0)
    hardest = min(pairs, key=lambda pair: float(whole[pair]))
    ranked = sorted(means, key=lambda kind: -float(means[kind][hardest]))
    return tuple(ranked[: max(1, (len(ranked) + 1) // 2)])


def expected_tokens(
    hypotheses: Hypotheses,
    factors: Float64,
    squares: Float64,
    within: Float64,
    spreads: Sequence[float],
    alpha: float,
) -> tuple[Float64, Float64]:
    """[H, H] until rejected, and what a token adds to the capital; infinite and 0 where rounding explains as much."""
    count = len(factors)
    growth, tokens = np.zeros((count, count)), np.full((count, count), np.inf)
    for true in range(count):
        for other in range(count):
            each = hypotheses.each[other]
            tau = spreads[each.candidate] / hypotheses.samplings[each.sampling].temperature
            inside = within[other]
            price = ALIGNED * tau * math.sqrt(float(np.mean(1.0 - inside)) * float(squares[true, other].mean()))
            growth[true, other] = max(0.0, float(factors[true, other].mean()) - price)
            if growth[true, other] > LEAST_GROWTH:
                tokens[true, other] = threshold(count, alpha) / growth[true, other]
    return tokens, growth


def threshold(count: int, alpha: float) -> float:
    """Nats that one bet has to win: its share of the stake is small."""
    return -math.log(alpha) + math.log(2.0 * max(1, count - 1))


def reported_gain(
    hypotheses: Hypotheses,
    scorer: Scorer,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    prompts: Sequence[Sequence[Sequence[int]]],
) -> Float64:
    """[P, P] what one reported log-probability adds, on the average, if the first pair is true, against the second."""
    raw, scales = [], []
    for place, (number, _) in enumerate(scorer.pairs):
        wanted = {}
        for ids, (_, answer) in zip(prompts, sequences, strict=True):
            rows = range(len(ids[place]) - 1, len(ids[place]) + len(answer) - 1)
            wanted[Spoken((*ids[place], *answer))] = {row: [answer[row - len(ids[place]) + 1]] for row in rows}
        truths = spoken_truths(scorer.networks[number], wanted)
        starts = [len(ids[place]) for ids in prompts]
        try:
            scales.append(np.concatenate(rounding_scales(hypotheses.candidates[number], truths, starts)))
        except NumericsError:
            scales.append(np.full(sum(len(answer) for _, answer in sequences), np.inf))
        raw.append(
            np.concatenate(
                [
                    [
                        truth.logprobs[row - truth.first, truth.at(row, truth.token_ids[row + 1])]
                        for row in range(start - 1, len(truth.token_ids) - 1)
                    ]
                    for truth, start in zip(truths, starts, strict=True)
                ]
            )
        )
    count = len(scorer.pairs)
    gain = np.zeros((count, count))
    for true in range(count):
        for other in range(count):
            if true != other:
                gain[true, other] = float(expected_gain((raw[true] - raw[other]) / scales[other]).mean())
    return gain


def with_reported(hypotheses: Hypotheses, growth: Float64, gain: Float64, alpha: float) -> Float64:
    """[H, H] tokens until rejected where each token's log-probability is reported."""
    pairs = sorted({(each.candidate, each.rendering) for each in hypotheses.each})
    at = [pairs.index((each.candidate, each.rendering)) for each in hypotheses.each]
    total = growth + gain[np.ix_(at, at)]
    needed = threshold(len(growth), alpha) + math.log(2.0 * len(RIGHT))
    with np.errstate(divide="ignore"):
        return np.where(total > LEAST_GROWTH, needed / total, np.inf)
