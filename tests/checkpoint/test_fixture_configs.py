"""The fixtures' config.json: what every engine needs of it, said alike in all spellings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import evaluate
import make_hand
import make_tokenizer
import numpy as np
import pytest
from engine_keys import NEEDED, NEEDED_OF_MIXTURES, spelled
from safetensors import safe_open
from tokenizers import Tokenizer

import lfm2np
from lfm2np.checkpoint.config_json import ECHOES, load_config, parse_config
from lfm2np.errors import ConfigError
from lfm2np.truth import reference
from lfm2np.truth.weights import MixtureWeights

FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = ("trained", "draft", "chat", "hand")
MIXTURES = ("moe",)
WITH_TOKENIZER = ("trained", "draft", "moe", "lfm3")


def raw(name: str) -> dict[str, Any]:
    """config.json as it stands."""
    parsed: dict[str, Any] = json.loads((FIXTURES / name / "config.json").read_text())
    return parsed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", NEEDED)
def test_a_fixture_has_every_key_that_an_engine_needs(name: str, engine: str) -> None:
    assert NEEDED[engine] <= set(raw(name)), engine


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("engine", NEEDED_OF_MIXTURES)
def test_a_mixture_has_every_key_that_an_engine_needs(name: str, engine: str) -> None:
    assert NEEDED_OF_MIXTURES[engine] <= set(raw(name)), engine


@pytest.mark.parametrize("name", MIXTURES)
def test_what_a_mixture_says_is_what_its_config_means(name: str) -> None:
    """Old spellings are few there: what LFM2-8B-A1B does not say, this does not say either."""
    said, config = raw(name), load_config(FIXTURES / name)
    assert config.mixture is not None
    meant = spelled(config) | asdict(config.mixture)
    assert {key: meant[key] for key in said if key in meant} == {key: said[key] for key in said if key in meant}
    assert not [key for key in said if key.startswith("block_")]
    assert said["architectures"] == ["Lfm2MoeForCausalLM"]


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_stored_as_published_ones_are(name: str) -> None:
    """One tensor an expert, in bfloat16; the biases in float32; below three million parameters and six megabytes."""
    path, config = FIXTURES / name / "model.safetensors", load_config(FIXTURES / name)
    assert config.mixture is not None
    with safe_open(str(path), framework="numpy") as file:
        stored = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        shapes = {key: tuple(value.get_shape()) for key, value in stored.items()}
        types = {key: value.get_dtype() for key, value in stored.items()}
    prefix = "model.layers.{}.feed_forward.experts.{}.w1.weight"
    experts = {prefix.format(i, e) for i in range(2, 6) for e in range(8)}
    assert {key for key in shapes if key.endswith("w1.weight") and "experts" in key} == experts
    assert {shapes[key] for key in experts} == {(config.mixture.moe_intermediate_size, config.hidden_size)}
    assert {kind for key, kind in types.items() if "expert_bias" in key} == {"F32"}
    assert {kind for key, kind in types.items() if "expert_bias" not in key} == {"BF16"}
    assert sum(math.prod(shape) for shape in shapes.values()) < 3_000_000
    assert path.stat().st_size < 6_000_000


@pytest.mark.parametrize("mistake", evaluate.WRONG_ROUTES)
def test_each_wrong_route_differs_from_the_right_one(mistake: str) -> None:
    model = lfm2np.load(lfm2np.moe_fixture())
    mixture = model.weights.layers[3].feed_forward
    assert isinstance(mixture, MixtureWeights)
    x = np.random.default_rng(0).standard_normal((50, model.config.hidden_size)).astype(np.float32)
    right = reference.route(mixture, model.config, model.numerics, x)
    with evaluate.inject(evaluate.WRONG_ROUTES[mistake]):
        wrong = reference.route(mixture, model.config, model.numerics, x)
    assert not all(np.array_equal(array, other) for array, other in zip(right, wrong, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_every_spelling_says_what_the_config_means(name: str) -> None:
    said, meant = raw(name), spelled(load_config(FIXTURES / name))
    assert {key: said[key] for key in meant} == meant
    assert said["torch_dtype"] == said["dtype"]
    assert said["architectures"] == ["Lfm2ForCausalLM"]


def round_up(width: int, multiple: int) -> int:
    return multiple * ((width + multiple - 1) // multiple)


def width_in_transformers(width: int, config: dict[str, Any]) -> int:
    """Rounds only where it multiplies; SGLang likewise."""
    if config["block_auto_adjust_ff_dim"]:
        width = int(2 * width / 3)
        if config["block_ffn_dim_multiplier"] is not None:
            width = round_up(int(config["block_ffn_dim_multiplier"] * width), config["block_multiple_of"])
    return width


def width_in_engines(width: int, config: dict[str, Any]) -> int:
    """vLLM, mlx-lm, llama.cpp's converter: as transformers, but rounds without a multiplier, too."""
    if config["block_auto_adjust_ff_dim"]:
        width = int(2 * width / 3)
        if config["block_ffn_dim_multiplier"] is not None:
            width = int(config["block_ffn_dim_multiplier"] * width)
        width = round_up(width, config["block_multiple_of"])
    return width


