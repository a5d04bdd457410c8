"""The test itself, on distributions that are written down: how often it errs, and that it ends."""

from dataclasses import replace

import numpy as np
import pytest

import lfm2np
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle.vet.betting import ALIGNED, MOST, MOST_OF_TEXT, Ledger, Standing, factors_of
from lfm2np.oracle.vet.hypotheses import Candidate, hypotheses_of
from lfm2np.oracle.vet.likelihoods import WARMER, Likelihoods
from lfm2np.oracle.vet.reported import expected_gain
from lfm2np.oracle.vet.vetting import Bounds, Vetted

VOCABULARY, LENGTH, ALPHA = 16, 8, 0.05
MODEL = lfm2np.load()
HYPOTHESES = hypotheses_of([Candidate(name, MODEL) for name in "abc"], None, [], [SamplingParams()])


def normalised(logits):
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def answer(random, distributions, truth, noise=0.0, reports=None):
    """Drawn from one of the distributions [3, LENGTH, V], whose logits have an error; with reported values or not."""
    logits = distributions[truth] + noise * random.standard_normal(distributions[truth].shape)
    actual = normalised(logits)
    tokens = np.array([random.choice(VOCABULARY, p=np.exp(row)) for row in actual])
    chosen = np.take_along_axis(distributions, tokens[None, :, None], axis=2)[..., 0]
    warmer = [normalised(distributions / factor) for factor in WARMER]
    scales = None if reports is None else np.full((3, LENGTH), noise)
    # the hypotheses' pairs are the three candidates with one layout
    return Likelihoods(
        tokens,
        (-1, -1),
        chosen,
        chosen,
        chosen,
        (np.exp(distributions) ** 2).sum(axis=-1),
        np.stack([np.take_along_axis(part, tokens[None, :, None], axis=2)[..., 0] for part in warmer], axis=1),
        chosen,
        scales,
        np.full(LENGTH, np.nan) if reports is None else np.take_along_axis(actual, tokens[:, None], axis=1)[:, 0],
        np.ones(LENGTH, bool),
    )


def contexts(random, apart):
    """[3, LENGTH, V]: three candidates that differ by so much."""
    base = 1.5 * random.standard_normal((LENGTH, VOCABULARY))
    return normalised(base + apart * random.standard_normal((3, LENGTH, VOCABULARY)))


def run(seed, apart, truth=0, noise=0.0, answers=40, others=None, reports=None):
    random = np.random.default_rng(seed)
    ledger = Ledger(HYPOTHESES, VOCABULARY, (noise,) * 3)
    for _ in range(answers):
        distributions = contexts(random, apart)
        if others is not None:
            distributions = np.concatenate([distributions[:1], normalised(distributions[1:] + others)])
        ledger.add(answer(random, distributions, truth, noise, reports))
    return ledger.standings(ALPHA)


def test_what_is_true_is_hardly_ever_rejected_and_all_else_is():
    runs = [run(seed, 0.5, noise=0.05) for seed in range(60)]
    assert sum(standings[0].rejected is not None for standings in runs) <= 60 * ALPHA
    assert all(standing.rejected is not None for standings in runs for standing in standings[1:])


def test_candidates_closer_than_rounding_errors_are_not_told_apart():
    for seed in range(10):
        assert all(standing.rejected is None for standing in run(seed, 0.01, noise=0.2, answers=60))


def hotter(ledger, are_certain):
    """Answers of a truth that is hotter than all candidates."""
    random = np.random.default_rng(1)
    for _ in range(60):
        distributions = contexts(random, 0.3)
        drawn = answer(random, normalised(distributions / 1.6), 0)
        chosen = np.take_along_axis(distributions, drawn.token_ids[None, :, None], axis=2)[..., 0]
        warmer = [normalised(distributions / factor) for factor in WARMER]
        taken = [np.take_along_axis(part, drawn.token_ids[None, :, None], axis=2)[..., 0] for part in warmer]
        same = dict.fromkeys(("logprobs", "loose", "upper", "raw"), chosen)
        certain = np.full(LENGTH, are_certain)
        ledger.add(replace(drawn, warmer=np.stack(taken, axis=1), certain=certain, **same))
    return ledger.standings(ALPHA)


def test_a_list_without_the_truth_is_refuted():
    standings = hotter(Ledger(HYPOTHESES, VOCABULARY, (0.0,) * 3), True)
    assert all(standing.rejected is not None for standing in standings)


def test_ways_that_nobody_claims_do_not_bet_on_tokens_of_a_text():
    alone = hypotheses_of([Candidate("a", MODEL)], None, [], [SamplingParams()])
    (certain,), (uncertain,) = (hotter(FirstOnly(alone, VOCABULARY, (0.0,)), way) for way in (True, False))
    assert certain.rejected is not None and "temperature" in certain.by
    assert uncertain.rejected is None and uncertain.capital <= 0.0


