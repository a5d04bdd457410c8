"""Samples with the same random numbers are unchanged from those of a right engine, and of one that hardly draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from pretend_engine import VOCAB, Pretend

from lfm2np.oracle.engines.records import Pair, Trace, changed
from lfm2np.suite.itself.questions import Sizes, questions
from lfm2np.suite.itself.samples import samples_alike

SIZES = Sizes(block=4, chunk=12, slots=4, longest=96, vocab=VOCAB)
NATS = 1e-6
Draw = Callable[[Pretend, int], list[Pair]]


def drawn(engine: Pretend, number: int, **params: object) -> list[Pair]:
    asked = [changed(each, **params) for each in questions(SIZES, number)]
    answers = engine.play(Trace(tuple(asked))).answers
    return [(request, answer) for request, samples in zip(asked, answers, strict=True) for answer in samples]


def sampled(engine: Pretend, number: int) -> list[Pair]:
    return drawn(engine, number, temperature=1.0, seed=7, n=3)


def ignoring(engine: Pretend, number: int) -> list[Pair]:
    """Greedy answers, as those of requests for three samples."""
    greedy = [(changed(request, temperature=1.0, n=3), answer) for request, answer in drawn(engine, number)]
    return [pair for pair in greedy for _ in range(3)]


SAME = Pretend(NATS, shares_noise=True)
TOPS, ALL = ("top_logprobs",), ("logprobs", "top_logprobs")
CASES: dict[str, tuple[Draw, Pretend, tuple[str, ...], bool]] = {  # how drawn, what is not reported, whether it shows
    "samples that differ": (sampled, Pretend(NATS), (), False),
    "samples that differ, chosen tokens alone are reported": (sampled, Pretend(NATS), TOPS, False),
    "greedy, whatever is asked": (ignoring, Pretend(NATS), (), False),
    "greedy, chosen tokens alone are reported": (ignoring, Pretend(NATS), TOPS, False),
    "the same random numbers, nothing is reported": (sampled, SAME, ALL, False),
    "the same random numbers": (sampled, SAME, (), True),
    "the same random numbers, chosen tokens alone are reported": (sampled, SAME, TOPS, True),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(5))
def test_only_the_same_random_numbers_are_seen_and_the_request_is_named(name: str, seed: int) -> None:
    draw, engine, silent, is_seen = CASES[name]
    pairs = [(request, replace(answer, **dict.fromkeys(silent))) for request, answer in draw(engine, seed)]
    found = samples_alike(pairs, drawn(Pretend(), seed), NATS)
    assert (found is not None) == is_seen
    if found is not None:
        assert found[0] in [request for request, _ in pairs]
        assert found[1] == "the 3 samples of a request are drawn with the same random numbers"


@pytest.mark.parametrize("seed", range(5))
def test_the_same_prompt_with_the_same_seed_may_get_the_same_samples(seed: int) -> None:
    """Small sizes may make two prompts alike."""
    pairs = sampled(Pretend(NATS), seed)
    again = [(replace(request), answer) for request, answer in pairs]
    assert samples_alike([*pairs, *again], drawn(Pretend(), seed), NATS) is None
