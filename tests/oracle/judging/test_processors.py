"""Tokens that penalties, filters and biases exclude: against the sampler's own distribution, and in engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engines import PLENTY, Changed, checked_target, known_of, loaded
from numpy.typing import NDArray

from lfm2np.engine.loading import Model
from lfm2np.engine.sampling.choice import distribution, filtered
from lfm2np.engine.sampling.params import PROFILES, SamplingParams
from lfm2np.errors import RequestError
from lfm2np.oracle.causes.replies import SAMPLER
from lfm2np.oracle.check import Checked, judged
from lfm2np.oracle.check_report import report_of
from lfm2np.oracle.engines.protocol import Factory
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Answer, Request, changed, greedy
from lfm2np.oracle.engines.target import Abilities
from lfm2np.oracle.judging.judge import judge
from lfm2np.oracle.judging.processors import wrong_choices
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.judging.verdict import Verdict
from lfm2np.oracle.judging.views import viewed
from lfm2np.oracle.workloads import CASES, PENALTIES, PROCESSED
from lfm2np.suite.adapters import Own

pytestmark = pytest.mark.rounding

PROMPT, BIASED = (9, 40, 9, 300), 123
DRAWN: dict[str, Any] = {"temperature": 0.7, "seed": 1}
ASKED: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "logit_bias": {"logit_bias": {BIASED: 30.0}},
    "top_k": {**DRAWN, "top_k": 5},
    "top_p": {**DRAWN, "top_p": 0.6},
    "min_p": {**DRAWN, "min_p": 0.2},
    "filters together": {**DRAWN, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    "a filter of penalised tokens": {**DRAWN, "top_k": 3, "presence_penalty": 2.0},
}


def weights_after(model: Model, params: SamplingParams, output: Sequence[int]) -> NDArray[np.int64]:
    """What the next token is drawn from."""
    row = model.logits([*PROMPT, *output])[-1]
    return distribution(row, params, PROMPT, output, model.config.eos_token_ids)


@pytest.mark.parametrize("name", ASKED)
def test_just_what_the_sampler_can_not_choose_is_excluded(model: Model, name: str) -> None:
    """As the third token, behind two that it may have chosen; each of the likeliest, and some others."""
    request, output = greedy("", PROMPT, 3, **ASKED[name]), list[int]()
    for _ in range(2):
        output.append(int(np.argmax(weights_after(model, request.params, output))))
    weights = weights_after(model, request.params, output)
    tokens = {*np.argsort(-model.logits([*PROMPT, *output])[-1])[:20].tolist(), *PROMPT, *output, BIASED, 400}
    pairs = [(replace(request, request_id=str(token)), Answer((*output, token))) for token in tokens]
    known = Known()
    judge(model, "float32", pairs, known=known)
    excluded = wrong_choices(model, "float32", pairs, known)
    assert {*map(int, excluded)} == {token for token in tokens if not weights[token]}
    assert 0 < len(excluded) < len(tokens) and all(words.startswith("new token 3 is") for words in excluded.values())


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("filters", [{"top_p": 0.5}, {"top_p": 0.5, "top_k": 8}, {"top_p": 0.7, "min_p": 0.6}])
@pytest.mark.parametrize("step", [2.0**-20, 2.0**-5])
def test_no_token_is_excluded_or_kept_for_sure_that_rounding_lets_in_or_drops(
    step: float, filters: dict[str, Any], profile: str
) -> None:
    """In a coarse format hundreds may tie with the eighth, as once in vLLM's bfloat16: of all these the likeliest has
    less than the half that it has of eight."""
    params = SamplingParams(**filters, temperature=0.7, profile=profile)
    for seed in range(10):
        random = np.random.default_rng(seed)
        row = np.concatenate([[7.0, 5.4, 5.2, 5.1], 4.55 + random.normal(size=300) * 0.002])
        values = np.repeat((row - row.max())[None] / 0.7, len(row), axis=0)
        of_each = viewed(values, np.arange(len(row)), params, [step])
        for _ in range(10):
            logits = row + random.uniform(-step / 4.0, step / 4.0, len(row))
            _, weights = filtered(np.round(logits / step) * step, params)
            assert not np.isneginf(of_each["high"][0, weights > 0]).any()
            assert of_each["drops"][0, weights == 0].all()
        assert not of_each["drops"][0, 0], "the likeliest"


class Ignoring(Own):
    """Takes a parameter, and does nothing with it."""

    name = ""

    def add(self, request: Request) -> None:
        super().add(changed(request, **{self.name: getattr(SamplingParams(), self.name)}))


def ignoring(name: str) -> Factory:
    def make(model: str, sizes: dict[str, Any]) -> Own:
        engine = Ignoring(loaded(model, "float32"), {**PLENTY, **sizes})
        engine.name = name
        return engine

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSED)
def test_an_engine_that_ignores_a_parameter_is_wrong(model: Model, name: str) -> None:
    result = checked_target(model, PythonTarget(ignoring(name), model.path), cases=("processors",), at_once=8)
    assert result.total.verdict is Verdict.BUG
    assert name in result.total.reasons[0], result.total.reasons
    (row,) = report_of(result).figures["cases"]
    assert (row["case"], row["verdict"], row["bugs"]) == ("processors", "BUG", 0)  # no log-probability is wrong


@pytest.mark.slow
def test_a_right_engine_of_another_format_than_declared_has_no_impossible_answer(model: Model) -> None:
    """bfloat16 lets tokens in that float32 excludes."""
    result = checked_target(model, PythonTarget("engines:bfloat16", model.path), cases=("processors",), at_once=8)
    assert (result.total.verdict, result.total.errs_like) == (Verdict.DRIFT, "bfloat16")
    assert not any(answer.is_refuted for _, answer in result.pairs)
    excluded = wrong_choices(model, "float32", result.pairs, known_of(model))
    assert excluded, "the control"


@pytest.mark.slow
def test_logprobs_after_penalties_are_called_that(model: Model) -> None:
    def change(request: Request, answer: Answer) -> Answer:
        is_penalised = set(request.processors) - {"top_k", "top_p", "min_p"}
        return replace(answer, logprobs=tuple(each - 0.5 for each in answer.logprobs or ())) if is_penalised else answer

    result = checked_target(model, Changed(model, change, at_once=8), cases=("processors", "temperatures"), at_once=8)
    assert "wrong in requests with penalties or biases" in result.total.reasons[0], result.total.reasons
    assert "not of the raw logits" in result.total.reasons[0]


class FilteredGreedily(Own):
    """Chooses the likeliest token wherever a filter is requested."""

    def add(self, request: Request) -> None:
        super().add(changed(request, top_k=1) if request.is_sampled and request.processors else request)


@pytest.mark.slow
def test_filters_that_leave_one_token_are_seen(model: Model) -> None:
    target = PythonTarget(lambda path, sizes: FilteredGreedily(loaded(path), {**PLENTY, **sizes}), model.path)
    result = checked_target(model, target, cases=("processors",), at_once=8)
    (fault,) = [str(answer.error) for _, answer in result.pairs if answer.is_refuted]
    assert fault == "156 tokens with top_k or top_p or min_p are drawn as if greedily"


def test_one_draw_in_many_copies_is_one_draw(model: Model) -> None:
    """200 lines of recorded traffic that ask for the same, with the same seed: right, if once the likeliest came."""
    request = greedy("", PROMPT, 2, temperature=1.0, top_k=3, seed=1)
    answer = Answer(tuple(model.generate(PROMPT, 2).token_ids))
    known = Known()
    pairs = [(replace(request, request_id=str(index)), answer) for index in range(200)]
    judge(model, "float32", pairs, known=known)
    assert not wrong_choices(model, "float32", pairs, known)
    seeds = [(changed(request, seed=index), answer) for index in range(200)]
    assert "greedily" in "".join(wrong_choices(model, "float32", seeds, known).values()), "the control"


class Mixed(Own):
    """Penalises each request by what the one before it asked for, as if rows of a batch were exchanged."""

    before = SamplingParams()

    def add(self, request: Request) -> None:
        given, self.before = self.before, request.params
        super().add(changed(request, **{name: getattr(given, name) for name in PENALTIES}))


@pytest.mark.slow
def test_penalties_of_another_request_are_seen(model: Model) -> None:
    target = PythonTarget(lambda path, sizes: Mixed(loaded(path, "float32"), {**PLENTY, **sizes}), model.path)
    result = checked_target(model, target, cases=("processors",), at_once=8)
    assert result.total.verdict is Verdict.BUG


@pytest.mark.slow
def test_wrong_tokens_with_right_log_probabilities_are_the_samplers(model: Model) -> None:
    """Nothing that --locate records would be wrong."""

    class Penalising(Own):
        def add(self, request: Request) -> None:
            super().add(changed(request, presence_penalty=2.0))

    target = PythonTarget(lambda path, sizes: Penalising(loaded(path, "float32"), {**PLENTY, **sizes}), model.path)
    result = checked_target(model, target, cases=("neighbours", "slot-reuse"), at_once=8)
    assert result.total.causes[0].suspect == SAMPLER and result.total.causes[0].sure == "certain"
    assert result.total.counts["BUG"] > 0 and "DRIFT" not in result.total.counts
    assert not report_of(result).next_steps


def test_a_greedy_answer_with_a_penalty_need_not_be_the_likeliest(model: Model) -> None:
    """Its log-probabilities are judged as those of any other, of the raw logits."""
    request = greedy("a", PROMPT, 1, presence_penalty=1.0, case="processors")
    (position,) = judge(model, "float32", [(request, Answer((400,)))])
    assert not position.is_new and not position.is_wrong


@pytest.mark.slow
def test_a_parameter_that_is_refused_is_not_tested(model: Model) -> None:
    """And one that the engine says it lacks is not sent."""

    class Refusing(Own):
        def add(self, request: Request) -> None:
            if request.params.min_p:
                raise RequestError("min_p: unknown")
            super().add(request)

    class Lacking(Own):
        lacks = frozenset({"processors"})

    def checked(kind: type[Own]) -> Checked:
        target = PythonTarget(lambda path, sizes: kind(loaded(path, "float32"), {**PLENTY, **sizes}), model.path)
        return checked_target(model, target, cases=("short-prompts", "processors"), at_once=8)

    result = checked(Refusing)
    assert result.total.verdict is Verdict.EXACT, result.total.reasons
    assert "requests with min_p, min_tokens, allowed_token_ids, banned_token_ids" in result.not_tested
    result = checked(Lacking)
    assert not any(request.processors for request, _ in result.pairs)
    assert CASES["processors"].option in result.not_tested


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_what_a_mixture_without_routes_leaves_open_is_said(model: Model, published: Model, form: str) -> None:
    """In a coarse format any token may have gone to another expert."""
    pairs = [(greedy("a", (1, 5, 2), 1, presence_penalty=1.0, case="processors"), Answer((7,)))]
    for each in (model, published):
        is_open = each is published and form == "bfloat16"
        result = judged(each, Abilities("any"), form, [*pairs, (greedy("b", (1, 5), 1), Answer((7,)))])
        assert result.unjudged == (("a",) if is_open else ())
        assert any("in 1 request (no routes reported)" in line for line in result.not_tested) == is_open
        refuted = [request.request_id for request, answer in result.pairs if answer.is_refuted]
        assert refuted == ([] if is_open else ["a"])
