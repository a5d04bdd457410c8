"""The engine's samples have the model's distribution, whatever drafter: a chi-square test, on both trained models.

That each position's probabilities are exact: internal_properties/sampling.py.
"""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

import lfm2np
from lfm2np import Engine, SamplingParams
from lfm2np.engine.draft_model import ModelDrafter
from lfm2np.engine.sampling.choice import NOISE_BITS, distribution, draw

FIXTURES = Path(__file__).parents[2] / "fixtures"
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
Sequence = tuple[int, ...]
pytestmark = pytest.mark.night


def sequences(drafter_sampling: str | None) -> Counter[Sequence]:
    """What the engine samples: the output tokens of all samples of one request."""
    model, small = lfm2np.load(FIXTURES / "trained"), lfm2np.load(FIXTURES / "draft")
    drafter = None if drafter_sampling is None else ModelDrafter(small, model, drafter_sampling)
    engine = Engine(model, drafter=drafter, num_speculative_tokens=2, max_num_seqs=250, num_blocks=600, seed=9)
    engine.add_request("a", PROMPT, PARAMS)
    (output,) = [output for output in engine.stream() if output.finished]
    assert drafter is None or engine.metrics.draft_tokens > 0
    return Counter(sample.token_ids for sample in output.outputs)


@pytest.fixture(scope="module")
def probabilities() -> dict[Sequence, Fraction]:
    """Of every sequence: from the reference's logits, no engine, no drafter."""
    model = lfm2np.load(FIXTURES / "trained")
    prompt, allowed = model.prompt_ids(PROMPT), list(PARAMS.allowed_token_ids or ())
    chances: dict[Sequence, Fraction] = {(): Fraction(1)}
    for _ in range(LENGTH):
        grown = {}
        for prefix, probability in chances.items():
            weights = distribution(model.logits([*prompt, *prefix])[-1], PARAMS, prompt, prefix, ())
            for token in allowed:
                grown[*prefix, token] = probability * Fraction(int(weights[token]), int(weights.sum()))
        chances = grown
    return chances


def distance(counts: Counter[Sequence], expected: dict[Sequence, Fraction]) -> float:
    """Pearson's statistic in units of its quantile at 1 - 1e-6; cells with fewer than 10 expected are joined.

    By Wilson and Hilferty's approximation; 4.753 is the normal's quantile.
    """
    assert counts.total() == SAMPLES
    large = {key: p for key, p in expected.items() if p * SAMPLES >= 10}
    cells = [(counts[key], float(p * SAMPLES)) for key, p in large.items()]
    if rest := 1 - sum(large.values()):
        cells.append((SAMPLES - sum(counts[key] for key in large), float(rest * SAMPLES)))
    degrees = len(cells) - 1
    assert degrees >= 10
    quantile = degrees * (1 - 2 / (9 * degrees) + 4.753 * (2 / (9 * degrees)) ** 0.5) ** 3
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells) / quantile


@pytest.mark.parametrize("drafter_sampling", [None, "greedy", "random"])
def test_the_engines_samples_have_the_models_distribution(
    drafter_sampling: str | None, probabilities: dict[Sequence, Fraction]
):
    """Seeded; a right engine fails with probability 1e-6 over all seeds."""
    assert distance(sequences(drafter_sampling), probabilities) < 1


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("is_accepted", lambda target, guess, noise: True),
        ("replacement", lambda p, q, noise: draw(p, noise >> NOISE_BITS)),
    ],
)
def test_two_wrong_rules_that_engines_had_are_seen(
    name: str, broken: object, probabilities: dict[Sequence, Fraction], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(f"lfm2np.engine.acceptance.{name}", broken)
    assert distance(sequences("random"), probabilities) > 1
