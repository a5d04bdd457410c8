"""mlx-lm recorded: right in every operation that can be tapped, and named where it is broken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from builders import MIXTURES, PLAIN, SPARSE, mixture
from recorders import mlx_recorder
from recorders.mlx_recorder import record
from recordings import PROMPTS, TRAINED, first_wrong, left_out, report_of, require_right

from lfm2np.oracle.recorders import Recorder

pytest.importorskip("mlx_lm")
cache = pytest.importorskip("mlx_lm.models.cache")

pytestmark = pytest.mark.peers

WAYS = pytest.mark.parametrize("options", [{}, {"chunk": 4}, {"at_once": 1}], ids=str)


def recorded(model: Path = TRAINED, format: str = "float32", request: int = 0, **options: int) -> Recorder:
    return record(model, PROMPTS, request, 4, Recorder(format=format), **options)


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
@WAYS
def test_mlx_lm_is_right_in_every_operation(format: str, options: dict[str, int]) -> None:
    for request in range(len(PROMPTS)):
        report = report_of(recorded(TRAINED, format, request, **options))
        require_right(report, 0.6)
        missing = left_out(report)
        assert len(missing) == 4 and all(name.endswith((".scores", ".weights")) for name in missing)


def test_tokens_are_the_same_together_and_one_after_another() -> None:
    together, alone = recorded(request=2), recorded(request=2, at_once=1)
    assert together.token_ids == alone.token_ids
    np.testing.assert_allclose(together.tensors()["lm_head"], alone.tensors()["lm_head"], atol=1e-3)


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
def test_a_state_that_is_taken_from_the_padding_is_named(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    monkeypatch.setattr(cache.ArraysCache, "prepare", lambda self, **given: None)
    first = report_of(recorded(TRAINED, format)).findings[0]
    assert (first.name, first.steps) == ("model.layers.0.conv.state", "steps 1 to 2 of 5")


def test_keys_that_are_left_behind_the_padding_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = cache.dynamic_roll
    monkeypatch.setattr(cache, "dynamic_roll", lambda x, shifts, axis: original(x, shifts * 0, axis))
    assert first_wrong(recorded()) == "model.layers.2.self_attn.keys_read"


# --- mixtures of experts: mlx multiplies by them in float32 alone, on a CPU


@WAYS
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_experts_is_right_in_every_operation(name: str, options: dict[str, int]) -> None:
    for request in range(len(PROMPTS)):
        report = report_of(recorded(mixture(name), "float32", request, **options), mixture(name))
        require_right(report, 0.6)
        assert (report.unreached, report.unknown) == ((), ())
        names = [check.name.removeprefix(SPARSE) for check in report.checks if check.name.startswith(SPARSE)]
        assert names == [".gate", ".experts_chosen", ".expert_outputs", ".mixed"]


def test_a_routers_bias_stays_float32() -> None:
    network = mlx_recorder.load(mixture(PLAIN), "bfloat16")
    feed_forward = network.layers[1].feed_forward
    dtypes = (str(feed_forward.expert_bias.dtype), str(feed_forward.gate.weight.dtype))
    assert dtypes == ("mlx.core.float32", "mlx.core.bfloat16")
