"""The fixtures' config.json: what every engine needs of it, said alike in all spellings, as the scripts write it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_hand
import make_tokenizer
import pytest
from engine_keys import NEEDED, spelled
from fixture_configs import CONFIGS, TRAINED, config_text, with_old_spellings
from safetensors import safe_open
from tokenizers import Tokenizer

from lfm2np.checkpoint.config import ECHOES, load_config, parse_config
from lfm2np.errors import ConfigError

FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = ("trained", "draft", "hand")
WITH_TOKENIZER = ("trained", "draft")


def raw(name: str) -> dict[str, Any]:
    """config.json as it stands."""
    parsed: dict[str, Any] = json.loads((FIXTURES / name / "config.json").read_text())
    return parsed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", NEEDED)
def test_a_fixture_has_every_key_that_an_engine_needs(name: str, engine: str) -> None:
    assert set(NEEDED[engine]) <= set(raw(name)), engine


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
def test_the_trained_models_configs_are_what_the_scripts_write(name: str, tmp_path: Path) -> None:
    folder = FIXTURES / name
    assert (folder / "config.json").read_text() == config_text(CONFIGS[name])
    make_tokenizer.save(Tokenizer.from_file(str(folder / "tokenizer.json")), tmp_path)
    for written in ("tokenizer_config.json", "chat_template.jinja"):
        assert (folder / written).read_bytes() == (tmp_path / written).read_bytes(), written


def test_the_hand_model_is_what_its_script_writes() -> None:
    folder = FIXTURES / "hand"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == make_hand.files()


def test_a_width_that_some_engine_would_adjust_is_refused() -> None:
    with pytest.raises(ValueError, match="block_auto_adjust_ff_dim: true, expected false"):
        with_old_spellings(TRAINED | {"block_auto_adjust_ff_dim": True})


@pytest.mark.parametrize("name", WITH_TOKENIZER)
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
        found = tokenizer.token_to_id(settings[f"{token}_token"])
        assert found == raw(name)[f"{token}_token_id"] == generation[f"{token}_token_id"], token
