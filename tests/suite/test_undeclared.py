"""What an engine raises on a shape or a parameter: the word that spares it is named, and the suite goes on without."""

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lfm2np.checkpoint.config_json import load_config
from lfm2np.engine.sampling.params import SamplingParams
from lfm2np.oracle.engines.protocol import FEATURES, PUBLISHED_ONLY, SIZES
from lfm2np.oracle.engines.records import Answer, Request
from lfm2np.suite import adapters, shrinking
from lfm2np.suite.catalogue import by_id
from lfm2np.suite.properties.property import Violation
from lfm2np.suite.runner import Terms, run_property
from lfm2np.suite.strategies.features import fit, line_of, sparing_words
from lfm2np.suite.strategies.scenarios import Scenario
from lfm2np.suite.strategies.tiny_models import TinyModel, raw_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
PLAIN = Request("a", (3, 4), GREEDY)
Raw = dict[str, Any]


def asked(**params: Any) -> Request:
    return replace(PLAIN, params=replace(GREEDY, **params))


MODELS: dict[str, tuple[TinyModel, Callable[[Raw], Any]]] = {  # by word a shape, and how config.json shows it
    "convolution-only": (TinyModel(layers="cc"), lambda raw: "full_attention" not in raw["layer_types"]),
    "attention-only": (TinyModel(layers="A"), lambda raw: "conv" not in raw["layer_types"]),
    "biases": (TinyModel(conv_bias=True), lambda raw: raw["conv_bias"]),
    "taps": (TinyModel(taps=4), lambda raw: raw["conv_L_cache"] != 3),
    "untied": (TinyModel(tied=False), lambda raw: not raw["tie_word_embeddings"]),
    "odd-heads": (TinyModel(heads=3, kv_heads=1), lambda raw: raw["num_attention_heads"] % 2),
    "head-dims": (TinyModel(head_dim=2), lambda raw: raw["head_dim"] != 64),
    "widths": (
        TinyModel(heads=4, kv_heads=2),
        lambda raw: raw["hidden_size"] != raw["num_attention_heads"] * raw["head_dim"],
    ),
    "constants": (TinyModel(eps=0.1), lambda raw: raw["norm_eps"] != 1e-5),
    "odd-mixtures": (
        TinyModel(experts=8, experts_a_token=4, expert_bias=False),
        lambda raw: raw.get("use_expert_bias") is False,
    ),
    "mixture-of-experts": (TinyModel(experts=8, experts_a_token=4), lambda raw: raw["model_type"] == "lfm2_moe"),
    "lfm3": (TinyModel(lfm3=True), lambda raw: raw["model_type"] == "lfm3"),
}
REQUESTS: dict[str, tuple[Request, Callable[[Request], Any]]] = {
    "samples": (asked(temperature=1.0, n=2), lambda request: request.params.n > 1),
    "processors": (asked(presence_penalty=0.5), lambda request: request.params.presence_penalty),
    "stops": (asked(stop_token_ids=(8,)), lambda request: request.params.stop_token_ids),
    "stop-strings": (asked(stop=("a",)), lambda request: request.params.stop),
    "logprobs": (asked(logprobs=0), lambda request: request.params.logprobs is not None),
    "priorities": (replace(PLAIN, priority=1), lambda request: request.priority),
    "salts": (replace(PLAIN, cache_salt="x"), lambda request: request.cache_salt),
    "sampling": (asked(temperature=1.0), lambda request: request.params.temperature),
    "long-contexts": (replace(PLAIN, prompt_token_ids=(3,) * 30), lambda request: len(request.prompt_token_ids) > 14),
}


def test_every_feature_has_an_example_here():
    promises = {"refusals", "reference-noise", "overflow"}  # which no config and no parameter shows
    assert {*MODELS, *REQUESTS} == set(FEATURES) - promises
    assert set(FEATURES) >= PUBLISHED_ONLY
    assert not set(FEATURES) & set(SIZES)


@pytest.mark.parametrize("word", [*MODELS, *REQUESTS])
def test_the_word_that_spares_a_shape_or_a_parameter_is_found(word: str):
    model, is_odd_model = MODELS.get(word, (TinyModel(), lambda raw: False))
    request, is_odd_request = REQUESTS.get(word, (PLAIN, lambda request: False))

    def attempt(scenario: Scenario) -> None:
        if is_odd_model(raw_config(scenario.model)):
            raise ValueError(word)
        assert not is_odd_request(scenario.requests[0])  # an engine's assertion is no verdict of the suite

    assert sparing_words(Scenario(model, (request,)), frozenset(), ("generate",), attempt) == {word}


def test_a_size_that_raises_is_a_word_too():
    def attempt(scenario: Scenario) -> None:
        if scenario.sizes.get("block_size", 16) % 16:
            raise ValueError("block_size")

    scenario = Scenario(TinyModel(), (PLAIN,), {"block_size": 3, "num_blocks": 9})
    assert sparing_words(scenario, frozenset(), (), attempt) == {"block_size"}
    assert fit(scenario, frozenset({"block_size"})).sizes == {"num_blocks": 9}


