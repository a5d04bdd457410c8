"""`transformers:` recorded as it generates: right in every format, alone and padded; its known bug is named."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import MIXTURES, PLAIN, SPARSE, mixture
from recordings import FIXTURES, TRAINED, report_of, require_right

from lfm2np.checkpoint.config_json import load_config
from lfm2np.oracle.recorders import transformers_recorder
from lfm2np.oracle.recorders.recorder import Recorder

KNOWN = ("5.23.0", "5.24.0")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(version("transformers") not in KNOWN, reason=f"recorded only: {', '.join(KNOWN)}"),
]

BIASED = FIXTURES / "torture" / "biased_two_taps"
DIRECTORIES = [TRAINED, *sorted((FIXTURES / "torture").iterdir())]
LFM3 = FIXTURES / "lfm3"
LFM3S = [LFM3, *(path for path in DIRECTORIES if load_config(path).model_type == "lfm3")]
DIRECTORIES = [path for path in DIRECTORIES if path not in LFM3S]
FORMATS = ("float32", "float16", "bfloat16")


def prompts(directory: Path) -> list[list[int]]:
    """An LFM3's reach past its window."""
    config = load_config(directory)
    most, lengths = min(60, config.vocab_size), (48, 37, 7) if config.model_type == "lfm3" else (12, 5, 7)
    return [np.random.default_rng(length).integers(0, most, length).tolist() for length in lengths]


def recorded(directory: Path, format: str, padded: bool = False, **options: Any) -> Recorder:
    return transformers_recorder.record(directory, prompts(directory), 1, 4, format, padded, **options)


def eager(network: Any) -> None:
    network.set_attn_implementation("eager")


def by(implementation: str) -> Callable[[Any], None]:
    """Of the experts' products."""
    return lambda network: network.set_experts_implementation(implementation)


def leave(network: Any) -> None:
    pass


def attention_layers(directory: Path) -> int:
    return load_config(directory).layer_types.count("full_attention")


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: path.name)
def test_transformers_is_right_in_every_operation_of_every_step(directory: Path, format_name: str) -> None:
    """On every fixture that it runs: without an attention layer `generate` stops."""
    if attention_layers(directory) == 0:
        with pytest.raises(ValueError, match="only contain LinearAttention layers"):
            recorded(directory, format_name)
        return
    prepare = by("eager") if load_config(directory).mixture else leave  # PyTorch's grouped products demand even widths
    report = report_of(recorded(directory, format_name, prepare=prepare), directory)
    require_right(report)
    assert (report.unreached, report.unknown, report.format) == ((), (), format_name)


@pytest.mark.parametrize(
    ("format_name", "padded"),
    [
        ("float32", True),
        ("bfloat16", False),
        *(pytest.param(*more, marks=pytest.mark.night) for more in (("float32", False), ("bfloat16", True))),
        *(pytest.param("float16", padded, marks=pytest.mark.night) for padded in (False, True)),
    ],
)
def test_eager_attention_shows_its_weights_also_beside_longer_prompts(format_name: str, padded: bool) -> None:
    recorder = recorded(TRAINED, format_name, padded, prepare=eager)
    report = report_of(recorder)
    assert recorder.sizes == [5, 1, 1, 1]
    assert report.findings == ()
    weights = [check for check in report.checks if check.name.endswith(".weights")]
    assert len(weights) == attention_layers(TRAINED) > 0


def test_padding_that_reaches_the_convolution_is_the_state_of_the_first_step() -> None:
    """transformers, conv_bias=true: columns before a prompt are zero before in_proj, so with a bias not after it."""
    assert report_of(recorded(BIASED, "float32"), BIASED).findings == ()
    findings = report_of(recorded(BIASED, "float32", padded=True), BIASED).findings
    assert {array.name.rpartition(".conv.")[2] for array in findings} == {"state"}
    assert (findings[0].name, findings[0].steps) == ("model.layers.0.conv.state", "step 0 of 4")


def test_a_rotation_of_interleaved_pairs_is_the_rotation_and_not_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.lfm2 import modeling_lfm2

    def interleaved(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)

    monkeypatch.setattr(modeling_lfm2, "rotate_half", interleaved)
    names = [finding.name for finding in report_of(recorded(TRAINED, "float32")).findings]
    assert names[:2] == ["model.layers.2.self_attn.q_rotated", "model.layers.2.self_attn.k_rotated"]
    assert all(name.endswith("_rotated") for name in names)