def width_unasked(width: int, config: dict[str, Any]) -> int:
    """A reader that takes the flag for the two thirds alone, and multiplies and rounds whatever it says."""
    return round_up(int((config["block_ffn_dim_multiplier"] or 1.0) * width), config["block_multiple_of"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["block_ff_dim", "intermediate_size"])
@pytest.mark.parametrize("width", [width_in_transformers, width_in_engines, width_unasked])
def test_the_width_is_that_of_w1_however_an_engine_adjusts_it(
    name: str, key: str, width: Callable[[int, dict[str, Any]], int]
) -> None:
    with safe_open(str(FIXTURES / name / "model.safetensors"), framework="numpy") as file:
        rows = file.get_slice("model.layers.0.feed_forward.w1.weight").get_shape()[0]
    assert width(raw(name)[key], raw(name)) == rows == load_config(FIXTURES / name).feed_forward_size


# Field of ModelConfig, what it is then, and the two spellings of that.
SPELLINGS: dict[str, tuple[object, dict[str, object], dict[str, object]]] = {
    "feed_forward_size": (10, {"block_ff_dim": 10}, {"intermediate_size": 10}),
    "tie_word_embeddings": (False, {"tie_embedding": False}, {"tie_word_embeddings": False}),
    "rope_theta": (5e5, {"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", [*SPELLINGS, "layer_types"])
@pytest.mark.parametrize("alone", ["old", "new"])
def test_each_spelling_alone_is_read(name: str, field: str, alone: str) -> None:
    """Another value than the fixture's, lest a default pass for what was read."""
    config = parse_config(raw(name), "here")
    turned = ["conv" if kind == "full_attention" else "full_attention" for kind in config.layer_types]
    indices = [i for i, kind in enumerate(turned) if kind == "full_attention"]
    spellings = SPELLINGS | {"layer_types": (tuple(turned), {"full_attn_idxs": indices}, {"layer_types": turned})}
    value, old, new = spellings[field]
    assert value != getattr(config, field)
    left = {key: said for key, said in raw(name).items() if key not in {**old, **new, "theta": None}}
    assert parse_config(left | (old if alone == "old" else new), "here") == replace(config, **{field: value})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("old", [True, False], ids=["old", "new"])
def test_a_config_in_one_spelling_only_means_the_same(name: str, old: bool) -> None:
    pairs = {"layer_types": "full_attn_idxs", "intermediate_size": "block_ff_dim", "rope_parameters": "rope_theta"}
    pairs |= {"tie_word_embeddings": "tie_embedding", "dtype": "torch_dtype"}
    dropped = set(pairs) if old else set(pairs.values()) | set(ECHOES)
    left = {key: said for key, said in raw(name).items() if key not in dropped}
    assert parse_config(left, "here") == parse_config(raw(name), "here")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["block_dim", "conv_dim", "conv_dim_out", "num_heads", "block_norm_eps", "theta"])
def test_a_key_that_transformers_ignores_may_not_contradict_the_one_that_counts(name: str, key: str) -> None:
    config = raw(name)
    with pytest.raises(ConfigError, match=rf"^here: {key}: .*, expected {ECHOES[key]}={config[key]}"):
        parse_config(config | {key: config[key] * 2}, "here")


@pytest.mark.parametrize("name", NAMES)
def test_full_attn_idxs_may_not_contradict_layer_types(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^here: full_attn_idxs: \[\] contradicts layer_types"):
        parse_config(raw(name) | {"full_attn_idxs": []}, "here")


@pytest.mark.parametrize("name", WITH_TOKENIZER)
def test_the_tokenizers_files_are_what_the_scripts_write(name: str, tmp_path: Path) -> None:
    folder = FIXTURES / name
    make_tokenizer.save(Tokenizer.from_file(str(folder / "tokenizer.json")), tmp_path)
    for written in ("tokenizer_config.json", "chat_template.jinja"):
        assert (folder / written).read_bytes() == (tmp_path / written).read_bytes(), written


def test_the_hand_model_is_what_its_script_writes() -> None:
    assert make_hand.FILE.read_bytes() == make_hand.content()


@pytest.mark.parametrize("name", (*WITH_TOKENIZER, "chat"))
def test_the_special_tokens_have_the_ids_that_both_configs_name(name: str) -> None:
    """AutoTokenizer, which vLLM, SGLang, mlx-lm and llama.cpp's converter use, takes the class and the tokens from
    tokenizer_config.json; the ids at which a server stops come from the other two files."""
    folder = FIXTURES / name
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["model_max_length"] == raw(name)["max_position_embeddings"]
    assert tokenizer.get_vocab_size() <= raw(name)["vocab_size"]
    for token in ("bos", "eos", "pad"):
        token_id = tokenizer.token_to_id(settings[f"{token}_token"])
        assert token_id == raw(name)[f"{token}_token_id"] == generation[f"{token}_token_id"], token
