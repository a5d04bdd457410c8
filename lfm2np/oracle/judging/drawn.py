"""Tokens sampled at temperature 1 or another, compared with the exact distribution.

A gambler bets at fair odds that the engine samples in some other way. If it samples correctly, his capital, the product
of what his way gives each token over what the truth gives it, exceeds 1 / error at any time with a probability of at
most `error`. He splits his stake evenly among the ways below. Filters that nobody asked for, as a server may take them
from generation_config.json, are bet on over the tokens of all temperatures.

Source: Ville 1939; Ramdas et al. 2023, Game-theoretic statistics and safe anytime-valid inference, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle.engines.records import Pair
from lfm2np.oracle.judging.scored import Known, spoken, truths_of, usable
from lfm2np.oracle.judging.truth import LIKELY, Truth
from lfm2np.oracle.judging.verdict import LIMIT, Position

Array = NDArray[Any]

ERROR = 1e-6  # the probability that a right engine is called wrong
LEAST = 4  # answers with different seeds, for any judgement
STAKE = 0.95  # of the stake on the tokens of a way; the rest follows the truth
BORDER = 4.0  # standard deviations by which rounding exchanges tokens at the border of a filter
TEMPERATURES = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
AS_IF = "are drawn as if"  # in what is said of tokens that are drawn in another way


@dataclass(frozen=True, eq=False)
class Drawn:
    """One token that an engine drew; `row` and `column` are its place in the arrays of the truth.

    scale  of its log-probability's error in the engine's format, 0 where that is not known
    """

    request_id: str
    truth: Truth
    row: int
    column: int
    temperature: float
    scale: float

    @property
    def power(self) -> float:
        return 1.0 / self.temperature

    @property
    def slack(self) -> float:
        """How far rounding may lift the logarithm of a probability at the temperature."""
        return max(1.0, self.power) * LIMIT * self.scale

    @property
    def is_likeliest(self) -> bool:
        return self.column == int(np.argmax(self.truth.logprobs[self.row]))

    @property
    def logprob(self) -> float:
        return float(self.truth.logprobs[self.row, self.column])


# --- ways to draw tokens: of each token the logarithm of the factor by which the capital grows

Way = Callable[[Drawn], float]
# Of shares [LIKELY] in falling order, from which place to which; None: not to be told from them.
Places = Callable[[Array], tuple[int, int] | None]


def any_token(drawn: Drawn) -> float:
    return -math.log(drawn.truth.vocab_size) - fair_share(drawn)


def at_temperature(temperature: float) -> Way:
    """A lower bound of what that temperature gives the token: for unknown columns the most is assumed."""
    power = 1.0 / temperature

    def gain(drawn: Drawn) -> float:
        return power * drawn.logprob - math.log(totals(drawn.truth, drawn.row, power)[1]) - fair_share(drawn)

    return gain


def only(places: Places) -> Way:
    """Only tokens at these places come, the likeliest being the first. The bet is on whether the token is one of them,
    of which a right engine's rounding changes the probability least.
    """

    def gain(drawn: Drawn) -> float:
        weights = np.exp(drawn.power * drawn.truth.logprobs[drawn.row])
        order = np.argsort(-weights, kind="stable")[:LIKELY]
        least, most = totals(drawn.truth, drawn.row, drawn.power)
        where = places(weights[order] / most)
        if where is None:
            return 0.0
        start, stop = where
        least_share = weights[order[stop - 1]] * math.exp(-BORDER * drawn.power * drawn.scale)
        while stop < len(order) and weights[order[stop]] >= least_share:
            stop += 1
        if stop == len(order):
            return 0.0
        chosen = order[start:stop]
        if drawn.column not in chosen:
            return math.log1p(-STAKE) - drawn.slack
        together = math.fsum(weights[chosen])
        fair = min(1.0, together / least)
        fair = min(fair * math.exp(drawn.slack), 1.0 - (1.0 - fair) * math.exp(-drawn.slack))
        return math.log(STAKE + (1.0 - STAKE) * together / most) - math.log(fair)

    return gain


def top_k(count: int) -> Places:
    return lambda shares: (0, count) if count < len(shares) else None


def top_p(share: float) -> Places:
    def places(shares: Array) -> tuple[int, int] | None:
        stop = int(np.searchsorted(np.cumsum(shares), share)) + 1
        return (0, stop) if stop <= len(shares) else None

    return places


def min_p(share: float) -> Places:
    def places(shares: Array) -> tuple[int, int] | None:
        stop = int(np.count_nonzero(shares >= share * shares[0]))
        return (0, stop) if stop < len(shares) else None

    return places


WAYS: Mapping[str, Way] = {
    "greedily": only(lambda shares: (0, 1)),
    "with the second likeliest token always": only(lambda shares: (1, 2)),
    "with each token as likely as any other": any_token,
    **{f"at temperature {temperature:g}": at_temperature(temperature) for temperature in TEMPERATURES},
}
FILTERS: Mapping[str, Way] = {
    **{f"with top_p {share:g}": only(top_p(share)) for share in (0.95, 0.9, 0.8, 0.5)},
    **{f"with top_k {count}": only(top_k(count)) for count in (40, 20)},
    **{f"with min_p {share:g}": only(min_p(share)) for share in (0.05, 0.15)},
}


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


def fair_share(drawn: Drawn) -> float:
    """An upper bound of the logarithm of a token's probability at its temperature, in any engine of the format."""
    exact = drawn.power * drawn.logprob - math.log(totals(drawn.truth, drawn.row, drawn.power)[0])
    return min(0.0, exact + drawn.slack)


