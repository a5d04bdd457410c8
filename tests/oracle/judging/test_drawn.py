"""Drawn tokens against the truth's distribution: right ones are hardly ever called wrong, other ways are named."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from truths import truth_of

from lfm2np.engine.llm import LLM
from lfm2np.engine.loading import Model
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle.check import judged
from lfm2np.oracle.engines.records import IMPOSSIBLE, Answer, Pair, changed, failed, greedy, samples_of
from lfm2np.oracle.engines.target import Abilities
from lfm2np.oracle.judging.drawn import FILTERS, WAYS, Drawn, drawn_wrongly, fair_share
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.judging.truth import Truth
from lfm2np.oracle.judging.verdict import LIMIT, Verdict
from lfm2np.oracle.total import refuted_reasons
from lfm2np.oracle.workloads import CASES

pytestmark = pytest.mark.slow

SEEDS, TOKENS = 32, 4


def drawn_at(temperature: float, first_seed: int) -> list[Pair]:
    """Answers of lfm2np's own engine: greedy ones for 0."""
    seeds = range(first_seed, first_seed + SEEDS)
    prompts = [(9 + seed * 31 % 400, 20 + seed % 7, 77, 300 - seed) for seed in seeds]
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=TOKENS, ignore_eos=True) for seed in seeds]
    pairs = []
    for seed, prompt, result in zip(seeds, prompts, LLM().generate(prompts, params), strict=True):
        request = greedy(str(seed), prompt, TOKENS, case="seeds", seed=seed, temperature=1.0)
        pairs.append((request, Answer(result.outputs[0].token_ids)))
    return pairs


@pytest.mark.parametrize(
    ("temperature", "words"),
    [(0.0, "drawn as if greedily"), (0.25, "drawn as if at temperature"), (4.0, "drawn as if ")],
)
def test_another_temperature_is_named(model: Model, temperature: float, words: str) -> None:
    cause = drawn_wrongly(model, drawn_at(temperature, 0), [], Known())
    assert cause is not None and words in cause[1]


def test_how_tokens_are_drawn_is_the_only_cause(model: Model) -> None:
    """And not that a seed depends on more: the case suspects that of other tokens with the same seed."""
    pairs = [*drawn_at(0.0, 0), (greedy("plain", (1, 2), 1, case="short-prompts"), Answer((5,)))]
    cause = drawn_wrongly(model, pairs, [], Known())
    assert cause is not None
    for words, more in ((cause[1], []), ("other tokens", [f"wrong in seeds: {CASES['seeds'].suspect}"])):
        judged = [
            (each, failed(words, IMPOSSIBLE) if each.request_id == cause[0] else answer) for each, answer in pairs
        ]
        first, *others = refuted_reasons(judged, None)
        assert first == f"1 answer that no right engine gives, first of {cause[0]}: {words}" and others == more


@pytest.mark.parametrize(("faults", "named"), [(("text a", "text b"), 0), (("text a", "stop string b"), 2)])
def test_what_is_wrong_in_several_cases_is_the_matter_of_none(faults: tuple[str, str], named: int) -> None:
    right = [(greedy("", (1,), 1, case=case), Answer((5,))) for case in ("short-prompts", "neighbours")]
    wrong = [
        (greedy("", (1,), 1, case=case), failed(fault, IMPOSSIBLE))
        for case, fault in zip(("stops", "streams"), faults, strict=True)
    ]
    assert len(refuted_reasons([*right, *wrong], None)) == 1 + named


def ranked(model: Model, prompt: tuple[int, ...], rank: int) -> Answer:
    """Always the token of this rank."""
    ids = list(prompt)
    for _ in range(2):
        ids.append(int(np.argsort(-model.logits(ids)[-1])[rank]))
    return Answer(tuple(ids[len(prompt) :]))


@pytest.mark.parametrize(("rank", "words"), [(0, "greedily"), (1, "with the second likeliest token always")])
def test_each_of_several_samples_is_judged_by_itself(model: Model, rank: int, words: str) -> None:
    pairs, params = [], SamplingParams(n=3, max_tokens=2, ignore_eos=True)
    for request, _ in drawn_at(1.0, 0)[:24]:
        prompt, seed = request.prompt_token_ids, request.params.seed
        first, _, last = LLM().generate([prompt], replace(params, seed=seed))[0].outputs
        answers = (Answer(first.token_ids), ranked(model, prompt, rank), Answer(last.token_ids))
        pairs += zip(samples_of(changed(request, n=3, max_tokens=2)), answers, strict=True)
    cause = drawn_wrongly(model, pairs, [], Known())
    assert cause is not None and f"of sample 1 are drawn as if {words}" in cause[1]


