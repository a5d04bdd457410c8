"""Rooflines: sizes as the checkpoints' configs say, parameters as published, times as the data sheets' figures give."""

from __future__ import annotations

import pytest
from random_checkpoint import published_config

from lfm2np.checkpoint.config_json import parse_config
from lfm2np.commands.simulate.cost import StepShape
from lfm2np.commands.simulate.presets import GPUS, MODELS, Assumptions, preset
from lfm2np.errors import RequestError
from lfm2np.truth.layers import key_value_numbers, parameter_count

CHANGED = {  # from LFM2-350M's config
    "LFM2-350M": {},
    "LFM2-700M": {"hidden_size": 1536, "intermediate_size": 10240, "num_attention_heads": 24},
    "LFM2-1.2B": {"hidden_size": 2048, "intermediate_size": 12288, "num_attention_heads": 32},
}
PUBLISHED = {  # parameters, on the model cards
    "LFM2-350M": 354_483_968,
    "LFM2-700M": 742_489_344,
    "LFM2-1.2B": 1_170_340_608,
    "LFM2-2.6B": 2_569_272_320,
}


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_the_config(name):
    raw = published_config(name) if name not in CHANGED else published_config("LFM2-350M") | CHANGED[name]
    config, sizes = parse_config(raw, "config.json"), MODELS[name]
    parameters = sizes.layers_parameters + sizes.head_parameters
    assert parameters == parameter_count(config) == PUBLISHED[name]
    assert sizes.key_value_numbers == key_value_numbers(config)
    assert sizes.state_numbers == config.layer_types.count("conv") * (config.conv_L_cache - 1) * config.hidden_size


def step(tokens: int, requests: int, context: int) -> StepShape:
    """Of so many requests, each with its share of the tokens at the end of `context` positions."""
    return StepShape(tokens, requests, tokens * context, requests * context, requests, 0, 0, 0)


def test_few_tokens_wait_for_the_memory_and_many_for_the_arithmetic():
    best = Assumptions(compute_efficiency=1.0, memory_efficiency=1.0, overhead=0.0)
    model = preset("H100:LFM2-1.2B", best)
    single, many = model.nanoseconds(step(1, 1, 1)), model.nanoseconds(step(8192, 1, 1))
    assert single == pytest.approx(2 * 1_170_340_608 / 3.35e12 * 1e9, rel=1e-3)
    assert many == pytest.approx(2 * (1_170_340_608 - 65536 * 2048) * 8192 / 989.5e12 * 1e9, rel=0.02)
    long = model.nanoseconds(step(64, 64, 32_768)) - model.nanoseconds(step(64, 64, 1))
    assert long == pytest.approx(64 * 32_767 * 12_288 / 3.35e12 * 1e9, rel=1e-3)  # 12 KiB a position


def test_a_preset_says_that_it_was_not_measured():
    for gpu in GPUS:
        for name in MODELS:
            model = preset(f"{gpu}:{name}")
            assert model.origin.startswith("published figures, not measured: assumed 50% of ")
            assert model.errors is None and model.nanoseconds(step(1, 1, 1)) > 1_000_000


@pytest.mark.parametrize("name", ["H100", "H100:LFM2-3B", "LFM2-1.2B:H100", "h100:LFM2-1.2B", ""])
def test_another_name_is_refused(name):
    with pytest.raises(RequestError, match=r"^cost model '.*': expected GPU:MODEL, of H100, .* and LFM2-350M, .*$"):
        preset(name)
