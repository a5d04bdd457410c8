"""Sampling, noise, and the acceptance of draft tokens: each by its definition."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
import plain
from hypothesis import strategies as st
from numpy.typing import NDArray

from internal_properties.internal import internal, require
from lfm2np.arithmetic import numerics_named
from lfm2np.engine.acceptance import Guess, is_accepted, next_token, replacement
from lfm2np.engine.sampling.choice import (
    NOISE_BITS,
    choose,
    distribution,
    draw,
    integer_weights,
    philox,
    process,
    request_seed,
    uniform,
)
from lfm2np.engine.sampling.logprobs import token_logprobs
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.suite.properties.property import Violation
from lfm2np.suite.strategies.scenarios import sampling_params

EOS = (2,)
Ids = tuple[int, ...]
Row = tuple[float, ...]
HUGE = 2.0**1000  # what any logit is cut to
BIASES = (None, {6: 2.0}, {6: 2.0}, {6: HUGE, 7: 1.5 * HUGE}, {6: HUGE / 2, 7: 0.75 * HUGE}, {6: -HUGE, 7: -1.5 * HUGE})
ONE_CHANGED: tuple[tuple[str, Any], ...] = (
    *((name, value) for name in ("frequency_penalty", "presence_penalty") for value in (1.0, -1.0)),
    *(("repetition_penalty", 2.0), ("logit_bias", {6: 2.0}), ("banned_token_ids", (7, 3)), ("min_tokens", 3)),
    *(("allowed_token_ids", (3, 6)), ("top_k", 1), ("top_k", 13), ("min_p", 1.0), ("top_p", 0.5)),
)


@st.composite
def rows(draw: st.DrawFn) -> tuple[Row, SamplingParams, Ids, Ids]:
    """Logits in eighths, so that they tie often; and what was said before."""
    size = draw(st.sampled_from([12, 12, 60]))
    numbers = random.Random(draw(st.integers(0, 2**32)))
    short = st.lists(st.integers(-16, 16), min_size=12, max_size=12)
    row = draw(short) if size == 12 else [numbers.randint(-64, 64) for _ in range(size)]
    ids = st.lists(st.integers(0, 11), max_size=6).map(tuple)
    params = draw(sampling_params())
    kind = draw(st.sampled_from(["any", "one changed", "many changed"]))
    if kind == "one changed":  # whatever a shortcut asks for
        name, value = draw(st.sampled_from(ONE_CHANGED))
        changed: dict[str, Any] = {"temperature": draw(st.sampled_from([0.0, 1.0])), name: value}
        params = SamplingParams(**changed)
    if kind == "many changed":
        penalties = st.sampled_from([0.0, 1.0, -1.0, 0.5])
        params = replace(
            params,
            logit_bias=draw(st.sampled_from(BIASES)),
            repetition_penalty=draw(st.sampled_from([1.0, 2.0, 0.5]) | st.floats(0.1, 10.0)),
            frequency_penalty=draw(penalties),
            presence_penalty=draw(penalties),
            top_k=draw(st.sampled_from([0, 1, 2, 11, 12, 13])),
            top_p=draw(st.sampled_from([1.0, 0.2, 0.95]) | st.floats(0.0, 1.0, exclude_min=True)),
            min_p=draw(st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0.0, 1.0)),
            temperature=draw(st.sampled_from([params.temperature, 1.0]) | st.floats(1e-3, 1e3)),
        )
    return tuple(value / 8 for value in row), params, draw(ids) or (3,), draw(ids)


@internal(
    "sampling-is-its-definition",
    "Processors, in the order of the profile, give the documented distribution; greedy takes the lowest of equals.",
    2,
    rows,
    weight=16.0,
    bugs=("vLLM 5639",),
)
def sampling_is_its_definition(example: tuple[Row, SamplingParams, Ids, Ids]) -> None:
    """To the unit, in fractions; from float32 and from float64, and what is drawn has the noise of its place."""
    row, params, prompt, output = example
    array = np.array(row, np.float32)
    weights = distribution(array, params, prompt, output, EOS).tolist()
    expected = plain.probabilities(row, params, prompt, output, EOS)
    require_weights(array, params, prompt, output, weights)
    require([Fraction(weight, sum(weights)) for weight in weights], expected, "probabilities", params)
    wide = distribution(array.astype(np.float64), params, prompt, output, EOS).tolist()
    require(wide, weights, "weights from float64", params)
    require(array.tolist(), list(row), "logits afterwards", params)
    seed, sample = len(prompt), len(output)
    noise = Fraction(plain.uniform_noise(seed, sample, len(prompt) + len(output)), 1 << NOISE_BITS)
    drawn = next(token for token, total in enumerate(accumulate(expected)) if noise < total)
    chosen = choose(array, params, prompt, output, EOS, seed, sample)
    require(chosen, expected.index(1) if params.temperature == 0.0 else drawn, "token", params)


def require_weights(array: NDArray[Any], params: SamplingParams, prompt: Ids, output: Ids, weights: list[int]) -> None:
    """Greedy is a single 1; else the likeliest has 2**45, and all are those of the processed logits."""
    processed = process(array, params, prompt, output, EOS)
    if params.temperature == 0.0:
        require((sorted(weights)[-2:], weights.index(1)), ([0, 1], int(np.argmax(processed))), "weights", "greedy")
        return
    require(weights, integer_weights(processed).tolist(), "weights", params)
    largest = max(weights), processed.max(), max(integer_weights(array.astype(np.float64)).tolist())
    require(largest, (2**45, 0.0, 2**45), "largest weight and logit", params)


@internal(
    "top-p-takes-just-enough",
    "The fewest tokens that together reach top_p stay, to the unit.",
    2,
    lambda: st.just("all"),
)
def top_p_takes_just_enough(example: str) -> None:
    """On the border: tokens that reach top_p to the unit are enough, and one unit less is not."""
    least = np.float32(-31.2)  # its weight is one unit, where the likeliest has 2**45
    for row, top_p, expected in (
        ([0.0] * 4, 0.5, [2**45, 2**45, 0, 0]),
        ([0.0] * 4, math.nextafter(0.5, 1), [2**45, 2**45, 2**45, 0]),
        ([0.0] * 4, 5e-324, [2**45, 0, 0, 0]),
        ([0.0] * 4, math.nextafter(1, 0), [2**45] * 4),
        ([0.0, least], 1.0 - 2.0**-50, [2**45, 1]),
        ([0.0, least], 1.0 - 2.0**-45, [2**45, 0]),
    ):
        actual = distribution(np.array(row, np.float32), SamplingParams(top_p=top_p), (0,), (), ()).tolist()
        require(actual, expected, f"weights with top_p {top_p}:", f"logits {row}")


@internal(
    "logprobs-are-their-definition",
    "Log-probabilities are those of the raw logits, and the likeliest tokens are told in their order.",
    2,
    lambda: st.tuples(
        st.lists(st.integers(-16, 16).map(lambda value: value / 8), min_size=12, max_size=12).map(tuple),
        st.integers(0, 11),
        st.integers(0, 12),
    ),
    weight=2.0,
)
def logprobs_are_their_definition(example: tuple[Row, int, int]) -> None:
    row, token, count = example
    actual = token_logprobs(numerics_named("exact"), np.array(row, np.float32), token, count)
    expected = plain.log_softmax(row)
    best = sorted(range(len(row)), key=lambda index: (-row[index], index))[:count]
    said = [index for index, _ in actual.top]
    require((actual.token_id, said), (token, best), "token, and the likeliest", row)
    for index, logprob in ((token, actual.logprob), *actual.top):
        if abs(logprob - expected[index]) > 1e-6:
            raise Violation(f"token {index}: log-probability {logprob}, by definition {expected[index]}")


@internal(
    "noise-is-of-its-place",
    "Noise is Philox of (seed, sample, position, purpose); tokens are drawn by their shares of it.",
    2,
    lambda: st.tuples(
        st.integers(0, 2**64 - 1),
        st.integers(0, 5),
        st.integers(0, 200),
        st.integers(0, 2),
        st.text("ab#é", max_size=4),
        weights(),
    ),
    weight=8.0,
    bugs=("vLLM 51226", "vLLM 31081"),
)
def noise_is_of_its_place(example: tuple[int, int, int, int, str, list[int]]) -> None:
    seed, sample, position, purpose, name, weights = example
    words = plain.noise_words(seed, sample, position, purpose)
    noise = sum(word << 64 * (3 - index) for index, word in enumerate(words))
    place = (seed, sample, position, purpose)
    require((philox(*place), uniform(*place)), (noise, noise >> 128), "noise", place)
    digest = hashlib.sha256(seed.to_bytes(8, "big") + name.encode()).digest()
    require(request_seed(SamplingParams(), seed, name), int.from_bytes(digest[:8], "big"), "seed", (seed, name))
    for asked in (0, seed):
        require(request_seed(SamplingParams(seed=asked), 1, name), asked, "seed", f"a request with seed {asked}")
    share = (noise >> 128) * sum(weights) >> 128
    expected = next(token for token in range(len(weights)) if sum(weights[: token + 1]) > share)
    require(draw(np.array(weights, np.int64), noise >> 128), expected, f"token for {share}:", weights)


# --- acceptance


def least_noise(holds: Callable[[int], bool], bits: int) -> int:
    """The least noise of [0, 2**bits) from which on `holds`, a monotone predicate, is true; 2**bits if it never is."""
    low, high = 0, 1 << bits
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def weights() -> st.SearchStrategy[list[int]]:
    return st.lists(st.one_of(st.integers(0, 3), st.just(2**45)), min_size=4, max_size=4).filter(any)


def said(least: int) -> st.SearchStrategy[Ids]:
    return st.lists(st.integers(0, 3), min_size=least, max_size=6).map(tuple)


@internal(
    "rejection-is-exact",
    "A checked guess and its replacement give each token with the model's probability.",
    2,
    lambda: st.tuples(weights(), weights()),
)
def rejection_is_exact(example: tuple[list[int], list[int]]) -> None:
    """Over all guesses and noises, a token comes as often as the model gives it: to 2**-120, in fractions."""
    p, q = (np.array(ids, np.int64) for ids in example)
    came = [Fraction(0)] * len(p)
    for token in np.flatnonzero(q).tolist():
        guessed = Fraction(int(q[token]), int(q.sum()))
        guess = Guess(token, q)
        border = least_noise(lambda noise, g=guess: not is_accepted(p, g, noise), NOISE_BITS)  # type: ignore[misc]
        accepted = Fraction(border, 1 << NOISE_BITS)
        came[token] += guessed * accepted
        if accepted < 1:
            borders = [
                least_noise(lambda noise, i=i: replacement(p, q, noise) > i, 2 * NOISE_BITS)  # type: ignore[misc]
                for i in range(len(p) - 1)
            ]
            ends = [0, *borders, 1 << 2 * NOISE_BITS]
            for other in range(len(p)):
                share = Fraction(ends[other + 1] - ends[other], 1 << 2 * NOISE_BITS)
                came[other] += guessed * (1 - accepted) * share
    for token, mine in enumerate(came):
        expected = Fraction(int(p[token]), int(p.sum()))
        if abs(mine - expected) > Fraction(1, 1 << 120) or bool(mine) != bool(expected):
            raise Violation(f"token {token} comes with probability {float(mine)}, the model has {float(expected)}")


@internal(
    "guesses-use-their-own-noise",
    "Whether a guess is taken, and what replaces it, are decided by two noises of its place.",
    2,
    lambda: st.tuples(weights(), weights(), st.integers(0, 99), said(1), said(0), st.integers(0, 2)),
    weight=8.0,
)
def guesses_use_their_own_noise(example: tuple[list[int], list[int], int, Ids, Ids, int]) -> None:
    """A drawn guess is decided by the noise of its place and of purpose 1, and replaced by that of purpose 2."""
    p, q, seed, prompt, output, index = example
    row = np.log(np.maximum(np.array(p, np.float64), 1e-30)).astype(np.float32)
    weights, params = np.array(q, np.int64), SamplingParams()
    position = len(prompt) + len(output)
    target = distribution(row, params, prompt, output, ())
    guess = Guess(int(np.flatnonzero(weights)[-1]), weights)
    expected = guess.token_id
    if not is_accepted(target, guess, plain.uniform_noise(seed, index, position, 1)):
        expected = replacement(target, weights, philox(seed, index, position, 2))
    place = (prompt, output, (), seed, index)
    require(next_token(row, params, *place, guess), expected, "token with a guess", place)
    plainly = draw(target, plain.uniform_noise(seed, index, position))
    require(next_token(row, params, *place), plainly, "token without a guess", place)
    greedy = SamplingParams(temperature=0.0)
    require(next_token(row, greedy, *place, guess), int(np.argmax(row)), "greedy token with a guess", place)
