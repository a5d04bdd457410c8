"""The fixtures' config.json: what every engine needs of it, said alike in all spellings."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
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
from torture_table import MIXTURES

import lfm2np
from lfm2np.checkpoint.config_json import ECHOES, load_config, parse_config
from lfm2np.truth import reference
from lfm2np.truth.weights import MixtureWeights

FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = ("trained", "draft", "chat", "hand")

WITH_TOKENIZER = ("trained", "draft", "moe", "lfm3")


def raw(name: str) -> dict[str, Any]:
    """config.json as it stands."""
    parsed: dict[str, Any] = json.loads((FIXTURES / name / "config.json").read_text())
    return parsed


@pytest.mark.parametrize("name", [*NAMES, "moe"])
def test_a_fixture_has_every_key_that_an_engine_needs(name: str) -> None:
    for engine, keys in (NEEDED_OF_MIXTURES if name == "moe" else NEEDED).items():
        assert keys <= raw(name).keys(), engine


def test_what_the_mixture_says_is_what_its_config_means() -> None:
    """Old spellings are few there: what LFM2-8B-A1B does not say, this does not say either."""
    said, config = raw("moe"), load_config(FIXTURES / "moe")
    assert config.mixture is not None
    meant = spelled(config) | asdict(config.mixture)
    assert {key: meant[key] for key in said if key in meant} == {key: said[key] for key in said if key in meant}
    assert not [key for key in said if key.startswith("block_")]
    assert said["architectures"] == ["Lfm2MoeForCausalLM"]


def test_the_mixture_is_stored_as_published_ones_are() -> None:
    """One tensor an expert, in bfloat16; the biases in float32; below three million parameters and six megabytes."""
    path, config = FIXTURES / "moe" / "model.safetensors", load_config(FIXTURES / "moe")
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


def test_the_torture_mixtures_have_every_switch_on_and_off() -> None:
    mixtures = [load_config(FIXTURES / "torture" / name).mixture for name in MIXTURES]
    rows = [asdict(mixture) for mixture in mixtures if mixture]
    assert {row["use_expert_bias"] for row in rows} == {row["norm_topk_prob"] for row in rows} == {True, False}
    assert {row["routed_scaling_factor"] for row in rows} == {1.0, 2.5, 0.5}
    assert {row["num_dense_layers"] for row in rows} == {0, 1, 2}
    counts = {(row["num_experts_per_tok"] == 1, row["num_experts_per_tok"] == row["num_experts"]) for row in rows}
    assert counts == {(True, True), (True, False), (False, True), (False, False)}
    assert {mixture.fused for mixture in MIXTURES.values()} == {True, False}


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
    """Some engines multiply and round the width whatever the flag says: neither changes it."""
    said, meant = raw(name), spelled(load_config(FIXTURES / name))
    assert {key: said[key] for key in meant} == meant
    assert said["torch_dtype"] == said["dtype"]
    assert said["architectures"] == ["Lfm2ForCausalLM"]
    assert said["block_auto_adjust_ff_dim"] is False and said["block_ffn_dim_multiplier"] == 1.0
    assert said["intermediate_size"] % said["block_multiple_of"] == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("old", [True, False], ids=["old", "new"])
def test_a_config_in_one_spelling_only_means_the_same(name: str, old: bool) -> None:
    pairs = {"layer_types": "full_attn_idxs", "intermediate_size": "block_ff_dim", "rope_parameters": "rope_theta"}
    pairs |= {"tie_word_embeddings": "tie_embedding", "dtype": "torch_dtype"}
    dropped = set(pairs) if old else set(pairs.values()) | set(ECHOES)
    left = {key: said for key, said in raw(name).items() if key not in dropped}
    assert parse_config(left, "here") == parse_config(raw(name), "here")


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
