"""config.json of an LFM3: defaults, the two readings of the rotation's label, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import lfm2np
from lfm2np.checkpoint.config_json import DEFAULT_ROPES, LABEL_IN_DOUBT, parse_config
from lfm2np.commands.cli.program import main
from lfm2np.engine.work.place import model_of, source_of
from lfm2np.errors import CheckpointError, ConfigError
from lfm2np.suite.strategies.tiny_models import TinyModel, checkpoint, raw_config
from lfm2np.truth.rope import Rope, inverse_frequencies

MINIMAL = {"model_type": "lfm3", "architectures": ["Lfm3ForCausalLM"]}


def test_absent_keys_are_those_of_lfm3_1_7b():
    config = parse_config(MINIMAL, "config.json")
    assert (config.hidden_size, config.feed_forward_size, config.num_hidden_layers) == (2048, 7680, 24)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (16, 4, 128)
    assert (config.conv_L_cache, config.sliding_window, config.vocab_size) == (7, 256, 128_000)
    assert config.layer_types[:7] == (
        *("conv", "conv", "full_attention", "conv"),
        *("sliding_attention", "conv", "full_attention"),
    )
    assert config.use_sandwich_norm and config.use_attention_gate and not config.attention_bias
    assert config.rope("full_attention") == Rope(1e6, 0.5, True)
    assert config.rope("sliding_attention") == Rope(1e4, 1.0, True)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_ids) == (124_893, 124_894, (124_900,))


def test_the_first_half_of_the_frequencies_turns():
    """As transformers' "proportional": of 24 pairs of a head of 48 the first 12, with the frequencies of all 24."""
    half, whole = (inverse_frequencies(48, Rope(1e6, share)) for share in (0.5, 1.0))
    assert np.array_equal(half[:12], whole[:12]) and not half[12:].any() and whole[12:].all()


@pytest.mark.parametrize(
    ("kind", "label", "reading", "share"),
    [
        ("full_attention", "proportional", "trained", 0.5),
        ("full_attention", "proportional", "transformers", 0.5),
        ("full_attention", "default", "trained", 0.5),
        ("full_attention", "default", "transformers", 1.0),
        ("sliding_attention", "proportional", "trained", 0.5),
        ("sliding_attention", "default", "trained", 1.0),  # of it nobody says that something else was trained
    ],
)
def test_the_readings_of_a_label(kind: str, label: str, reading: str, share: float):
    ropes: dict[str, dict[str, object]] = {kind: dict(entry) for kind, entry in DEFAULT_ROPES.items()}
    ropes[kind] = {"rope_type": label, "rope_theta": 1e5, "partial_rotary_factor": 0.5}
    config = parse_config({**MINIMAL, "rope_parameters": ropes}, "config.json", reading)
    assert config.rope(kind) == Rope(1e5, share, True)
    assert getattr(config, LABEL_IN_DOUBT[kind]) == (label == "default")