class FirstOnly(Ledger):
    """Of answers under three hypotheses, the first."""

    def add(self, answer):
        names = ("logprobs", "loose", "upper", "squares", "warmer", "raw")
        super().add(replace(answer, **{name: getattr(answer, name)[:1] for name in names}))


def test_errors_that_may_be_aligned_are_paid_for():
    """The price of a difference between candidates that is as large as the rounding errors."""
    random, apart, tau = np.random.default_rng(7), 0.2, 0.2
    free, paid = (Ledger(HYPOTHESES, VOCABULARY, (spread,) * 3) for spread in (0.0, tau))
    for _ in range(40):
        drawn = answer(random, contexts(random, apart), 0)
        free.add(drawn)
        paid.add(drawn)
    difference = free.standings(ALPHA)[1].capital - paid.standings(ALPHA)[1].capital
    logprobs = free.joined("logprobs")
    price = ALIGNED * tau * np.sqrt(40 * LENGTH * np.sum((logprobs[0] - logprobs[1]) ** 2))
    assert 0.5 * price < difference < 1.5 * price


def test_reported_values_decide_sooner_and_do_not_accuse():
    quick = [run(seed, 0.3, noise=0.02, answers=3, reports=True) for seed in range(20)]
    assert all(standings[0].rejected is None for standings in quick)
    assert all(standing.rejected is not None for standings in quick for standing in standings[1:])


def test_no_token_counts_for_more_than_its_most():
    factors = factors_of(np.array([[0.0, -50.0, -np.inf]]), np.array([-90.0, -1.0, -1.0]))
    assert factors[0, 0] == MOST and factors[0, 1] == pytest.approx(np.log(0.01), abs=1e-3) == factors[0, 2]


def test_tokens_of_a_text_count_for_less_and_only_candidates_bet_on_them():
    random = np.random.default_rng(5)
    ledger = Ledger(HYPOTHESES, VOCABULARY, (0.0,) * 3)
    drawn = answer(random, contexts(random, 3.0), 0)
    ledger.add(replace(drawn, certain=np.zeros(LENGTH, bool)))
    standings = ledger.standings(ALPHA)
    assert max(standing.capital for standing in standings) <= MOST_OF_TEXT * LENGTH
    assert {standing.by for standing in standings} <= set("abc") | {
        "at 0.5 times the temperature"  # all that stand still
    }


def test_the_expected_gain_grows_with_the_distance_and_is_nothing_without():
    gains = expected_gain(np.array([0.0, 0.1, 1.0, 10.0]))
    assert gains[0] == 0.0 and (np.diff(gains) > 0.0).all()


@pytest.mark.rounding
def test_one_candidate_alone_is_judged_by_nobody_else(tmp_path):
    answers = (lfm2np.trained_fixture().parent / "answers" / "transformers-bfloat16.jsonl").read_text(encoding="utf-8")
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(answers.splitlines()[:4]) + "\n", encoding="utf-8")
    report = lfm2np.vet({"bf16": MODEL}, answers=few, max_tokens=4)
    assert report["verdict"] == "UNDECIDED" and report["figures"]["answers"] == 4


@pytest.mark.parametrize(
    ("rejected", "claim", "outcome", "exit_code"),
    [
        ("bc", "a", "accepted", 0),
        ("ac", "a", "accepted", 1),
        ("ac", "b", "accepted", 0),
        ("abc", "a", "none of these", 1),
        ("c", "a", "undecided", 2),
        ("a", "a", "undecided", 1),  # not the claim, whichever of the others it is
    ],
)
def test_the_outcome_is_what_is_left_and_the_exit_code_is_about_the_claim(rejected, claim, outcome, exit_code):
    hypotheses = hypotheses_of([Candidate(name, MODEL) for name in "abc"], claim, [], [SamplingParams()])
    standings = [Standing(9.0, "", 5 if each.name in rejected else None) for each in hypotheses.each]
    result = Vetted(hypotheses, None, ALPHA, Bounds(), standings, num_tokens=8)
    assert (result.outcome, result.exit_code) == (outcome, exit_code)
    result.num_tokens = 0
    assert result.outcome == ("none of these" if rejected == "abc" else "undecided")  # nothing was judged


@pytest.mark.parametrize("least", [0, 1])
def test_of_those_that_differ_in_their_sampling_only_the_one_with_the_least_against_it_is_accepted(least):
    samplings = [SamplingParams(), SamplingParams(temperature=0.5)]
    hypotheses = hypotheses_of([Candidate(name, MODEL) for name in "ab"], "a", [], samplings)
    standings = [Standing(9.0 - (number == least), "", None if number < 2 else 5) for number in range(4)]
    assert Vetted(hypotheses, None, ALPHA, Bounds(), standings, num_tokens=8).accepted == least