def test_one_weight_that_is_changed_is_named_by_its_channel() -> None:
    def louder(network: Any) -> None:
        network.model.layers[3].feed_forward.w3.weight.data[17] *= 1.25

    for format_name in FORMATS:
        first = report_of(recorded(TRAINED, format_name, prepare=louder)).findings[0]
        assert (first.name, first.channels) == ("model.layers.3.feed_forward.w3", "channel 17 of 256")


# --- mixtures of experts


@pytest.mark.parametrize(  # every pair of two of the four choices
    ("name", "format_name", "implementation", "padded"),
    [
        (name, format_name, implementation, (index + place + (implementation == "eager")) % 2 == 0)
        for index, name in enumerate(MIXTURES)
        for place, format_name in enumerate(FORMATS)
        for implementation in ("eager", "grouped_mm")
    ],
)
def test_a_mixture_of_experts_is_right_in_every_operation(
    name: str, format_name: str, implementation: str, padded: bool
) -> None:
    recorder = recorded(mixture(name), format_name, padded, prepare=by(implementation))
    report = report_of(recorder, mixture(name))
    require_right(report)
    assert (report.unreached, report.unknown) == ((), ())
    names = [check.name.removeprefix(SPARSE) for check in report.checks if check.name.startswith(SPARSE)]
    assert names == [".gate", ".experts_chosen", ".expert_weights", ".mixed"]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_an_expert_that_is_another_shows_in_the_sum_of_those_that_chose_it(implementation: str) -> None:
    def exchanged(network: Any) -> None:
        by(implementation)(network)
        down = network.model.layers[1].feed_forward.experts.down_proj
        down.data[0] = down.data[4]

    (first,) = report_of(recorded(mixture(PLAIN), "float32", prepare=exchanged), mixture(PLAIN)).findings
    assert (first.name, first.recomputed) == (f"{SPARSE}.mixed", (f"{SPARSE}.expert_outputs",))
    assert first.experts.startswith("expert 0: ")


# --- LFM3


@pytest.mark.parametrize(  # every pair of two of the three choices
    ("directory", "format_name", "padded"),
    [
        pytest.param(
            directory,
            format_name,
            (index + place) % 2 == 0,
            id=f"{directory.name}-{format_name}",
            marks=[pytest.mark.night] if format_name == "float16" else [],
        )
        for index, directory in enumerate(LFM3S)
        for place, format_name in enumerate(FORMATS)
    ],
)
def test_an_lfm3_is_right_in_every_operation_past_its_window(directory: Path, format_name: str, padded: bool) -> None:
    """But where padding reaches a convolution with a bias; and where the window is the token itself, as the cache keeps
    the last `-sliding_window + 1:` positions, of 1 all: decoding then attends to what the prompt does not.
    """
    report = report_of(recorded(directory, format_name, padded, prepare=eager), directory)
    config = load_config(directory)
    if padded and config.conv_bias:
        assert {finding.name.rpartition(".conv.")[2] for finding in report.findings} == {"state"}
        return
    if config.sliding_window == 1:
        assert {finding.name.rpartition(".")[2] for finding in report.findings} == {"weights", "attended"}
        assert all(finding.steps.startswith("from step 1 on") for finding in report.findings)
        return
    require_right(report)
    assert (report.unreached, report.unknown) == ((), ())
    attention = sum(kind != "conv" for kind in config.layer_types)
    for name, expected in {
        "weights": attention,
        "gate": attention * config.use_attention_gate,
        "post_ffn_norm": config.num_hidden_layers * config.use_sandwich_norm,
    }.items():
        assert sum(check.name.endswith(f".{name}") for check in report.checks) == expected


def broken_window(network: Any) -> None:
    """One position too many is seen, and kept in the cache."""
    network.config.sliding_window += 1


def without_gates(network: Any) -> None:
    for layer in network.model.layers:
        if layer.is_attention_layer:
            layer.self_attn.g_proj.weight.data[:] = 0.0


def exchanged_norms(network: Any) -> None:
    for layer in network.model.layers:
        layer.post_operator_norm, layer.post_ffn_norm = layer.post_ffn_norm, layer.post_operator_norm


@pytest.mark.parametrize(
    ("breaks", "name", "rows"),
    [
        (broken_window, "model.layers.4.self_attn.attended", "from row 16 on"),
        (without_gates, "model.layers.2.self_attn.g_proj", "all"),
        (exchanged_norms, "model.layers.0.post_operator_norm", "all"),
    ],
)
def test_what_an_lfm3_has_that_is_new_is_named(breaks: Callable[[Any], None], name: str, rows: str) -> None:
    first = report_of(recorded(LFM3, "float32", prepare=breaks), LFM3).findings[0]
    assert (first.name, first.rows[: len(rows)]) == (name, rows)
