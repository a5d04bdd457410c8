"""Rejection sampling is exact: the probability of every short sequence, in fractions, and a chi-square test."""

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from internal_properties.sampling import least_noise

import lfm2np
from lfm2np import Engine, SamplingParams
from lfm2np.engine.acceptance import Guess, is_accepted, replacement
from lfm2np.engine.draft_model import ModelDrafter
from lfm2np.engine.sampling.choice import NOISE_BITS, distribution, draw

FIXTURES = Path(__file__).parents[2] / "fixtures"
Sequence = tuple[int, ...]


def measured_acceptance(target: np.ndarray, guess: Guess) -> Fraction:
    """The share of all noises for which the code accepts."""
    return Fraction(least_noise(lambda noise: not is_accepted(target, guess, noise), NOISE_BITS), 1 << NOISE_BITS)


def measured_draw(choose: Callable[[int], int], size: int, bits: int) -> list[Fraction]:
    """The share of all noises for which the code draws each id: ids come in ascending order."""
    borders = [least_noise(lambda noise, i=i: choose(noise) > i, bits) for i in range(size - 1)] + [1 << bits]
    return [Fraction(b - a, 1 << bits) for a, b in itertools.pairwise([0, *borders])]


def shares(weights: np.ndarray) -> list[Fraction]:
    return [Fraction(int(w), int(weights.sum())) for w in weights]


def tables(seed: int, size: int, length: int) -> dict[Sequence, np.ndarray]:
    """An arbitrary model of a tiny vocabulary: a distribution for each prefix; some tokens are impossible."""
    choice = random.Random(seed)
    table = {}
    for prefix in (p for n in range(length + 1) for p in itertools.product(range(size), repeat=n)):
        row = [choice.choice([0, 1, choice.randint(1, 2**45)]) for _ in range(size)]
        row[choice.randrange(size)] += 1 + choice.randint(0, 2**44)
        table[prefix] = np.array(row, np.int64)
    return table


def outcomes(
    prefix: Sequence, length: int, most: int, target: dict[Sequence, np.ndarray], draft: dict[Sequence, np.ndarray]
) -> dict[Sequence, Fraction]:
    """The probability of every sequence of `length` tokens under whole speculative steps of up to `most` guesses.

    All guesses of a step are drawn before any is checked; at the first that is refused the step ends with its
    replacement, else with one token more, which a guess decides too.
    """
    if len(prefix) == length:
        return {prefix: Fraction(1)}
    chances: Counter[Sequence] = Counter()
    count = min(most, length - len(prefix) - 1)
    for guesses in itertools.product(range(len(target[()])), repeat=count + 1):
        probability = Fraction(1)
        for place, token in enumerate(guesses):
            probability *= shares(draft[prefix + guesses[:place]])[token]
        if not probability:
            continue
        for place, token in enumerate(guesses):
            here = prefix + guesses[:place]
            p, q = target[here], draft[here]
            accepted = measured_acceptance(p, Guess(token, q))
            if accepted < 1:
                for other, share in enumerate(measured_draw(lambda n: replacement(p, q, n), len(p), 256)):  # noqa: B023
                    if share:
                        for end, rest in outcomes((*here, other), length, most, target, draft).items():
                            chances[end] += probability * (1 - accepted) * share * rest
            probability *= accepted
            if not probability:
                break
        else:
            for end, rest in outcomes(prefix + guesses, length, most, target, draft).items():
                chances[end] += probability * rest
    return chances


@pytest.mark.parametrize(("size", "length", "most"), [(3, 3, 1), (3, 3, 2), (2, 4, 2), (2, 4, 3)])
def test_every_short_sequence_has_the_models_probability(size: int, length: int, most: int):
    target, draft = tables(0, size, length), tables(100, size, length)
    chances = outcomes((), length, most, target, draft)
    assert sum(chances.values()) == 1
    for sequence in itertools.product(range(size), repeat=length):
        expected = Fraction(1)
        for place, token in enumerate(sequence):
            expected *= shares(target[sequence[:place]])[token]
        assert abs(chances.get(sequence, Fraction(0)) - expected) < Fraction(1, 1 << 120)


# --- chi-square, on the engine with both models

SAMPLES, LENGTH = 1500, 3
PARAMS = SamplingParams(
    n=SAMPLES,
    temperature=4.0,
    max_tokens=LENGTH,
    allowed_token_ids=[283, 285, 292],  # where the two models differ much: half of the guesses are refused
    repetition_penalty=1.2,
    presence_penalty=0.3,
    ignore_eos=True,
    seed=4,
)
PROMPT = "recall: f = 7, r = 2 ->"
Rule = Callable[[list[Fraction], list[Fraction]], list[Fraction]]  # p, q -> the probabilities of one position


