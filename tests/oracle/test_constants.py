"""Constants that are a little wrong: told from a format, and seen where the format's rounding is larger."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines import checked, checked_right

from lfm2np.engine.loading import Model
from lfm2np.oracle.causes.everywhere import constant_cause
from lfm2np.oracle.check_report import report_of
from lfm2np.oracle.judging.constants import Constant, ConstantSearch, Projection, Reported
from lfm2np.oracle.judging.verdict import LIMIT, Verdict
from lfm2np.oracle.report.as_json import as_json
from lfm2np.oracle.report.as_text import as_text

pytestmark = [pytest.mark.rounding, pytest.mark.slow]
NAMED = {
    "scaled_attention": "the scale of attention is larger by about 1.6 %",
    "scaled_routing": "the scale of routing is larger by about 1.6 %",
    "soft_capped": "there is a soft cap of logits at about 12",
}


def test_a_constant_is_no_format(model: Model) -> None:
    """Before, "errs like float16 everywhere", and under float16 it passed."""
    total = checked(model, "small_eps", cases=("neighbours",), at_once=2).total
    assert total.verdict is Verdict.BUG
    assert total.causes[0].sure == "certain"
    assert total.reasons[0].startswith("certain: wrong everywhere by a little, as if norm_eps is smaller by about 9")


@pytest.mark.night
def test_a_constant_shows_behind_rounding(model: Model) -> None:
    """No position does."""
    result = checked(model, "large_theta", "bfloat16")
    assert result.total.worst < LIMIT
    assert result.total.verdict is Verdict.BUG
    assert "as if rope_theta is larger by about" in result.total.reasons[0]


@pytest.mark.parametrize("name", ["float32", pytest.param("bfloat16", marks=pytest.mark.night)])
def test_of_a_right_engine_it_says_what_would_show(model: Model, name: str) -> None:
    result = checked_right(model, name)
    sought = result.total.constants
    assert result.total.verdict in (Verdict.EXACT, Verdict.TIE) and sought is not None
    assert not sought.found and sought.least["rope_theta"] < 0.1
    assert f"constants  would show if off: {sought.would_show}" in as_text(report_of(result))
    assert as_json(report_of(result))["figures"]["constants"]["least"] == sought.least
    without = replace(result, total=replace(result.total, constants=None))
    assert f"constants that are off by less than {name} rounds (--constants)" in without.not_tested
    assert not any("constants" in line for line in result.not_tested)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("scaled_attention", marks=pytest.mark.night),
        pytest.param("scaled_routing", marks=pytest.mark.night),
        "soft_capped",
    ],
)
def test_each_of_them_is_named(model: Model, published: Model, engine: str) -> None:
    subject = published if engine == "scaled_routing" else model
    total = checked(subject, engine, cases=("neighbours",), at_once=2).total
    assert total.verdict is Verdict.BUG and f"as if {NAMED[engine]}" in total.reasons[0], total.reasons


@pytest.mark.night
def test_a_constant_that_is_far_off_is_measured_where_it_is(model: Model) -> None:
    """Along the direction of a small change it explains three quarters."""
    total = checked(model, "small_attention", cases=("neighbours",), at_once=2).total
    assert total.reasons[0].startswith("certain: wrong everywhere by a little, as if the scale of attention is smaller")
    assert total.causes[0].explained is not None and total.causes[0].explained > 0.99
    assert "by about 30 %" in total.reasons[0]


def test_what_explains_little_of_a_wrong_engine_is_not_its_cause() -> None:
    some, other = Constant("norm_eps", -0.9, 40.0, 0.5), Constant("rope_theta", 0.01, 30.0, 0.49)
    search = ConstantSearch((some, other), {})
    assert constant_cause(search, is_wrong=True) is None
    impossible = replace(search, found=(Constant("norm_eps", -300.0, 90.0, 0.9), other))
    assert constant_cause(impossible, is_wrong=True) is None
    nearly = Constant("norm_eps", -0.9, 40.0, 0.75, left=0.3)  # along its direction lies much of whatever is wrong
    assert constant_cause(ConstantSearch((nearly,), {}), is_wrong=True) is None
    cause = constant_cause(ConstantSearch((replace(nearly, left=0.02),), {}), is_wrong=True)
    assert cause is not None and cause.sure == "certain"
    hidden_cause = constant_cause(search, is_wrong=False)
    assert hidden_cause is not None and hidden_cause.sure == "likely"
    assert hidden_cause.where.endswith("norm_eps is smaller by about 90 % or rope_theta is larger by about 1 %")


def test_a_constant_is_no_cause_of_what_it_leaves_wrong_however_many_positions_are_right() -> None:
    """Rotation that wraps at position 64 was "as if the scale of attention is smaller by 4.7 %": at most positions
    nothing was left, as nothing had been there."""
    random = np.random.default_rng(0)
    errors, effect = random.normal(size=(2, 1000))
    errors[:100] *= 300.0
    reported = Reported([], [], errors, np.ones(1000))
    assert Projection("x", effect, reported).explained(0.1).left > 0.9
    reported = Reported([], [], np.where(errors > 10.0, 300.0, 1.0) * effect, np.ones(1000))
    assert Projection("x", np.asarray(reported.errors), reported).explained(1.0).left == 0.0


def test_a_share_is_measured_and_compared_with_right_engines(model: Model) -> None:
    random = np.random.Generator(np.random.Philox(key=[3, 3]))
    size, share = 4000, 0.02
    sizes: Any = SimpleNamespace(vocab_size=512)
    effect, scales = random.normal(size=size), np.full(size, 1.0)
    others = [random.normal(size=size) for _ in range(24)]
    reported = Reported([sizes], [], share * 50 * effect + random.normal(size=size), scales)
    fitted = Projection("x", effect, reported).fitted(others)
    assert fitted.share == pytest.approx(1.0, abs=0.1) and 30.0 < fitted.sure < 120.0
    assert fitted.explained == pytest.approx(0.5, abs=0.05)
    biased = [other + 0.8 * effect for other in others]  # right engines that all err along it
    assert Projection("x", effect, reported).fitted(biased).share == pytest.approx(0.2, abs=0.1)