def test_several_words_are_named_if_one_is_not_enough():
    def attempt(scenario: Scenario) -> None:
        if scenario.model.conv_bias or scenario.model.taps != 3:
            raise ValueError("a kernel for three taps without biases")

    scenario = Scenario(TinyModel(conv_bias=True, taps=2, tied=False), (PLAIN,))
    assert sparing_words(scenario, frozenset(), (), attempt) == {"biases", "taps"}


def test_what_no_word_spares_stays_what_it_is_and_a_wrong_answer_is_none_of_it():
    def always(scenario: Scenario) -> None:
        raise ValueError("always")

    def wrong(scenario: Scenario) -> None:
        raise Violation("wrong") if not scenario.model.conv_bias else ValueError("biases")

    scenario = Scenario(TinyModel(conv_bias=True), (PLAIN,))
    assert sparing_words(scenario, frozenset(), (), always) == frozenset()
    assert sparing_words(scenario, frozenset(), (), wrong) == {"biases"}


@pytest.mark.parametrize("seed", range(2))
def test_a_model_for_published_checkpoints_has_their_shape(seed: int):
    odd = TinyModel("c", 5, 3, 1, 2, 8, 7, True, True, False, 100.0, 0.1, 1.5, 24, True, seed=seed)
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
def test_a_mixture_for_published_checkpoints_has_their_shape(odd: TinyModel):
    fitted = fit(odd, PUBLISHED_ONLY)
    config = raw_config(fitted)
    assert (config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"]) == (8, 4, 64)
    assert (config["use_expert_bias"], config["norm_topk_prob"], config["routed_scaling_factor"]) == (True, True, 1.0)
    assert 1 <= fitted.dense_layers < len(fitted.layers)
    assert not fitted.fused


@pytest.mark.parametrize("odd", ODD_MIXTURES, ids=repr)
def test_without_mixtures_nothing_of_one_is_left(odd: TinyModel):
    fitted = fit(odd, frozenset({"mixture-of-experts"}))
    assert fitted == TinyModel(odd.layers)


def test_widths_stay_whole_under_the_rule_of_two_thirds(tmp_path: Path):
    for adjusted, width in ((True, 128), (False, 192)):
        model = fit(TinyModel(auto_adjust=adjusted, multiplier=1.5), PUBLISHED_ONLY)
        (tmp_path / "config.json").write_text(json.dumps(raw_config(model)))
        assert load_config(tmp_path).feed_forward_size == width


def test_the_line_to_add_is_python():
    assert line_of(frozenset({"stops", "biases"})) == 'lacks = {"stops", "biases"}'
    assert line_of(PUBLISHED_ONLY) == "lacks = PUBLISHED_ONLY"
    line = line_of(PUBLISHED_ONLY | {"sampling", "block_size"})
    assert line == 'lacks = PUBLISHED_ONLY | {"sampling", "block_size"}'
    names: dict[str, Any] = {"PUBLISHED_ONLY": PUBLISHED_ONLY}
    exec(line, names)
    assert names["lacks"] == PUBLISHED_ONLY | {"sampling", "block_size"}


# --- whole engines


class Narrow(adapters.Rounded):
    """Right, but for three taps, and without penalties and LFM3; the last two are declared."""

    lacks = frozenset({"processors", "lfm3"})

    def __init__(self, model: str, sizes: dict[str, Any]) -> None:
        if json.loads((Path(model) / "config.json").read_text())["conv_L_cache"] != 3:
            raise RuntimeError("three taps only")
        super().__init__(adapters.own(model, sizes))


@pytest.mark.slow
def test_an_engine_that_raises_is_told_what_to_declare_and_judged_without_it():
    result = run_property(by_id("equals-reference"), Narrow, "quick")
    assert (result.status, result.undeclared) == ("failed", {"taps"})
    assert "RuntimeError: three taps only\n# shows it again:" in result.message
    assert f'lacks = {{"processors", "taps", "lfm3"}}\n    taps: {FEATURES["taps"]}\n' in result.message
    assert re.search(r"Without that: it holds, with \d+ examples\.", result.message)
    assert result.advice == f'lacks = {{"processors", "taps", "lfm3"}}\n    taps: {FEATURES["taps"]}'
    after = run_property(by_id("wide-batches"), Narrow, "quick", terms=Terms(lacks=result.undeclared))
    assert (after.status, after.message) == ("passed", "")


def test_a_wrong_answer_is_told_besides():
    class Wrong(Narrow):
        def generate(self, requests):
            return [[Answer((1,) * request.params.max_tokens)] for request in requests]

    def factory(model, sizes):
        return Wrong(model, sizes)

    assert "the reference has" in run_property(by_id("equals-reference"), factory, "ci", shrink=False).message


def test_what_a_property_is_about_is_declared_before_any_shape():
    class Overflowing(Narrow):
        """Can't be made for a model that overflows, nor for one without convolution."""

        def __init__(self, model: str, sizes: dict[str, Any]) -> None:
            tiny = json.loads((Path(model) / "tiny.json").read_text())
            if tiny["overflows"]:
                raise OverflowError("too large")
            super().__init__(model, sizes)

    def factory(model, sizes):
        return Overflowing(model, sizes)

    result = run_property(by_id("overflow-stays-home"), factory, "quick", shrink=False)
    assert (result.status, result.undeclared) == ("failed", {"overflow"})
    assert "nothing of this property is left" in result.message
    later = run_property(by_id("overflow-stays-home"), factory, "quick", terms=Terms(lacks=frozenset({"overflow"})))
    assert (later.status, later.message) == ("skipped", "the engine lacks overflow, and does not declare it")


@pytest.mark.parametrize(("name", "word"), [("refusals", "refusals"), ("overflow-stays-home", "overflow")])
def test_an_engine_that_promises_no_refusal_or_error_is_told_how_to_say_so(name: str, word: str):
    """Pinned: both failures named what was expected, and no word of `lacks`."""

    class Lenient(adapters.Rounded):
        lacks = frozenset({"biases"})

        def __init__(self, model: str, sizes: dict[str, Any]) -> None:
            super().__init__(adapters.own(model, sizes))
            self.ended: dict[str, list[Answer]] = {}

        def add(self, request: Request) -> None:
            if request.request_id in ("bad", "again"):
                self.ended[request.request_id] = [Answer((), finish_reason="length")]
            else:
                self._engine.add(request)

        @property
        def has_unfinished(self) -> bool:
            return bool(self.ended) or self._engine.has_unfinished

        def step(self) -> dict[str, list[Answer]]:
            ended, self.ended = self.ended, {}
            return {**ended, **(self._engine.step() if self._engine.has_unfinished else {})}

    def factory(model: str, sizes: dict[str, Any]) -> Lenient:
        return Lenient(model, sizes)

    result = run_property(by_id(name), factory, "ci", shrink=False)
    assert (result.status, result.undeclared) == ("failed", frozenset())
    assert result.message.endswith(
        "If the engine promises no such thing, let its class say so.\n"
        f"lacks = {{{', '.join(f'{chr(34)}{one}{chr(34)}' for one in sorted(('biases', word)))}}}\n"
        f"    {word}: {FEATURES[word]}"
    )
    Lenient.lacks |= {word}
    assert run_property(by_id(name), factory, "quick").message == f"the engine lacks {word}"


def test_a_failing_example_is_shrunk_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch):
    """Pinned: an engine that fails everything, 0.3 s a request, took up to five minutes a property."""

    class Random:
        lacks = frozenset({"samples"})

        def generate(self, requests: list[Request]) -> list[list[Answer]]:
            noise = zlib.crc32(repr(requests).encode())
            return [[Answer(tuple(noise % (5 + i) for i in range(request.params.max_tokens)))] for request in requests]

    def said_of(terms: Terms) -> str:
        result = run_property(by_id("equals-reference"), lambda model, sizes: Random(), "quick", terms=terms)
        assert result.status == "failed"
        return result.message

    assert "there may be smaller examples" not in said_of(Terms())
    monkeypatch.setattr(shrinking, "LEAST_SECONDS", 0)  # over before it begins, however fast the machine is
    spent = Terms(spent=shrinking.SECONDS_OF_ALL["quick"])
    assert said_of(spent).endswith("\nshrunk for 0 s: there may be smaller examples")


