"""`locate`: bounds that right engines keep and wrong numbers do not, and the words for what is wrong."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from dumps import (
    DIRECTORIES,
    FIXTURES,
    SIX,
    checkpoint,
    recorded_under,
    report_of,
    six_heads,
    six_heads_with_all,
    up_to,
)

from lfm2np.arithmetic.ieee import BFLOAT16, FLOAT32, round_to_bfloat16
from lfm2np.checkpoint.config_json import load_config
from lfm2np.errors import RequestError
from lfm2np.oracle.judging import emulate
from lfm2np.oracle.locate.attention import of_one_head
from lfm2np.oracle.locate.dump import Dump
from lfm2np.oracle.locate.locate import narrower_format
from lfm2np.oracle.locate.operations import Oracle, gated, operations
from lfm2np.oracle.locate.patterns import STEP, TOKEN, Context, Steps, describe_channels
from lfm2np.oracle.locate.spread import PRECISIONS, known

pytestmark = [pytest.mark.rounding, pytest.mark.slow]

FLOATS = ("float32", "float16", "bfloat16")
PER = {operation.name: operation.per for operation in operations(load_config(SIX))}

# --- right engines stay within the bounds


# Engines that round where others do and such that add in another order, in turns: of each format and of each directory;
# by day one format of each directory but the trained.
OF_EACH_FORMAT = [
    pytest.param(
        *(directory, name, 5 * ((row + column) % 2) + (directory.name != "trained")),
        marks=[] if row == 0 or (row + column) % len(FLOATS) == 0 else pytest.mark.night,
    )
    for row, directory in enumerate(DIRECTORIES)
    for column, name in enumerate(FLOATS)
]


@pytest.mark.parametrize(("directory", "name", "draw"), OF_EACH_FORMAT, ids=lambda case: getattr(case, "name", None))
def test_a_right_engine_of_any_format_stays_within_the_bounds(directory: Path, name: str, draw: int) -> None:
    """From all tensors, from modules' outputs, and from blocks alone."""
    recorded = recorded_under(directory, emulate.emulated(name, 1, draw))
    modules = {key: values for key, values in recorded.items() if not key.endswith((".attended", ".residual"))}
    blocks = {key: values for key, values in recorded.items() if key == "token_ids" or key.count(".") == 2}
    for part, most in ((recorded, 0.7), (modules, 0.7), (blocks, 0.9)):
        report = report_of(directory, part, name)
        assert report.findings == ()
        assert max(check.error for check in report.checks) < most
        assert part is blocks or not any(check.is_blunt for check in report.checks)


def test_numbers_stored_in_less_than_the_engine_computes_in_are_right() -> None:
    """float32 activations and embeddings, written as bfloat16."""
    directory = FIXTURES / "torture" / "all_attention"
    recorded = recorded_under(directory, FLOAT32)
    dumped = {name: value if name == "token_ids" else round_to_bfloat16(value) for name, value in recorded.items()}
    assert report_of(directory, dumped, "float32", "bfloat16").findings == ()
    assert report_of(directory, dumped, "float32").findings[0].name == "model.embed_tokens"


# --- wrong numbers do not


@pytest.mark.parametrize(("tensor", "name"), [*zip(PER, itertools.cycle(FLOATS), strict=False)])
def test_one_number_beyond_its_bound_is_found_in_its_tensor_and_nowhere_else(tensor: str, name: str) -> None:
    """Behind it every tensor is what ITS inputs make."""
    recorded = {key: value.copy() for key, value in six_heads_with_all().items()}
    row, channel = len(recorded[tensor]) // 2, recorded[tensor].shape[1] - 2
    if tensor.endswith((".scores", ".weights")):
        channel = 5 * len(recorded[tensor]) + 3  # the last head's, of a position that the row sees
    is_kept = up_to(tensor)
    broken = {key: values.copy() for key, values in recorded.items() if key == "token_ids" or is_kept(key)}
    broken[tensor][row, channel] += 1e6
    clean = report_of(SIX, broken, name).findings[0].bound  # as a finding tells it
    recorded[tensor] = recorded[tensor].astype(np.float64)
    recorded[tensor][row, channel] += 2.5 * clean
    first = report_of(SIX, recorded, name).findings[0]
    assert (first.name, first.row, first.channel, first.wrong_numbers) == (tensor, row, channel, 1)
    assert 1.4 < first.error < 3.6
    words = {STEP: "the only step", Context(): f"position {row} of 12, as step 0 read them", TOKEN: f"only row {row}"}
    assert first.rows == words[PER[tensor]]


def test_bfloat16_is_not_within_the_bounds_of_float32_and_the_report_says_what_it_is() -> None:
    recorded = recorded_under(SIX, BFLOAT16)
    report = report_of(SIX, recorded, "float32")
    assert report.findings[0].name == "model.layers.0.operator_norm"
    assert report.narrower == "bfloat16"
    assert report_of(SIX, six_heads(), "float32").narrower is None


