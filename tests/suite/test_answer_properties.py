"""The properties of single answers: an engine with noise of its own has them, and each wrong engine lacks its one."""

from dataclasses import replace
from pathlib import Path

import pytest

from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.suite import adapters
from lfm2np.suite.catalogue import ALL, by_id
from lfm2np.suite.runner import run_property


class Changed(adapters.Own):
    """Our engine, whose requests and completions are changed on their way."""

    def __init__(self, model, sizes):
        super().__init__(adapters.load_once(Path(model)), sizes)

    def changed_request(self, request: Request) -> Request:
        return request

    def changed_answer(self, answer: Answer) -> Answer:
        return answer

    def add(self, request):
        super().add(self.changed_request(request))

    def _completion(self, name, completion, prompt):
        return self.changed_answer(super()._completion(name, completion, prompt))


def with_params(**change):
    """An engine that replaces these parameters; a function is given the right value."""

    class Replaced(Changed):
        def changed_request(self, request):
            params = {name: value(getattr(request.params, name)) for name, value in change.items()}
            return replace(request, params=replace(request.params, **params))

    return Replaced


class OtherNoise(Changed):
    """Draws its tokens with other noise than the reference's, and says so."""

    is_lfm2np = property()  # asked as a stranger
    lacks = frozenset({"reference-noise"})

    def changed_request(self, request):
        seed = request.params.seed
        return replace(request, params=replace(request.params, seed=None if seed is None else 1000 + seed))


class ScaledLogprobs(Changed):
    def changed_answer(self, answer):
        logprobs = answer.logprobs
        return replace(answer, logprobs=None if logprobs is None else tuple(0.5 * each for each in logprobs))


class TokenByToken(Changed):
    def changed_answer(self, answer):
        tokenizer = self.engine.model.tokenizer
        pieces = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in answer.token_ids]
        return replace(answer, text="".join(pieces))


class TwoBos(Changed):
    def encode(self, prompt):
        return [self.engine.model.config.bos_token_id, *super().encode(prompt)]


WRONG = [
    ("draws-are-distributed", with_params(temperature=lambda temperature: 0.8 * temperature)),
    ("equals-reference", with_params(repetition_penalty=lambda _: 1.0)),
    ("any-noise", ScaledLogprobs),
    ("any-noise", with_params(stop_token_ids=lambda _: ())),
    ("text-is-what-the-tokens-say", TokenByToken),
    ("one-bos", TwoBos),
]


@pytest.mark.slow
@pytest.mark.parametrize(("property_id", "engine"), WRONG)
def test_a_wrong_answer_is_found(property_id, engine):
    assert run_property(by_id(property_id), engine, "ci", shrink=False).status == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("prop", ALL, ids=lambda prop: prop.id)
def test_an_engine_with_noise_of_its_own_has_every_property(prop):
    result = run_property(prop, OtherNoise, "quick", shrink=False)
    assert result.status == "passed", result.message