def test_an_engine_for_dense_models_is_told_so_and_judged_on_them():
    class Dense(adapters.Rounded):
        def __init__(self, model: str, sizes: dict[str, Any]) -> None:
            kind = json.loads((Path(model) / "config.json").read_text())["model_type"]
            if kind != "lfm2":
                raise KeyError(kind)
            super().__init__(adapters.own(model, sizes))

    def factory(model, sizes):
        return Dense(model, sizes)

    result = run_property(by_id("equals-reference"), factory, "quick", shrink=False)
    assert (result.status, result.undeclared) == ("failed", {"mixture-of-experts", "lfm3"})
    assert result.advice == (
        'lacks = {"mixture-of-experts", "lfm3"}\n    mixture-of-experts: models of model_type lfm2_moe\n'
        "    lfm3: models of model_type lfm3"
    )
    assert "Without that: it holds" in result.message
    after = run_property(by_id("wide-batches"), factory, "quick", terms=Terms(lacks=result.undeclared))
    assert (after.status, after.message) == ("passed", "")


@pytest.mark.slow
def test_an_engine_for_published_shapes_alone_is_met_with_these():
    class Published(Narrow):
        lacks = PUBLISHED_ONLY | {"lfm3"}

        def __init__(self, model: str, sizes: dict[str, Any]) -> None:
            config = json.loads((Path(model) / "config.json").read_text())
            assert config["head_dim"] == 64
            super().__init__(model, sizes)

    def factory(model, sizes):
        return Published(model, sizes)

    result = run_property(by_id("equals-reference"), factory, "quick")
    assert (result.status, result.message) == ("passed", "")

    def none(model, sizes):
        raise OSError("no such device")

    result = run_property(by_id("equals-reference"), none, "quick")
    assert (result.status, result.message) == ("failed", "the factory makes no engine: OSError: no such device")