def test_doubtful_labels_are_told_in_one_line_and_each_reading_is_another_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Results of both must not be mixed, and a worker process reads as its parent does."""
    tiny = TinyModel(lfm3=True, layers="cSA", head_dim=8)
    shutil.copytree(checkpoint(tiny), tmp_path, dirs_exist_ok=True)
    raw = raw_config(tiny)
    for entry in raw["rope_parameters"].values():  # type: ignore[attr-defined]
        entry |= {"rope_type": "default", "partial_rotary_factor": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    window = r"rope_parameters\.sliding_attention: labelled .* read as transformers reads it: all of each head"
    with pytest.warns(
        UserWarning, match=rf'"default" .* "proportional", as it was trained: 0\.5 of .*; {window}'
    ) as told:
        trained = lfm2np.load(tmp_path)
    assert len(told) == 1
    with pytest.warns(UserWarning, match=rf"full_attention: .* read as transformers reads it: all of .*; {window}"):
        whole = lfm2np.load(tmp_path, rope="transformers")
        assert model_of(source_of(whole)).config == whole.config
    assert trained.sha256 != whole.sha256
    assert main(["info", "--model", str(tmp_path)]) == 0
    assert "rope_parameters.sliding_attention: labelled" in capsys.readouterr().out


def test_compare_refuses_lfm3s_of_two_windows(capsys: pytest.CaptureFixture[str]):
    base, other = (str(checkpoint(TinyModel(lfm3=True, layers="cSA", window=window))) for window in (3, 4))
    assert main(["compare", base, other, "--text", "x"]) == 2
    assert "sliding_window: 4, expected 3, as " in capsys.readouterr().err


def test_info_says_what_an_lfm3_is(capsys: pytest.CaptureFixture[str]):
    assert main(["info", "--model", str(checkpoint(TinyModel(lfm3=True, layers="cSA")))]) == 0
    text = capsys.readouterr().out
    assert "3: cSA (c = convolution, A = attention, S = attention in a window)" in text
    assert "sliding window                3 positions (S), their rope_theta 10\n" in text
    assert "share of a head that turns    0.5 in A, 1 in S\n" in text
    assert "norms after, gate, biases     true, true, false\n" in text


def of_full(**entry: object) -> dict[str, object]:
    return {"rope_parameters": {"full_attention": entry, "sliding_attention": {"rope_theta": 1e4}}}


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "a key of LFM2": ({"block_ff_dim": 10}, "block_ff_dim: 10, expected null or no such key in an lfm3"),
    "attention's list of LFM2": ({"full_attn_idxs": [1]}, "full_attn_idxs"),
    "a flat rotation": ({"rope_parameters": {"rope_theta": 1e4}}, "expected an object for each of full_attention"),
    "no rotation": ({"rope_parameters": {}}, "rope_parameters: {}, expected an object for each of"),
    "another rotation": (of_full(rope_type="yarn", rope_theta=1e6), "rope_type: 'yarn', expected default or"),
    "a rotation that is scaled": (of_full(rope_theta=1e6, factor=2.0), "rope_parameters.full_attention.factor: 2.0"),
    "no theta": (of_full(), "rope_parameters.full_attention.rope_theta: absent"),
    "a theta below 1": (of_full(rope_theta=-1.0), "full_attention.rope_theta: -1.0, expected a number from 1.0"),
    "no window": ({"sliding_window": None}, "sliding_window: null, expected a size for layers of sliding_attention"),
    "an empty window": ({"sliding_window": 0}, "sliding_window: 0, expected an integer from 1"),
    "experts": ({"num_experts": 4}, "num_experts: 4"),
    "LFM2's class": (
        {"architectures": ["Lfm2ForCausalLM"]},
        "architectures: 'Lfm2ForCausalLM', expected one of Lfm3ForCausalLM, Lfm3VlForConditionalGeneration",
    ),
    "an encoder": ({"architectures": ["Lfm3Model"]}, "architectures: 'Lfm3Model'"),
    "both ways": ({"is_causal": False}, "is_causal: false"),
    "windows switched off": ({"use_sliding_window": False}, "use_sliding_window: false"),
    "a window in an LFM2": ({"model_type": "lfm2", "architectures": None, "sliding_window": 8}, "sliding_window: 8"),
    "a kind of layer in an LFM2": (
        {"model_type": "lfm2", "architectures": None, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        "sliding_attention",
    ),
}


@pytest.mark.parametrize(("keys", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_lfm3_is_refused(keys: dict[str, object], message: str):
    with pytest.raises(ConfigError) as problem:
        parse_config({**MINIMAL, **keys}, "config.json")
    assert message in str(problem.value)


def test_another_reading_is_refused():
    with pytest.raises(lfm2np.RequestError, match="rope 'half': expected one of trained, transformers"):
        lfm2np.load(rope="half")


def test_messages_use_the_names_of_the_file(tmp_path: Path):
    tiny = TinyModel(lfm3=True, layers="cA")
    place = checkpoint(tiny)
    raw = json.loads((place / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_attention_heads": 4}))
    (tmp_path / "model.safetensors").write_bytes((place / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"self_attn\.(g_proj|o_proj|q_proj)\.weight: shape"):
        lfm2np.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((checkpoint(TinyModel()) / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"missing 8 of the 26 tensors: .*post_ffn_norm"):
        lfm2np.load(tmp_path)
