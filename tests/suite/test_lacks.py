"""What an engine lacks: examples are fitted to it, and where one raises the words that may be declared are named."""

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lfm2np.checkpoint.config_json import load_config
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle.engines.protocol import FEATURES, SIZES
from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.suite import adapters, shrinking
from lfm2np.suite.catalogue import by_id
from lfm2np.suite.runner import run_property, to_declare
from lfm2np.suite.strategies.features import fit
from lfm2np.suite.strategies.scenarios import Scenario
from lfm2np.suite.strategies.tiny_models import TinyModel, raw_config

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
PLAIN = Request("a", (3, 4), GREEDY)
Raw = dict[str, Any]


def asked(**params: Any) -> Request:
    return replace(PLAIN, params=replace(GREEDY, **params))


MODELS: dict[str, tuple[TinyModel, Callable[[Raw], Any]]] = {  # by word a shape, and how config.json shows it
    "odd-shapes": (TinyModel(taps=4), lambda raw: raw["conv_L_cache"] != 3),
    "mixture-of-experts": (TinyModel(experts=8, experts_a_token=4), lambda raw: raw["model_type"] == "lfm2_moe"),
    "lfm3": (TinyModel(lfm3=True), lambda raw: raw["model_type"] == "lfm3"),
}
PUBLISHED_ONLY = frozenset({"odd-shapes", "overflow"})
REQUESTS: dict[str, tuple[Request, Callable[[Request], Any]]] = {
    "samples": (asked(temperature=1.0, n=2), lambda request: request.params.n > 1),
    "processors": (asked(presence_penalty=0.5), lambda request: request.params.presence_penalty),
    "stops": (asked(stop_token_ids=(8,)), lambda request: request.params.stop_token_ids),
    "stop-strings": (
        asked(stop=("a",), include_stop_str_in_output=True),
        lambda request: request.params.stop or request.params.include_stop_str_in_output,
    ),
    "logprobs": (asked(logprobs=0), lambda request: request.params.logprobs is not None),
    "priorities": (replace(PLAIN, priority=1), lambda request: request.priority),
    "salts": (replace(PLAIN, cache_salt="x"), lambda request: request.cache_salt),
    "sampling": (asked(temperature=1.0), lambda request: request.params.temperature),
    "long-contexts": (replace(PLAIN, prompt_token_ids=(3,) * 30), lambda request: len(request.prompt_token_ids) > 14),
}


def test_every_feature_has_an_example_here():
    promises = {"refusals", "reference-noise", "overflow"}  # which no config and no parameter shows
    assert {*MODELS, *REQUESTS} == set(FEATURES) - promises
    assert not set(FEATURES) & set(SIZES)


@pytest.mark.parametrize("word", [*MODELS, *REQUESTS])
def test_an_example_is_fitted_to_what_an_engine_lacks_and_the_word_is_named(word: str):
    model, is_odd_model = MODELS.get(word, (TinyModel(), lambda raw: False))
    request, is_odd_request = REQUESTS.get(word, (PLAIN, lambda request: False))

    def is_odd(scenario: Scenario) -> bool:
        return bool(is_odd_model(raw_config(scenario.model)) or is_odd_request(scenario.requests[0]))

    scenario = Scenario(model, (request,))
    assert is_odd(scenario) and not is_odd(fit(scenario, frozenset({word})))
    assert f"\n    {word}: {FEATURES[word]}" in to_declare(scenario, frozenset())
    assert f"    {word}: " not in to_declare(scenario, frozenset({word}))


def test_a_size_is_a_word_too():
    scenario = Scenario(TinyModel(), (PLAIN,), {"block_size": 3, "num_blocks": 9})
    assert fit(scenario, frozenset({"block_size"})).sizes == {"num_blocks": 9}
    assert "    block_size: it can not be set" in to_declare(scenario, frozenset())