def target_itself(p: list[Fraction], q: list[Fraction]) -> list[Fraction]:
    return p


def always_accepted(p: list[Fraction], q: list[Fraction]) -> list[Fraction]:
    return q


def replaced_from_the_target(p: list[Fraction], q: list[Fraction]) -> list[Fraction]:
    accepted = [min(a, b) for a, b in zip(p, q, strict=True)]
    return [a + (1 - sum(accepted)) * b for a, b in zip(accepted, p, strict=True)]


def sequences(drafter_sampling: str | None) -> Counter[Sequence]:
    """What the engine samples: the output tokens of all samples of one request."""
    model, small = lfm2np.load(FIXTURES / "trained"), lfm2np.load(FIXTURES / "draft")
    drafter = None if drafter_sampling is None else ModelDrafter(small, model, drafter_sampling)
    engine = Engine(model, drafter=drafter, num_speculative_tokens=2, max_num_seqs=250, num_blocks=600, seed=9)
    engine.add_request("a", PROMPT, PARAMS)
    (output,) = [output for output in engine.stream() if output.finished]
    assert drafter is None or engine.metrics.draft_tokens > 0
    return Counter(sample.token_ids for sample in output.outputs)


def probabilities(rule: Rule) -> dict[Sequence, Fraction]:
    """Of every sequence, if each position follows the rule: from the reference's logits, no engine, no drafter."""
    model, small = lfm2np.load(FIXTURES / "trained"), lfm2np.load(FIXTURES / "draft")
    prompt, allowed = model.prompt_ids(PROMPT), list(PARAMS.allowed_token_ids or ())
    guessed = dataclasses.replace(PARAMS, repetition_penalty=1.0, presence_penalty=0.0)
    chances: dict[Sequence, Fraction] = {(): Fraction(1)}
    for _ in range(LENGTH):
        grown = {}
        for prefix, probability in chances.items():
            sequence = [*prompt, *prefix]
            p = shares(distribution(model.logits(sequence)[-1], PARAMS, prompt, prefix, ())[allowed])
            q = shares(distribution(small.logits(sequence)[-1], guessed, prompt, prefix, ())[allowed])
            for token, share in zip(allowed, rule(p, q), strict=True):
                grown[*prefix, token] = probability * share
        chances = grown
    return chances


def chi_square(counts: Mapping[Sequence, float], expected: dict[Sequence, Fraction]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells with fewer than 10 expected are joined."""
    large = {key: p for key, p in expected.items() if p * SAMPLES >= 10}
    rest = 1 - sum(large.values())
    cells = [(counts[key], float(p * SAMPLES)) for key, p in large.items()]
    if rest:
        cells.append((sum(counts.values()) - sum(counts[key] for key in large), float(rest * SAMPLES)))
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells), len(cells) - 1


def quantile(degrees: int) -> float:
    """Of chi-square at 1 - 1e-6, by Wilson and Hilferty's approximation (4.753 is the normal's quantile)."""
    d = float(degrees)
    return d * (1 - 2 / (9 * d) + 4.753 * (2 / (9 * d)) ** 0.5) ** 3


@pytest.mark.slow
@pytest.mark.parametrize("drafter_sampling", [None, "greedy", "random"])
def test_the_engines_samples_have_the_models_distribution(drafter_sampling: str | None):
    """Seeded; a right engine fails with probability 1e-6 over all seeds. For the power see the next test."""
    counts = sequences(drafter_sampling)
    assert sum(counts.values()) == SAMPLES
    statistic, degrees = chi_square(counts, probabilities(target_itself))
    assert degrees >= 10
    assert statistic < quantile(degrees)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "name", "broken"),
    [
        (always_accepted, "is_accepted", lambda target, guess, noise: True),
        (replaced_from_the_target, "replacement", lambda p, q, noise: draw(p, noise >> NOISE_BITS)),
    ],
)
def test_the_power_of_the_chi_square_test(rule: Rule, name: str, broken: object, monkeypatch: pytest.MonkeyPatch):
    """Two wrong rules that engines had: the statistic is then noncentral chi-square, whose mean d + n and variance
    2 (d + 2n) put its limit 5 standard deviations below the mean: power over 0.999. And the engine shows it."""
    expected = probabilities(target_itself)
    moved = {key: float(p * SAMPLES) for key, p in probabilities(rule).items()}
    noncentral, degrees = chi_square(moved, expected)
    limit = quantile(degrees)
    assert degrees + noncentral - 5 * math.sqrt(2 * (degrees + 2 * noncentral)) > limit
    monkeypatch.setattr(f"lfm2np.engine.acceptance.{name}", broken)
    assert chi_square(sequences("random"), expected)[0] > limit
