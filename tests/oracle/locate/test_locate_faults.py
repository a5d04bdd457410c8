"""`locate` names the operation of every fault of the network (section E), as reference.py or the engine computes it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from builders import PLAIN, mixture
from dumps import BIASED, TRAINED, UNTIED, loaded, located, prompt, rows_of, up_to
from faults import FAULTS, inject

import lfm2np
from lfm2np.arithmetic import attention
from lfm2np.engine.loading import Model
from lfm2np.oracle.recorders.lfm2np_recorder import record

pytestmark = [pytest.mark.rounding, pytest.mark.slow]


@dataclass(frozen=True)
class Expected:
    """Where a fault has to be found, on which fixture, how its rows and channels are described, how many operations
    are recomputed, and of a mixture how its experts are described."""

    tensor: str
    rows: str = "all 24 rows"
    channels: str = "all"
    fixture: str = TRAINED
    recomputed: int = 0
    experts: str | None = None


ATTENDED, ROTATED = "model.layers.2.self_attn.attended", "model.layers.2.self_attn.q_rotated"
ALONE = "from row 1 on, right for row 0"  # which sees nothing but itself, at angle 0
NETWORK = {
    "two-thirds-rule-applied-twice": Expected(
        "model.layers.0.feed_forward.gated", channels="channels 170 to 255 of 256"
    ),
    "rope-theta-of-the-file-ignored": Expected("model.layers.0.self_attn.q_rotated", ALONE, fixture=UNTIED),
    "final-norm-is-another-tensor": Expected("model.embedding_norm"),
    "operator-norm-is-the-feed-forward-norm": Expected("model.layers.0.operator_norm"),
    "untied-head-ignored": Expected("lm_head", fixture=UNTIED),
    "bias-on-the-head": Expected("lm_head", channels="scattered channels of 512"),
    "no-causal-mask": Expected(ATTENDED, rows="rows 0 to 22 of 24"),
    "head-norm-reads-strided-rows-as-contiguous": Expected(
        "model.layers.2.self_attn.q_layernorm", rows=ALONE, channels="all 4 heads"
    ),
    "head-norm-after-the-rotation": Expected("model.layers.2.self_attn.q_layernorm", rows=ALONE),
    "head-norm-missing": Expected(ROTATED, recomputed=1),
    "query-heads-share-keys-by-remainder": Expected(
        "model.layers.1.self_attn.attended", channels="heads 1 to 4 of 6", fixture=BIASED
    ),
    "rotation-of-interleaved-pairs": Expected(ROTATED),
    "rotation-backwards": Expected("model.layers.2.self_attn.k_rotated", ALONE),
    "attention-scale-missing": Expected(ATTENDED, ALONE),
    "convolution-gates-swapped": Expected("model.layers.0.conv.u"),
    "convolution-taps-reversed": Expected("model.layers.0.conv.conv"),
    "convolution-bias-ignored": Expected("model.layers.0.conv.conv", fixture=BIASED),
    "projection-bias-ignored": Expected("model.layers.0.conv.in_proj", fixture=BIASED),
    "activation-behind-the-convolution": Expected("model.layers.0.conv.conv"),
    "gate-and-up-swapped": Expected("model.layers.0.feed_forward.gated"),
    "feed-forward-residual-missing": Expected("model.layers.0"),
    "residual-taken-behind-the-norm": Expected("model.layers.0.residual"),
}


PUBLISHED, FUSED, TIES, ALL = (
    f"torture/moe_{one}" for one in ("published", "fused_no_bias", "near_ties", "all_experts")
)


def of_mixture(tensor: str, fixture: str = PUBLISHED, experts: str = "", recomputed: int = 0) -> Expected:
    return Expected(f"model.layers.{tensor}", "", "", fixture, recomputed, experts)


MIXTURES = {
    "softmax-for-sigmoid": of_mixture("2.feed_forward.experts_chosen", experts="routed to expert", recomputed=1),
    "expert-bias-ignored": of_mixture("2.feed_forward.experts_chosen", experts="routed to expert"),
    "router-in-bfloat16": of_mixture("2.feed_forward.scores"),
    "router-in-bfloat16-in-large-steps": of_mixture("2.feed_forward.scores"),
    "last-expert-never-chosen": of_mixture("1.feed_forward.experts_chosen", FUSED, "routed to expert"),
    "experts-in-the-order-of-their-names": of_mixture("1.feed_forward.expert_outputs", TIES, "experts 2 to 11 of 12"),
    "expert-bias-in-the-weights": of_mixture("2.feed_forward.expert_weights"),
    "expert-weights-not-normalised": of_mixture("2.feed_forward.expert_weights"),
    "routed-scaling-missing": of_mixture("1.feed_forward.expert_weights", ALL, ""),
    "expert-weights-of-the-token-before": of_mixture("2.feed_forward.expert_weights"),
    "only-the-first-expert-of-a-token": of_mixture("2.feed_forward.mixed", recomputed=1),
    "gate-and-up-swapped-in-one-expert": of_mixture("1.feed_forward.expert_outputs", FUSED, "expert 1: all"),
    "expert-takes-four-tokens-a-step": of_mixture("2.feed_forward.expert_outputs"),
    "expert-rows-not-put-back": of_mixture("2.feed_forward.expert_outputs"),
    "last-dense-layer-is-a-mixture": of_mixture("2.conv.in_proj", recomputed=6),  # what it has instead is not layer 1's
    "mixture-taken-for-dense": of_mixture("2", recomputed=6),
}
LFM3, LFM3_BIASED = "lfm3", "torture/lfm3_biases"
GATED, NORMED = "model.layers.2.self_attn.gated", "model.layers.0.post_operator_norm"
WINDOWED, BEYOND = "model.layers.4.self_attn.attended", "from row 16 on, right for rows 0 to 15"  # a window of 16


def of_lfm3(tensor: str, rows: str = "all 40 rows", channels: str = "all", **more: Any) -> Expected:
    return Expected(tensor, rows, channels, **({"fixture": LFM3} | more))


LFM3S = {
    "window-one-too-wide": of_lfm3(WINDOWED, BEYOND),
    "window-of-the-chunk": of_lfm3(WINDOWED, BEYOND),
    "window-ignored": of_lfm3(WINDOWED, BEYOND),
    "gate-missing": of_lfm3(GATED, recomputed=1),
    "gates-in-another-order-of-heads": of_lfm3(GATED),
    "norm-behind-the-operator-missing": of_lfm3(NORMED),
    "norm-behind-the-residual": of_lfm3(NORMED),
    "rotation-of-the-other-layers": of_lfm3("model.layers.4.self_attn.q_rotated", ALONE),
    "full-rotation-for-a-partial-one": of_lfm3(ROTATED, ALONE, "channels 12 to 23 and those 24 further"),
    "partial-rotation-of-a-smaller-head": of_lfm3(ROTATED, ALONE, "channels 1 to 11 and those 24 further"),
    "attention-bias-of-the-output-ignored": of_lfm3("model.layers.0.self_attn.out_proj", fixture=LFM3_BIASED),
}
IN_STEPS = "expert-outputs-of-an-earlier-step"
AT_LENGTH = {  # where, and how the rows are described
    "positions-stop-at-40": (ROTATED, "from row 41 on"),
    "partitions-joined-without-rescaling": (ATTENDED, "from row 64 on"),
    "later-piece-of-queries-misses-its-own-position": (ATTENDED, "from row 10 on"),
}
LFM3S_AT_LENGTH = {
    "window-ignored-in-decoding": (WINDOWED, "from row 90 on"),
    "state-of-two-columns": ("model.layers.0.conv.state", "42 rows from position 48 on"),
}


def edits_exact_only(name: str) -> bool:
    (fault,) = (entry for entry in FAULTS if entry.name == name)
    return all(edit.where.startswith("lfm2np.arithmetic.exact") for edit in fault.edits)


def in_both(names: Iterable[str]) -> list[tuple[str, str]]:
    """Faults in exact, and those that bfloat16 can have, too, whose bounds are 2**16 times as wide."""
    exact = [(name, "exact") for name in names]
    both = [name for name, _ in exact if not edits_exact_only(name) and "in-bfloat16" not in name]
    return [*exact, *((name, "bfloat16") for name in both)]


@cache
def right(fixture: str, numerics: str) -> tuple[Model, list[int], str]:
    """A model in which nothing is wrong without a fault, a prompt (an LFM3's is longer than its window), the format."""
    model, stored = loaded(fixture, numerics), "bfloat16" if numerics == "bfloat16" else "float32"
    ids = prompt(0, 40, 44) if "lfm3" in fixture else prompt(0, 24, 37 if "moe" in fixture else 60)
    report = located(model, record(model, ids), stored=stored)
    assert report.findings == ()
    bound = 0.95 if "lfm3" in fixture else 0.7  # exact's grids follow the largest input of a row: 0.9 on lfm3
    assert max(check.error for check in report.checks) < bound
    return model, ids, stored


@pytest.mark.parametrize(("name", "numerics"), in_both(NETWORK | LFM3S | MIXTURES))
def test_a_fault_of_the_network_is_found_at_its_operation(name: str, numerics: str) -> None:
    expected, is_exact = (NETWORK | LFM3S | MIXTURES)[name], numerics == "exact"
    model, ids, stored = right(expected.fixture, numerics)
    with inject(name):
        recorded = record(model, ids)
    first = located(model, recorded, up_to(expected.tensor), stored).findings[0]
    assert first.name == expected.tensor
    assert first.error > (1000 if is_exact else 4 if expected.experts is None else 3)
    if is_exact or expected.experts is not None:
        assert len(first.recomputed) == expected.recomputed
    if is_exact:
        assert first.rows.startswith(expected.rows)
        assert expected.channels in first.channels
    if expected.experts is not None:
        assert (first.choice or first.experts).startswith(expected.experts)
        if "feed_forward" in expected.tensor and is_exact:
            layer = f"model.layers.{first.layer}"
            blocks = located(model, recorded, lambda name: name.count(".") == 2 and up_to(layer)(name)).findings
            assert (blocks[0].name, first.name in blocks[0].recomputed) == (layer, True)


def test_a_fault_of_a_mixture_between_steps_is_found_in_its_layer() -> None:
    """The recorder keeps what experts make, not what comes of it: the sum with the residual is what is wrong."""
    model = lfm2np.load(mixture(PLAIN), "exact")
    with inject(IN_STEPS):
        recorded = rows_of(model, "token by token", "a")
    first = located(model, recorded).findings[0]
    assert (first.name, first.recomputed) == ("model.layers.1", ())
    assert first.steps.startswith("step 4")


def test_every_fault_of_the_network_is_in_a_table() -> None:
    tables = {*NETWORK, *MIXTURES, IN_STEPS, *AT_LENGTH, *LFM3S, *LFM3S_AT_LENGTH}
    assert tables == {fault.name for fault in FAULTS if fault.section == "E"}


@pytest.mark.parametrize("name", [*AT_LENGTH, *LFM3S_AT_LENGTH])
def test_a_fault_that_shows_only_at_length_is_found_at_its_operation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine's steps, whose queries attend in pieces of a few rows."""
    monkeypatch.setattr(attention, "SCORES", 2**14)
    model = loaded(TRAINED if name in AT_LENGTH else LFM3, "exact")
    with inject(name):
        recorded = rows_of(model, "at length", "a")
    first = located(model, recorded).findings[0]
    tensor, rows = (AT_LENGTH | LFM3S_AT_LENGTH)[name]
    assert (first.name, first.error > 1000) == (tensor, True)
    assert rows in (first.rows or first.steps)


@pytest.mark.parametrize("fixture", [TRAINED, LFM3])
def test_a_recorded_dump_holds_every_tensor_that_locate_knows(fixture: str) -> None:
    model = loaded(fixture, "exact")
    recorded = record(model, [1, 2, 3])
    report = located(model, recorded)
    assert report.unreached == ()
    assert {check.name for check in report.checks} == recorded.keys() - {"token_ids"}
    assert json.dumps([check.name for check in report.checks])
