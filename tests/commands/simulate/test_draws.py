"""Random numbers that are every machine's, and of the distribution that they say."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest

from lfm2np.commands.simulate.draws import BLOCK, Draws, each, exp, log, normal_quantile, times

POWERS = 10.0 ** np.linspace(-300, 300, 4001)


def test_logarithm_and_exponential_are_nearly_the_machines() -> None:
    assert np.max(np.abs(log(POWERS) - np.log(POWERS)) / np.maximum(1, np.abs(np.log(POWERS)))) < 1e-15
    near_1 = 1 + np.linspace(-0.4, 0.4, 4000)
    assert np.max(np.abs(log(near_1) - np.log(near_1))) < 1e-15
    exponents = np.linspace(-700, 700, 4001)
    assert np.max(np.abs(exp(exponents) / np.exp(exponents) - 1)) < 1e-15


def test_normal_quantiles_are_those_of_the_standard_library() -> None:
    known = np.array([2.0**-53, 1e-9, 0.001, 0.0749, 0.0751, 0.3, 0.5, 0.8, 0.925, 0.99, 1 - 1e-12])
    assert normal_quantile(known) == pytest.approx([NormalDist().inv_cdf(each) for each in known], rel=1e-14)


@pytest.mark.kernels
def test_the_first_numbers_are_these_on_every_machine() -> None:
    """Bits, as the docstring promises."""
    draws = Draws(0, "gaps")
    assert [float(draw(BLOCK)[0]).hex() for draw in (draws.uniform, draws.exponential, draws.normal)] == PINNED[:3]
    assert [float(draws.gamma(shape)[0]).hex() for shape in (0.1, 2.5)] == PINNED[3:]


PINNED = [
    "0x1.8633adae8c7b4p-3",
    "0x1.1ccb514e7b6fbp-1",
    "0x1.003f32d18d5a2p-1",
    "0x1.a94216eff8dd7p-23",
    "0x1.b9ca4b9fe53b9p+0",
]


@pytest.mark.parametrize("shape", [0.05, 0.5, 1.0, 4.0])
def test_gamma_has_its_mean_and_variance(shape: float) -> None:
    drawn = Draws(3, "gamma").gamma(shape, 200_000)
    assert len(drawn) == 200_000 and drawn.min() >= 0
    assert drawn.mean() == pytest.approx(shape, rel=6 * (shape * 200_000) ** -0.5)
    assert drawn.var() == pytest.approx(shape, rel=0.08)


def test_uniform_exponential_and_normal_have_their_moments() -> None:
    draws, size = Draws(4, "moments"), 200_000
    uniform, exponential, normal = draws.uniform(size), draws.exponential(size), draws.normal(size)
    assert uniform.min() > 0 and uniform.max() < 1
    for drawn, mean, variance in ((uniform, 0.5, 1 / 12), (exponential, 1, 1), (normal, 0, 1)):
        assert drawn.mean() == pytest.approx(mean, abs=6 * math.sqrt(variance / size))
        assert drawn.var() == pytest.approx(variance, rel=0.03)


def test_streams_are_apart() -> None:
    first = {(seed, name): Draws(seed, name).uniform(4).tolist() for seed in (0, 1) for name in ("a", "b", "ab")}
    assert len({tuple(numbers) for numbers in first.values()}) == len(first)
    assert first[0, "a"] == Draws(0, "a").uniform(4).tolist()


def test_times_add_up_over_blocks() -> None:
    gaps = iter([np.array([0.5, 0.25]), np.array([1e-9, 1.0])])
    assert list(itertools.islice(times(lambda: next(gaps)), 4)) == [
        500_000_000,
        750_000_000,
        750_000_001,
        1_750_000_001,
    ]
    blocks = iter([np.array([1, 2]), np.array([3])])
    assert list(itertools.islice(each(lambda: next(blocks)), 3)) == [1, 2, 3]