@pytest.mark.parametrize(
    ("number", "declared", "narrower"),
    [
        (1.0, "float32", "bfloat16"),  # pinned: a number of both was called float16
        (1.0, "bfloat16", None),
        (2.0**-60, "float32", "bfloat16"),
        (1.0 + 2.0**-10, "float32", "float16"),
        (1.0 + 2.0**-10, "float16", None),
        (1.0 + 2.0**-11, "float32", None),
    ],
)
def test_the_coarsest_format_that_holds_every_number_is_named(number: float, declared: str, narrower: str | None):
    """Ids of experts say nothing: they are numbers of every format."""
    ids = {"model.layers.2.feed_forward.experts_chosen": np.array([[3.0]])}
    dump = Dump(np.array([0]), {"lm_head": np.array([[number]]), **ids}, {"lm_head": "float32"})
    assert narrower_format(dump, PRECISIONS[declared]) == narrower
    assert narrower_format(Dump(np.array([0]), ids), PRECISIONS[declared]) is None


def test_what_is_not_finite_is_found_and_hides_nothing_behind_it() -> None:
    """Numbers beyond float32 count as not finite."""
    recorded = {name: head.astype(np.float64) for name, head in six_heads().items()}
    recorded["token_ids"] = six_heads()["token_ids"]
    recorded["model.layers.0.conv.in_proj"][3, 5] = np.nan
    recorded["model.layers.0"][2, 2] = 1e300
    recorded["model.layers.1.self_attn.q_layernorm"][4] = np.inf
    recorded["model.layers.3"][2, 2] = 1e38
    recorded["lm_head"][9, 1] += 1.0
    findings = report_of(SIX, recorded, "float32").findings
    layer, parts = "model.layers", ("0.conv.in_proj", "0", "1.self_attn.q_layernorm", "3")
    assert [check.name for check in findings][:4] == [f"{layer}.{part}" for part in parts]
    assert findings[-1].name == "lm_head"
    assert [check.error == np.inf for check in findings][:4] == [True, True, True, False]
    assert (findings[0].row, findings[0].channel, findings[2].rows) == (3, 5, "only row 4")


def test_too_little_in_the_dump_is_no_verdict() -> None:
    ids = {"token_ids": six_heads()["token_ids"]}
    assert not report_of(SIX, ids, "float32").is_conclusive
    embedded = ids | {"model.embed_tokens": six_heads()["model.embed_tokens"]}
    assert not report_of(SIX, embedded, "float32").is_conclusive
    logits = ids | {"lm_head": six_heads()["lm_head"]}
    assert report_of(SIX, logits, "float32").is_conclusive
    assert not report_of(SIX, logits, "bfloat16").is_conclusive
    early = ids | {"model.layers.1": six_heads()["model.layers.1"]}
    report = report_of(SIX, early, "float32")
    assert report.is_conclusive
    assert report.unreached[0] == "model.layers.2.operator_norm"


# --- patterns


def test_another_format_is_an_error_that_names_the_known() -> None:
    with pytest.raises(RequestError, match="format 'int3': expected one of float32, float16, bfloat16"):
        report_of(SIX, six_heads(), "int3")


def test_what_is_wrong_at_regular_places_is_said_so() -> None:
    wrong = np.zeros((3, 24), bool)
    wrong[:, 1::2] = True
    assert describe_channels(wrong, 0, ()) == "every 2nd channel from 1 on (12 of 24)"


def test_a_fast_exponential_stays_within_the_bounds() -> None:
    """Of float32, off by two units times 1 + |x|: in silu, and in attention's shares."""
    gate = known(np.random.default_rng(0).standard_normal((50, 50)) * 8)
    off = 1.0 + 2.0 * 2.0**-24 * (1.0 + np.abs(gate.values))
    engine = gate.values / (1.0 + np.exp(-gate.values) * off)
    config, tensors = checkpoint(SIX)
    oracle = Oracle(tensors, config, PRECISIONS["float32"], np.zeros(50, np.int64), Steps(50, (50,)))
    output = gated(oracle, None, gate, known(np.ones((50, 50))))
    assert np.all(np.abs(engine - output.values) < output.bound())
    query, keys, values = (known(np.array(column)) for column in ([[1.0]], [[-8.0], [0.0]], [[1e4], [0.0]]))
    hidden = np.zeros((1, 2), bool)
    output = of_one_head("q_rotated", "attended", PRECISIONS["float32"], query, [keys, values], hidden)
    share = np.exp(-8.0) * (1.0 + 2.0 * 2.0**-24 * 9.0)
    assert abs(1e4 * share / (1.0 + share) - output.values[0, 0]) > 4 * 2.0**-24 * output.values[0, 0]
    assert abs(1e4 * share / (1.0 + share) - output.values[0, 0]) < output.bound()[0, 0]