def test_a_model_for_published_checkpoints_has_their_shape():
    odd = TinyModel("c", 5, 3, 1, 2, 8, 7, True, True, False, 100.0, 0.1, 1.5, 24, True)
    for model in (odd, TinyModel()):
        fitted = fit(model, PUBLISHED_ONLY)
        assert fitted == replace(fitted, conv_bias=False, taps=3, tied=True, eps=1e-5, theta=1e6, overflows=False)
        assert set(fitted.layers) == {"c", "A"}
        assert fitted.head_dim == 64
        assert fitted.hidden_size == fitted.heads * 64
        assert fitted.heads == 2 * fitted.kv_heads
        assert fitted.feed_forward % 64 == fitted.vocab_size % 64 == 0


ODD_MIXTURES = (
    TinyModel(experts=12, experts_a_token=2, normalised=False, scaling=2.5, fused=True, expert_bias=False),
    TinyModel("c", experts=1, experts_a_token=1, dense_layers=0, expert_width=7),
    TinyModel("ccAc", experts=3, experts_a_token=1, dense_layers=2),
)


@pytest.mark.parametrize("odd", ODD_MIXTURES, ids=repr)
def test_a_mixture_for_published_checkpoints_has_their_shape_and_without_mixtures_nothing_of_one_is_left(
    odd: TinyModel,
):
    fitted = fit(odd, PUBLISHED_ONLY)
    config = raw_config(fitted)
    assert (config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"]) == (8, 4, 64)
    assert (config["use_expert_bias"], config["norm_topk_prob"], config["routed_scaling_factor"]) == (True, True, 1.0)
    assert 1 <= fitted.dense_layers < len(fitted.layers)
    assert not fitted.fused
    assert fit(odd, frozenset({"mixture-of-experts"})) == TinyModel(odd.layers)


def test_widths_stay_whole_under_the_rule_of_two_thirds(tmp_path: Path):
    for adjusted, width in ((True, 128), (False, 192)):
        model = fit(TinyModel(auto_adjust=adjusted, multiplier=1.5), PUBLISHED_ONLY)
        (tmp_path / "config.json").write_text(json.dumps(raw_config(model)))
        assert load_config(tmp_path).feed_forward_size == width


# --- whole engines


class Narrow(adapters.Rounded):
    """Right, but for three taps, and without penalties and LFM3; the last two are declared."""

    lacks = frozenset({"processors", "lfm3"})

    def __init__(self, model: str, sizes: dict[str, Any]) -> None:
        if json.loads((Path(model) / "config.json").read_text())["conv_L_cache"] != 3:
            raise RuntimeError("three taps only")
        super().__init__(adapters.own(model, sizes))


def test_an_engine_that_raises_is_told_what_it_may_declare():
    result = run_property(by_id("equals-reference"), Narrow, "quick", shrink=False)
    assert result.status == "failed"
    assert "RuntimeError: three taps only\n# shows it again:" in result.message
    assert "in `lacks`:\n" in result.message and f"\n    odd-shapes: {FEATURES['odd-shapes']}" in result.message


def test_a_failing_example_is_shrunk_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch):
    """Pinned: an engine that fails everything, 0.3 s a request, took up to five minutes a property."""

    class Random:
        lacks = frozenset({"samples"})

        def generate(self, requests: list[Request]) -> list[list[Answer]]:
            noise = zlib.crc32(repr(requests).encode())
            return [[Answer(tuple(noise % (5 + i) for i in range(request.params.max_tokens)))] for request in requests]

    def said_of(spent: float) -> str:
        result = run_property(by_id("equals-reference"), lambda model, sizes: Random(), "quick", spent=spent)
        assert result.status == "failed"
        return result.message

    assert "there may be smaller examples" not in said_of(0.0)
    monkeypatch.setattr(shrinking, "LEAST_SECONDS", 0)  # over before it begins, however fast the machine is
    assert said_of(shrinking.SECONDS_OF_ALL["quick"]).endswith("\nshrunk for 0 s: there may be smaller examples")
