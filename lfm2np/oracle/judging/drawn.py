"""Tokens sampled at temperature 1 or another, compared with the exact distribution.

A gambler bets at fair odds that the engine samples in some other way. If it samples correctly, his capital, the product
of what his way gives each token over what the truth gives it, exceeds 1 / error at any time with a probability of at
most `error`. He splits his stake evenly among the ways below.

Source: Ville 1939; Ramdas et al. 2023, Game-theoretic statistics and safe anytime-valid inference, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle.engines.records import Pair
from lfm2np.oracle.judging.scored import Known, spoken, truths_of
from lfm2np.oracle.judging.truth import LIKELY, Truth
from lfm2np.oracle.judging.verdict import LIMIT, Position

ERROR = 1e-6  # the probability that a right engine is called wrong
LEAST = 8  # answers with different seeds, for any judgement
GREEDY = 0.9  # of the stake on the likeliest token; the rest follows the truth
TEMPERATURES = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
AS_IF = "are drawn as if"  # in what is said of tokens that are drawn in another way
Bet = Callable[[Truth, int, int], float]  # of a stored row and a column of a truth: the logarithm of that token's stake


def on_greedy(truth: Truth, row: int, column: int) -> float:
    others = (1.0 - GREEDY) * math.exp(truth.logprobs[row, column])
    return math.log(others + GREEDY * (truth.columns[row, column] == truth.best[row]))


def on_any(truth: Truth, row: int, column: int) -> float:
    return -math.log(truth.vocab_size)


def on_temperature(temperature: float) -> Bet:
    """An upper bound of what that temperature gives the token: for unknown columns the most is assumed."""

    def bet(truth: Truth, row: int, column: int) -> float:
        power = 1.0 / temperature
        return power * float(truth.logprobs[row, column]) - math.log(totals(truth, row, power)[1])

    return bet


def totals(truth: Truth, row: int, power: float) -> tuple[float, float]:
    """Bounds of the sum of all probabilities to this power.

    The tokens that are not among the columns weigh least, and most where it is below 1, if all are alike, and the other
    way if a few are as likely as possible.
    """
    known = truth.logprobs[row]
    count, left = truth.vocab_size - len(known), max(0.0, 1.0 - math.fsum(np.exp(known)))
    bounds = [0.0, 0.0]
    if count:
        few = left * math.exp((power - 1.0) * float(np.sort(known)[-LIKELY]))
        bounds = sorted([count * (left / count) ** power, few])
    total = math.fsum(np.exp(power * known))
    return total + bounds[0], total + bounds[1]


WAYS: Mapping[str, Bet] = {
    "greedily": on_greedy,
    "with each token as likely as any other": on_any,
    **{f"at temperature {temperature:g}": on_temperature(temperature) for temperature in TEMPERATURES},
}


def drawn_wrongly(
    model: LoadedModel, pairs: Sequence[Pair], positions: Sequence[Position], known: Known, error: float = ERROR
) -> tuple[str, str] | None:
    """The id of the request by which it shows, and how the engine seems to sample; None if it may be right.

    Each temperature is a test of its own, and so are samples of the same request: they share `error`.
    """
    sampled = [pair for pair in pairs if pair[0].is_sampled and pair[1].error is None and pair[1].token_ids]
    by_temperature: dict[float, list[Pair]] = {}
    for request, answer in sampled:
        by_temperature.setdefault(request.params.temperature, []).append((request, answer))
    error /= len(by_temperature) + 1
    scales = {(position.request.request_id, position.row): position.scale for position in positions}
    for temperature, some in by_temperature.items():
        if wrong := drawn_at_another(model, temperature, some, scales, known, error):
            return wrong
    return drawn_alike(model, [pair for pair in sampled if pair[0].params.n > 1], scales, known, error)


Scales = Mapping[tuple[str, int], float]  # of log-probabilities, by request and row


def drawn_alike(
    model: LoadedModel, pairs: Sequence[Pair], scales: Scales, known: Known, error: float
) -> tuple[str, str] | None:
    """Whether samples repeat the first one of their request: the stake is on its tokens, until one differs."""
    truths, capital = truths_of(model, pairs, known), 0.0
    first: dict[tuple[object, ...], tuple[int, ...]] = {}
    for request, answer in pairs:
        ids, key = answer.token_ids or (), (request.prompt_token_ids, request.params.seed)
        others = first.setdefault(key, ids)
        if others is ids:
            continue
        truth, start = truths[spoken(request, answer)], len(request.prompt_token_ids) - 1
        for row, (token, other) in enumerate(zip(ids, others, strict=False), start):
            fair = fair_share(
                truth, row - truth.first, truth.at(row, token), 1.0, scales.get((request.request_id, row), 0.0)
            )
            capital += math.log(GREEDY * (token == other) + (1.0 - GREEDY) * math.exp(fair)) - fair
            if token != other:
                break
        if capital > -math.log(error):
            return (
                request.request_id,
                f"the {request.params.n} samples of a request are drawn with the same random numbers",
            )
    return None


def fair_share(truth: Truth, row: int, column: int, temperature: float, scale: float) -> float:
    """An upper bound of the logarithm of a token's probability at a temperature, in any engine of the format."""
    power = 1.0 / temperature
    exact = power * float(truth.logprobs[row, column]) - math.log(totals(truth, row, power)[0])
    return min(0.0, exact + max(1.0, power) * LIMIT * scale)


def drawn_at_another(
    model: LoadedModel, temperature: float, pairs: Sequence[Pair], scales: Scales, known: Known, error: float
) -> tuple[str, str] | None:
    """Of each seed the first answer counts: others may use the same random numbers. Each token is taken to be as likely
    as any engine of the format may have it.
    """
    by_seed: dict[int | None, Pair] = {}
    for request, answer in pairs:
        by_seed.setdefault(request.params.seed, (request, answer))
    drawn = list(by_seed.values())
    if len(drawn) < LEAST:
        return None
    truths = truths_of(model, drawn, known)
    capital, count = dict.fromkeys(WAYS, 0.0), 0
    for request, answer in drawn:
        truth, ids = truths[spoken(request, answer)], (*request.prompt_token_ids, *(answer.token_ids or ()))
        for row in range(len(request.prompt_token_ids) - 1, len(ids) - 1):
            count += 1
            column, index = truth.at(row, ids[row + 1]), row - truth.first
            fair = fair_share(truth, index, column, temperature, scales.get((request.request_id, row), 0.0))
            for name, bet in WAYS.items():
                capital[name] += bet(truth, index, column) - fair
        best = max(capital, key=lambda name: capital[name])
        if capital[best] - math.log(len(WAYS)) > -math.log(error):
            return (
                request.request_id,
                f"the {count} tokens drawn so far at temperature {temperature:g} {AS_IF} {best}",
            )
    return None
