"""Non-negative least squares by its optimality conditions; a fit finds a known model under noise and freaks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.commands.simulate.cost import FIELDS, CostModel, StepShape
from lfm2np.commands.simulate.fit import REST, cross_validated, errors_on, fit, nonnegative_least_squares, robust_fit
from lfm2np.commands.simulate.steps import MeasuredSteps
from lfm2np.errors import RequestError


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(0, 40), st.booleans())
def test_least_squares_are_optimal(seed, n, rows, is_degenerate):
    """Karush, Kuhn and Tucker: no coefficient is negative; the residual is orthogonal to each column that has one, and
    no other column would make it smaller."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(n + rows, n)), rng.normal(size=n + rows)
    if is_degenerate:
        matrix[:, 0], matrix[:, -1] = 0.0, matrix[:, n // 2]
    matrix *= 10.0 ** rng.integers(-6, 6, n)
    x = nonnegative_least_squares(matrix, target)
    lengths = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    slope = matrix.T @ (target - matrix @ x) / lengths  # what is left along each column
    assert (x >= 0.0).all()
    assert (slope <= 1e-7 * np.linalg.norm(target)).all()
    assert (np.abs(slope[x > 0.0]) <= 1e-7 * np.linalg.norm(target)).all()


TRUTH = CostModel("truth", "nowhere", ({"1": 0.01, "tokens[:8]": 1e-3, "tokens[8:]": 2e-4, "read": 1e-6},))


def some_steps(count: int, seed: int) -> MeasuredSteps:
    """What TRUTH says, without errors."""
    rng = np.random.default_rng(seed)
    requests = rng.integers(1, 30, count)
    tokens = requests + rng.integers(0, 2, count) * rng.integers(0, 500, count)
    read = tokens + requests * rng.integers(0, 2000, count)
    nothing = np.zeros(count, np.int64)
    shapes = StepShape(tokens, requests, tokens * read // requests, read, requests, nothing, nothing, nothing)
    return MeasuredSteps(shapes, TRUTH.nanoseconds_of(shapes) / 1e9)


def test_a_known_model_is_found_again():
    model = fit(some_steps(300, 1), "found", "nowhere")
    assert model.errors is not None and model.errors.p90 < 1e-4 and abs(model.errors.total) < 1e-4
    assert errors_on(model, some_steps(300, 2)).p90 < 1e-4


def test_freaks_do_not_bend_the_model():
    """One step in fifty takes fifty times as long; least squares alone would be off by far more."""
    steps = some_steps(400, 1)
    steps.seconds[::50] *= 50.0
    model = fit(steps, "found", "nowhere")
    assert (
        model.errors is not None and model.errors.median < 0.08
    )  # 0.04 are put back: 2 % of the steps, 3 times as long
    assert errors_on(model, some_steps(300, 2)).p90 < 0.08
    columns = np.ones((len(steps), 1)) * steps.seconds[:, None]
    assert robust_fit(columns, steps.seconds) == pytest.approx(1.0)


def test_the_time_of_all_steps_is_met_where_noise_is_skewed():
    """A simulation adds many steps, so their mean has to be right, not their median."""
    steps = some_steps(2000, 1)
    noise = np.random.default_rng(0).exponential(0.2, len(steps))
    model = fit(MeasuredSteps(steps.shapes, steps.seconds * (1.0 + noise)), "found", "nowhere")
    assert model.errors is not None and abs(model.errors.total) < 0.03
    assert errors_on(model, steps).total == pytest.approx(0.2, abs=0.04)


def test_errors_are_those_of_steps_that_were_not_fitted():
    """The second half takes twice as long: predicted from each other, the halves are 1.0 and 0.5 off."""
    steps = some_steps(200, 1)
    steps.seconds[100:] *= 2.0
    errors = cross_validated(steps, ("tokens", *REST), folds=2)
    assert errors.p90 == pytest.approx(1.0, abs=0.02) and errors.median >= 0.499


def test_more_tokens_than_were_measured_still_cost():
    """Beyond the longest step that was measured, the last slope goes on."""
    steps = some_steps(300, 1)
    model = fit(steps, "found", "nowhere")
    longest, other = (StepShape(tokens, 1, 0, 5000, 1, 0, 0, 0) for tokens in (int(steps.shapes.tokens.max()), 5000))
    assert model.nanoseconds(other) - model.nanoseconds(longest) == pytest.approx(
        TRUTH.nanoseconds(other) - TRUTH.nanoseconds(longest), rel=0.05
    )


def test_what_no_step_has_costs_nothing_and_too_few_steps_are_refused():
    (form,) = fit(some_steps(100, 1), "found", "nowhere").forms
    assert not {"checkpoints", "moved_blocks", "drafts"} & form.keys() and all(value > 0 for value in form.values())
    assert all(feature == "1" or feature.partition("[")[0] in FIELDS for feature in form)
    with pytest.raises(RequestError, match=r"^9 measured steps: expected at least 10, for 5 folds$"):
        fit(some_steps(9, 1), "few", "nowhere")
