"""Constants that are a little wrong: told from a format, and seen where the format's rounding is larger."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines import QUICK, checked, checked_right

from lfm2np.engine.loading import Model
from lfm2np.oracle.causes.everywhere import constant_cause
from lfm2np.oracle.check_report import report_of
from lfm2np.oracle.judging.constants import (
    CONSTANTS_END,
    SOFT_CAP,
    Constant,
    ConstantSearch,
    Projection,
    Reported,
)
from lfm2np.oracle.judging.verdict import LIMIT, Verdict
from lfm2np.oracle.report.as_json import as_json
from lfm2np.oracle.report.as_text import as_text

pytestmark = [pytest.mark.rounding, pytest.mark.slow]
ALONE = "certain: wrong everywhere by a little, as if "
NAMED: dict[
    str, tuple[str, str, float]
] = {  # of an engine: format, how its first reason begins, the least share explained
    "small_eps": ("float32", f"{ALONE}norm_eps is smaller by about 9", 0.0),  # no format, though right under float16
    "large_theta": ("bfloat16", "rope_theta is larger by about", 0.0),  # behind rounding: no position shows it
    "scaled_attention": ("float32", f"{ALONE}the scale of attention is larger by about 1.6 %", 0.0),
    "scaled_routing": ("float32", f"{ALONE}the scale of routing is larger by about 1.6 %", 0.0),
    "soft_capped": ("float32", f"{ALONE}there is a soft cap of logits at about 12", 0.0),
    # far off: along the direction of a small change it explains three quarters
    "small_attention": ("float32", f"{ALONE}the scale of attention is smaller by about 30 %", 0.99),
}
QUICK_ONES = ("small_eps", "soft_capped")


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[pytest.mark.night] * (name not in QUICK_ONES)) for name in NAMED]
)
def test_a_constant_that_is_off_is_named(model: Model, published: Model, engine: str) -> None:
    form, words, least = NAMED[engine]
    subject, is_hidden = published if engine == "scaled_routing" else model, form == "bfloat16"
    how = {"cases": QUICK} if is_hidden else {"cases": ("neighbours",), "at_once": 2}
    total = checked(subject, engine, form, **how).total
    assert total.verdict is Verdict.BUG and (total.worst < LIMIT) >= is_hidden
    assert words in total.reasons[0], total.reasons
    assert (total.causes[0].explained or 0.0) >= least


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
    reported = Reported([], [], errors, np.ones(1000), bits=24)
    assert Projection("x", effect, reported).explained(0.1).left > 0.9
    reported = Reported([], [], np.where(errors > 10.0, 300.0, 1.0) * effect, np.ones(1000), bits=24)
    assert Projection("x", np.asarray(reported.errors), reported).explained(1.0).left == 0.0


def test_a_share_is_measured_and_compared_with_right_engines(model: Model) -> None:
    random = np.random.Generator(np.random.Philox(key=[3, 3]))
    size, share = 4000, 0.02
    sizes: Any = SimpleNamespace(vocab_size=512)
    effect, scales = random.normal(size=size), np.full(size, 1.0)
    others = [random.normal(size=size) for _ in range(24)]
    reported = Reported([sizes], [], share * 50 * effect + random.normal(size=size), scales, bits=24)
    fitted = Projection("x", effect, reported).fitted(others)
    assert fitted.share == pytest.approx(1.0, abs=0.1) and 30.0 < fitted.sure < 120.0
    assert fitted.explained == pytest.approx(0.5, abs=0.05)
    biased = [other + 0.8 * effect for other in others]  # right engines that all err along it
    assert Projection("x", effect, reported).fitted(biased).share == pytest.approx(0.2, abs=0.1)
    constant, cap = (Projection(name, effect, replace(reported, bits=8)).allowance for name in ("x", SOFT_CAP))
    assert constant - cap == pytest.approx(2.0**-8 - CONSTANTS_END)  # a constant is rounded, a soft cap is none
