"""What `lfm2np info` says of a mixture of experts; of dense models it says nothing new."""

from __future__ import annotations

from pathlib import Path

import pytest
from torture_table import MIXTURES

from lfm2np.arithmetic import numerics_named
from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.checkpoint.weights import prepare_weights
from lfm2np.commands.cli import main, summary
from lfm2np.truth.weights import FeedForwardWeights, ModelWeights, ShortConvWeights

TORTURE = Path(__file__).parents[3] / "fixtures" / "torture"


def test_a_mixture_is_described_and_json_has_every_product(capsys: pytest.CaptureFixture[str], answer) -> None:
    assert main(["info", "--model", str(TORTURE / "moe_published")]) == 0
    lines = capsys.readouterr().out.splitlines()
    for label, value in (
        ("parameters", "45,752"),
        ("active for one token", "25,016"),
        ("experts, a token, width", "8, 2, 16"),
        ("dense layers, sparse layers", "2, 3"),
        ("bias, normalised, scaling", "true, true, 1"),
    ):
        assert f"{label:<30}{value}" in lines
    assert sum(line.endswith("once every expert was chosen") for line in lines) == 4
    report = answer("info", "--model", str(TORTURE / "moe_published"))
    assert (report["parameters"], report["active_parameters"]) == (45_752, 25_016)
    assert report["config"]["mixture"]["num_experts"] == 8
    assert sum(".experts." in bound["tensors"][0] for bound in report["bounds"]) == 3 * 8 * 2
    dense = answer("info", "--model", str(TORTURE / "minimal_config"))
    assert dense["config"]["mixture"] is None and dense["active_parameters"] == dense["parameters"]


def bytes_in(weights: ModelWeights, experts: int) -> int:
    """Of all arrays, every expert prepared; a tied head counts, the embedding's rows do not."""
    arrays = [weights.final_norm, weights.head.values]
    for layer in weights.layers:
        operator = layer.operator
        arrays += [layer.operator_norm, layer.ffn_norm, operator.out_proj.values]
        if isinstance(operator, ShortConvWeights):
            arrays += [operator.in_proj.values, operator.taps]
            arrays += [bias for bias in (operator.in_bias, operator.taps_bias, operator.out_bias) if bias is not None]
        else:
            arrays += [operator.qkv_proj.values, operator.q_norm, operator.k_norm]
        forward = layer.feed_forward
        if isinstance(forward, FeedForwardWeights):
            every = [forward]
        else:
            every = [forward.expert(number) for number in range(experts)]
            arrays += [forward.router.values] + ([] if forward.bias is None else [forward.bias])
        arrays += [matrix.values for pair in every for matrix in (pair.gate_up_proj, pair.down_proj)]
    return sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("name", [*MIXTURES, "all_convolution"])
def test_memory_is_what_the_prepared_weights_take(name: str) -> None:
    config = load_config(TORTURE / name)
    tensors = open_checkpoint(TORTURE / name, config)
    stated = summary.weight_bytes(config, summary.proved_bounds(tensors, config))
    experts = 0 if config.mixture is None else config.mixture.num_experts
    for arithmetic in ("exact", "float32", "float64"):
        weights = prepare_weights(tensors, config, numerics_named(arithmetic))
        assert bytes_in(weights, experts) == stated[arithmetic], arithmetic
