"""What an engine raises on a shape or a parameter: the word that spares it is named, and the suite goes on without."""

import json
import zlib
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
ODD_MODELS = {
    "convolution-only": TinyModel(layers="cc"),
    "attention-only": TinyModel(layers="A"),
    "biases": TinyModel(conv_bias=True),
    "taps": TinyModel(taps=4),
    "untied": TinyModel(tied=False),
    "odd-heads": TinyModel(heads=3, kv_heads=1),
    "head-dims": TinyModel(head_dim=2),
    "widths": TinyModel(heads=4, kv_heads=2),
    "constants": TinyModel(eps=0.1),
    "odd-mixtures": TinyModel(experts=8, experts_a_token=4, expert_bias=False),
    "mixture-of-experts": TinyModel(experts=8, experts_a_token=4),
    "lfm3": TinyModel(lfm3=True),
    "overflow": TinyModel(tied=False, overflows=True),
}
ODD_REQUESTS = {
    "samples": replace(PLAIN, params=replace(GREEDY, temperature=1.0, n=2)),
    "processors": replace(PLAIN, params=replace(GREEDY, presence_penalty=0.5)),
    "stops": replace(PLAIN, params=replace(GREEDY, stop_token_ids=(8,))),
    "stop-strings": replace(PLAIN, params=replace(GREEDY, stop=("a",))),
    "logprobs": replace(PLAIN, params=replace(GREEDY, logprobs=0)),
    "priorities": replace(PLAIN, priority=1),
    "salts": replace(PLAIN, cache_salt="x"),
    "sampling": replace(PLAIN, params=replace(GREEDY, temperature=1.0)),
    "long-contexts": replace(PLAIN, prompt_token_ids=(3,) * 30),
}


def refuses_model(word: str, model: TinyModel) -> bool:
    """What an engine that lacks the word can't load, said by config.json alone; overflow is seen in what it gives."""
    config = raw_config(model)
    kinds = config["layer_types"]
    heads, groups = int(str(config["num_attention_heads"])), int(str(config["num_key_value_heads"]))
    return {
        "convolution-only": "full_attention" not in kinds,  # type: ignore[operator]
        "attention-only": "conv" not in kinds,  # type: ignore[operator]
        "biases": config["conv_bias"],
        "taps": config["conv_L_cache"] != 3,
        "untied": not config["tie_word_embeddings"],
        "odd-heads": heads % 2 or groups % 2 or heads == groups,
        "head-dims": config["head_dim"] != 64,
        "widths": config["hidden_size"] != heads * int(str(config["head_dim"])),
        "constants": config["norm_eps"] != 1e-5,
        "odd-mixtures": config.get("use_expert_bias") is False,
        "mixture-of-experts": config["model_type"] == "lfm2_moe",
        "lfm3": config["model_type"] == "lfm3",
        "overflow": model.overflows,
    }[word]  # type: ignore[return-value]


def refuses_request(word: str, request: Request) -> bool:
    params = request.params
    return {
        "samples": params.n > 1,
        "processors": params.presence_penalty != 0.0,
        "stops": bool(params.stop_token_ids),
        "stop-strings": bool(params.stop),
        "logprobs": params.logprobs is not None,
        "priorities": request.priority != 0,
        "salts": request.cache_salt != "",
        "sampling": params.temperature != 0.0,
        "long-contexts": len(request.prompt_token_ids) > 14,
    }[word]


def test_every_feature_has_an_example_here():
    promises = {"refusals", "reference-noise"}  # which no model and no parameter breaks
    assert {*ODD_MODELS, *ODD_REQUESTS} == set(FEATURES) - promises
    assert set(FEATURES) >= PUBLISHED_ONLY
    assert not set(FEATURES) & set(SIZES)


@pytest.mark.parametrize("word", ODD_MODELS)
def test_the_word_that_spares_a_shape_is_found(word: str):
    def attempt(scenario: Scenario) -> None:
        if refuses_model(word, scenario.model):
            raise ValueError(word)

    scenario = Scenario(ODD_MODELS[word], (PLAIN,))
    assert sparing_words(scenario, frozenset(), ("generate",), attempt) == {word}


@pytest.mark.parametrize("word", ODD_REQUESTS)
def test_the_word_that_spares_a_parameter_is_found(word: str):
    def attempt(scenario: Scenario) -> None:
        assert not refuses_request(word, scenario.requests[0])  # an engine's assertion is no verdict of the suite

    scenario = Scenario(TinyModel(), (ODD_REQUESTS[word],))
    assert sparing_words(scenario, frozenset(), ("generate",), attempt) == {word}


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
    assert "Without that: it holds, with 16 examples." in result.message
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
