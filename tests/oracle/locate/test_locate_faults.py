"""`locate` names the operation of every fault of the network (section E), as reference.py or the engine computes it."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from engine_runs import BIASED, TRAINED, UNTIED, at_length, loaded, located, prompt, rows_of

from lfm2np.faults import FAULTS, inject
from lfm2np.numerics import attention
from lfm2np.oracle.recorders.own import record

pytestmark = pytest.mark.rounding


@dataclass(frozen=True)
class Expected:
    """Where a fault has to be found, on which fixture, and how its rows and channels are described."""

    tensor: str
    rows: str = "all 24 rows"
    channels: str = "all"
    fixture: str = TRAINED
    recomputed: int = 0


ATTENDED, ROTATED = "model.layers.2.self_attn.attended", "model.layers.2.self_attn.q_rotated"
ALONE = "from row 1 on, right for row 0"  # which sees nothing but itself, at angle 0
NETWORK = {
    "two-thirds-rule-applied-twice": Expected(
        "model.layers.0.feed_forward.gated", channels="channels 170 to 255 of 256"
    ),
    "two-thirds-rule-skipped": Expected("model.layers.0.feed_forward.gated"),
    "rope-theta-of-the-file-ignored": Expected("model.layers.0.self_attn.q_rotated", ALONE, fixture=UNTIED),
    "final-norm-is-another-tensor": Expected("model.embedding_norm"),
    "embedding-norm-taken-by-its-name": Expected("model.layers.0.operator_norm"),
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
    "attention-scale-of-the-hidden-size": Expected(ATTENDED, ALONE),
    "convolution-gates-swapped": Expected("model.layers.0.conv.u"),
    "convolution-taps-reversed": Expected("model.layers.0.conv.conv"),
    "convolution-bias-ignored": Expected("model.layers.0.conv.conv", fixture=BIASED),
    "projection-bias-ignored": Expected("model.layers.0.conv.in_proj", fixture=BIASED),
    "activation-behind-the-convolution": Expected("model.layers.0.conv.conv"),
    "gate-and-up-swapped": Expected("model.layers.0.feed_forward.gated"),
    "feed-forward-residual-missing": Expected("model.layers.0"),
    "residual-taken-behind-the-norm": Expected("model.layers.0.residual"),
}


AT_LENGTH = {  # where, and how the rows are described
    "positions-stop-at-40": (ROTATED, "from row 41 on"),
    "partitions-joined-without-rescaling": (ATTENDED, "from row 64 on"),
    "later-piece-of-queries-misses-its-own-position": (ATTENDED, "from row 10 on"),
}


@pytest.mark.parametrize("name", NETWORK)
def test_a_fault_of_the_network_is_found_at_its_operation(name: str) -> None:
    expected = NETWORK[name]
    model = loaded(expected.fixture, "exact")
    with inject(name):
        recorded = record(model, prompt(0, 24))
    first = located(model, recorded).findings[0]
    assert first.name == expected.tensor
    assert first.rows.startswith(expected.rows)
    assert expected.channels in first.channels
    assert len(first.recomputed) == expected.recomputed
    assert first.error > 1000


def edits_exact_only(name: str) -> bool:
    (fault,) = (one for one in FAULTS if one.name == name)
    return all(edit.where.startswith("lfm2np.numerics.exact:") for edit in fault.edits)


@pytest.mark.parametrize("name", [name for name in NETWORK if not edits_exact_only(name)])
def test_in_bfloat16_it_is_found_at_the_same_operation(name: str) -> None:
    """Whose bounds are 2**16 times as wide."""
    expected = NETWORK[name]
    model = loaded(expected.fixture, "bfloat16")
    with inject(name):
        recorded = record(model, prompt(0, 24))
    first = located(model, recorded, stored="bfloat16").findings[0]
    assert first.name == expected.tensor
    assert first.error > 4
    assert located(model, record(model, prompt(0, 24)), stored="bfloat16").findings == ()


@pytest.mark.parametrize("fixture", [TRAINED, BIASED, UNTIED])
def test_without_a_fault_nothing_is_found(fixture: str) -> None:
    for numerics in ("exact", "float32"):
        model = loaded(fixture, numerics)
        report = located(model, record(model, prompt(0, 24)))
        assert report.findings == ()
        assert max(one.error for one in report.checks) < 0.7


def test_every_fault_of_the_network_is_in_a_table() -> None:
    assert {*NETWORK, *AT_LENGTH} == {one.name for one in FAULTS if one.section == "E"}


def test_from_module_outputs_alone_the_fault_lies_in_what_was_recomputed() -> None:
    """As a transformers user has them: without what runs between modules."""
    model = loaded(TRAINED, "exact")
    with inject("no-causal-mask"):
        recorded = record(model, prompt(0, 24))
    first = located(model, recorded, lambda name: not name.endswith((".attended", ".residual"))).findings[0]
    assert first.name == "model.layers.2.self_attn.out_proj"
    assert first.recomputed == (ATTENDED,)


def test_from_block_outputs_alone_the_layer_is_found() -> None:
    model = loaded(TRAINED, "exact")
    with inject("rotation-backwards"):
        recorded = record(model, prompt(0, 24))
    first = located(model, recorded, lambda name: name.count(".") == 2).findings[0]
    assert (first.name, first.layer) == ("model.layers.2", 2)
    assert ATTENDED in first.recomputed
    assert "model.layers.1" not in first.recomputed


@pytest.mark.parametrize("name", AT_LENGTH)
def test_a_fault_that_shows_only_at_length_is_found_at_its_operation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine's steps, whose queries attend in pieces of a few rows."""
    monkeypatch.setattr(attention, "SCORES", 2**14)
    model = loaded(TRAINED, "exact")
    with inject(name):
        recorded = rows_of(at_length(model), "a")
    first = located(model, recorded).findings[0]
    tensor, rows = AT_LENGTH[name]
    assert (first.name, first.error > 1000) == (tensor, True)
    assert first.rows.startswith(rows)


def test_a_recorded_dump_holds_every_tensor_that_locate_knows() -> None:
    model = loaded(TRAINED, "exact")
    recorded = record(model, [1, 2, 3])
    report = located(model, recorded)
    assert report.unreached == ()
    assert {one.name for one in report.checks} == recorded.keys() - {"token_ids"}
    assert json.dumps([one.name for one in report.checks])