# --- tests


class Test(NamedTuple):
    """Tokens that are drawn in one way, if wrongly: the first answers of each seed; others may use the same noise."""

    words: str  # behind "tokens"
    ways: Mapping[str, Way]
    by_seed: dict[int | None, Pair]


def drawn_wrongly(
    model: LoadedModel, pairs: Sequence[Pair], positions: Sequence[Position], known: Known, error: float = ERROR
) -> tuple[str, str] | None:
    """The id of the request by which it shows, and how the engine seems to sample; None if it may be right.

    All tests share `error`.
    """
    sampled = [pair for pair in usable(pairs) if pair[0].is_sampled and not pair[0].processors]
    if not sampled:
        return None
    tests = [test for test in tests_of(sampled) if len(test.by_seed) >= LEAST]
    truths = truths_of(model, sampled, known)
    scales = {(position.request.request_id, position.row): position.scale for position in positions}
    error /= len(tests) + 1
    found = []
    for words, ways, by_seed in tests:
        drawn = (each for pair in by_seed.values() for each in drawn_of(pair, truths, scales))
        if won := way_that_wins(drawn, ways, error):
            capital, last, count, way = won
            found.append((capital, last, f"{count} tokens{words} {AS_IF} {way}"))
    if found:
        return max(found)[1:]
    several = [pair for pair in sampled if pair[0].params.n > 1]
    alike = drawn_alike(several, truths, scales, error)
    is_greedy = all(each.is_likeliest for pair in several for each in drawn_of(pair, truths, scales))
    return (alike[0], f"{alike[1]}, or greedily: all are the likeliest") if alike and is_greedy else alike


def tests_of(sampled: Sequence[Pair]) -> list[Test]:
    """One of each temperature and, of several samples, each sample; then one of all first samples together."""
    tests: dict[tuple[float, int | None], Test] = {}
    together = Test("", FILTERS, {})
    for request, answer in sampled:
        temperature, sample = request.params.temperature, request.sample if request.params.n > 1 else None
        words = f" at temperature {temperature:g}" + ("" if sample is None else f" of sample {sample}")
        test = tests.setdefault((temperature, sample), Test(words, WAYS, {}))
        test.by_seed.setdefault(request.params.seed, (request, answer))
        if request.sample == 0:
            together.by_seed.setdefault(request.params.seed, (request, answer))
    return [*tests.values(), together]


Scales = Mapping[tuple[str, int], float]  # of log-probabilities, by request and row
Truths = Mapping[Any, Truth]


def drawn_of(pair: Pair, truths: Truths, scales: Scales) -> Iterator[Drawn]:
    """The tokens of an answer in turn."""
    request, answer = pair
    truth, start = truths[spoken(request, answer)], len(request.prompt_token_ids) - 1
    for row, token in enumerate(answer.ids, start):
        scale = scales.get((request.request_id, row), 0.0)
        column, temperature = truth.at(row, token), request.params.temperature
        yield Drawn(request.request_id, truth, row - truth.first, column, temperature, scale)


def way_that_wins(drawn: Iterator[Drawn], ways: Mapping[str, Way], error: float) -> tuple[float, str, int, str] | None:
    """Of the way that has won the most in the end, if any ever had enough: its capital, the request by which a way had
    enough, how many tokens were drawn, and the way.
    """
    capital, enough = dict.fromkeys(ways, 0.0), math.log(len(ways) / error)
    count, last = 0, ""
    for count, each in enumerate(drawn, start=1):  # noqa: B007 - the number of all of them
        for name, way in ways.items():
            capital[name] += way(each)
        if not last and max(capital.values()) > enough:
            last = each.request_id
    best = max(capital, key=lambda name: capital[name])
    return (capital[best], last, count, best) if last else None


def drawn_alike(pairs: Sequence[Pair], truths: Truths, scales: Scales, error: float) -> tuple[str, str] | None:
    """Whether samples repeat the first one of their request: the stake is on its tokens, until one differs."""
    first: dict[tuple[object, ...], tuple[int, ...]] = {}
    capital = 0.0
    for request, answer in pairs:
        others = first.setdefault((request.prompt_token_ids, request.params.seed), answer.ids)
        if others is answer.ids:
            continue
        for each, token, other in zip(drawn_of((request, answer), truths, scales), answer.ids, others, strict=False):
            fair = fair_share(each)
            capital += math.log(STAKE * (token == other) + (1.0 - STAKE) * math.exp(fair)) - fair
            if token != other:
                break
        if capital > -math.log(error):
            words = f"the {request.params.n} samples of a request are drawn with the same random numbers"
            return request.request_id, words
    return None