@pytest.mark.parametrize(("rank", "words"), [(0, ", or greedily: all are the likeliest"), (1, "numbers")])
def test_few_samples_that_are_alike_may_be_greedy(model: Model, rank: int, words: str) -> None:
    """Three requests are too few to say how each sample is drawn."""
    several = [changed(request, n=3, max_tokens=2) for request, _ in drawn_at(1.0, 0)[:3]]
    pairs = [(each, ranked(model, each.prompt_token_ids, rank)) for request in several for each in samples_of(request)]
    cause = drawn_wrongly(model, pairs, [], Known())
    assert cause is not None and cause[1].startswith("the 3 samples") and cause[1].endswith(words)


def test_right_draws_are_right(model: Model) -> None:
    known = Known()
    for first in range(0, 3 * SEEDS, SEEDS):
        assert drawn_wrongly(model, drawn_at(1.0, first), [], known) is None


@pytest.mark.rounding
def test_a_seeded_request_need_not_choose_the_likeliest_token(model: Model) -> None:
    """Whatever its factors say: a user's file of requests need not have any."""
    result = judged(model, Abilities("seeded"), "float32", drawn_at(1.0, 0))
    assert any(position.token_id != position.best for position in result.positions)
    assert result.total.verdict is Verdict.INCONCLUSIVE and result.total.flips == 0  # no log-probabilities


def every_token(truth: Truth, temperature: float, scale: float = 0.0) -> list[Drawn]:
    return [Drawn("", truth, 1, column, temperature, scale) for column in range(truth.columns.shape[1])]


def with_few_columns(truth: Truth) -> Truth:
    few = np.sort(np.argsort(-truth.logprobs[1])[:60])
    return replace(truth, columns=truth.columns[:, few], logprobs=truth.logprobs[:, few])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("scale", [0.0, 0.01])
def test_no_way_wins_by_itself(model: Model, temperature: float, scale: float) -> None:
    """The mean of a token's factor is at most 1 under the truth, and in an engine whose logits are off by rounding."""
    whole = truth_of(model, (1, 50, 60, 70), {1: range(model.config.vocab_size)})
    few = with_few_columns(whole)
    known = np.isin(whole.columns[1], few.columns[1])
    for seed in range(6):
        off = np.random.default_rng(seed).choice([-LIMIT, LIMIT], len(known)) * scale / 2.0
        shares = np.exp((whole.logprobs[1] + off) / temperature)
        shares /= math.fsum(shares)
        for truth, some in ((whole, shares), (few, shares[known])):
            for name, way in (WAYS | FILTERS).items():
                factors = [math.exp(way(drawn)) for drawn in every_token(truth, temperature, scale)]
                assert math.fsum(np.multiply(some, factors)) <= 1.0 + 1e-9, name


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_no_token_is_likelier_at_a_temperature_than_it_is_taken_to_be(model: Model, temperature: float) -> None:
    """Else a right engine would be called wrong; with all columns it is the exact probability."""
    whole = truth_of(model, (1, 50, 60, 70), {1: range(model.config.vocab_size)})
    few = with_few_columns(whole)
    powers = np.exp(whole.logprobs[1] / temperature)
    exact = np.log(powers / math.fsum(powers))
    all_shares = list(map(fair_share, every_token(whole, temperature)))
    assert all_shares == pytest.approx(exact.tolist())
    shares = list(map(fair_share, every_token(few, temperature)))
    known = exact[np.isin(whole.columns[1], few.columns[1])].tolist()
    assert all(share >= value - 1e-12 for share, value in zip(shares, known, strict=True))
    assert fair_share(every_token(whole, temperature, 0.01)[0]) > all_shares[0]


def test_of_a_seed_the_first_answer_counts(model: Model) -> None:
    request, answer = drawn_at(0.0, 0)[0]
    assert (
        drawn_wrongly(model, [(replace(request, request_id=str(number)), answer) for number in range(50)], [], Known())
        is None
    )


def test_requests_that_ask_for_a_filter_are_not_judged_as_if_they_did_not(model: Model) -> None:
    """A file of a user's requests may have some."""
    pairs = [(changed(request, top_k=1), answer) for request, answer in drawn_at(0.0, 0)]
    assert drawn_wrongly(model, pairs, [], Known()) is None
