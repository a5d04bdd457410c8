"""A step's time: the same integer alone as among others, never less for more work; a plan's shape, counted slowly."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import planned_run

from lfm2np.commands.simulate.cost import FIELDS, CostModel, FitErrors, StepShape, read_cost_model, shape_of
from lfm2np.errors import RequestError
from scheduler import BatchPlan

counts = st.one_of(st.integers(0, 20), st.integers(0, 2**20), st.integers(0, 2**62))
shapes = st.builds(StepShape, *([counts] * len(FIELDS)))
seconds = st.one_of(st.just(0.0), st.floats(0, 1e-3), st.floats(0, 1e9), st.floats(0, 1e-300))


@st.composite
def features(draw):
    name = draw(st.sampled_from(("1", *FIELDS)))
    if name == "1" or draw(st.booleans()):
        return name
    first = draw(st.one_of(st.none(), st.integers(0, 600)))
    end = draw(st.one_of(st.none(), st.integers((first or 0) + 1, 5000)))
    return f"{name}[{'' if first is None else first}:{'' if end is None else end}]"


models = st.builds(
    CostModel,
    st.just("drawn"),
    st.just("nowhere"),
    st.lists(st.dictionaries(features(), seconds, max_size=8), min_size=1, max_size=3).map(tuple),
    seconds,
)


def of_many(steps: list[StepShape]) -> StepShape:
    return StepShape(*(np.array([getattr(step, name) for step in steps], np.int64) for name in FIELDS))


@given(models, st.lists(shapes, min_size=1, max_size=20))
def test_one_step_takes_as_long_alone_as_among_others(model, steps):
    together = model.nanoseconds_of(of_many(steps))
    alone = [model.nanoseconds(step) for step in steps]
    assert together.dtype == np.int64 and together.tolist() == alone
    assert all(type(time) is int and time >= 1 for time in alone)


@given(models, shapes, st.sampled_from(FIELDS), st.integers(0, 2**20))
def test_more_work_takes_no_less(model, step, name, more):
    values = {each: getattr(step, each) for each in FIELDS}
    larger = StepShape(**{**values, name: values[name] + more})
    assert model.nanoseconds(larger) >= model.nanoseconds(step)


def test_a_part_counts_as_a_slice_has_elements():
    model = CostModel("parts", "nowhere", ({"1": 1.0, "tokens[2:5]": 10.0, "requests[3:]": 100.0, "read[:4]": 1000.0},))
    for count in range(8):
        part = 1.0 + 10.0 * len(range(count)[2:5]) + 100.0 * len(range(count)[3:]) + 1000.0 * len(range(count)[:4])
        shape = StepShape(
            tokens=count, requests=count, read=count, attended=0, sampled=0, checkpoints=0, moved_blocks=0, drafts=0
        )
        assert model.nanoseconds(shape) == part * 10**9


def test_a_roofline_is_the_larger_sum_and_what_every_step_takes():
    model = CostModel("two", "nowhere", ({"tokens": 2.0}, {"1": 6.0}), overhead=0.5)
    shape = StepShape(1, 1, 1, 1, 1, 0, 0, 0)
    assert model.nanoseconds(shape) == 6_500_000_000
    assert model.nanoseconds(StepShape(4, 1, 1, 1, 1, 0, 0, 0)) == 8_500_000_000


# --- the shape of a plan


def seen(plan: BatchPlan) -> StepShape:
    """Counted token by token."""
    rows = [(entry, position) for entry in plan.scheduled for position in range(entry.start, entry.stop)]
    return StepShape(
        tokens=len(rows),
        requests=len({entry.request_id for entry, _ in rows}),
        attended=sum(len(range(position + 1)) for _, position in rows),
        read=len({(entry.request_id, other) for entry, position in rows for other in range(position + 1)}),
        sampled=sum(position >= entry.first_logits for entry, position in rows),
        checkpoints=sum(len(entry.checkpoints) for entry in plan.scheduled),
        moved_blocks=sum(move.kind in ("copy_block", "save_block", "load_block") for move in plan.moves),
        drafts=sum(len(entry.drafts) for entry in plan.scheduled),
    )


def test_the_shape_of_a_plan_is_what_stands_in_it():
    plans, _ = planned_run()
    shapes = [shape_of(plan) for plan in plans]
    assert shapes == [seen(plan) for plan in plans]
    for name in FIELDS:
        assert any(getattr(shape, name) for shape in shapes), f"no step has {name}"


# --- the file


def test_a_model_is_read_as_it_was_written(tmp_path):
    errors = FitErrors(steps=100, folds=5, median=0.05, p90=0.125, total=-0.01)
    largest = {"tokens": 512, "requests": 8, "read": 4096}
    model = CostModel("mine", "measured here", ({"1": 0.1, "tokens[8:]": 1 / 3}, {"read": 1e-9}), 1e-5, errors, largest)
    model.write(tmp_path / "model.json")
    assert read_cost_model(tmp_path / "model.json") == model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forms": [{"tokens": -1.0}]}, "tokens -1.0: expected seconds, at least 0"),
        ({"forms": [{"tokens": True}]}, "tokens true: expected seconds, at least 0"),
        ({"forms": [{"tokens": float("nan")}]}, "tokens nan: expected seconds, at least 0"),
        ({"forms": [{"tokenz": 1.0}]}, "feature 'tokenz': expected 1, one of tokens, "),
        ({"forms": [{"tokens[8:8]": 1.0}]}, "feature 'tokens[8:8]': expected 1, one of tokens, "),
        ({"forms": []}, "forms []: expected at least one"),
        ({"forms": {"tokens": 1.0}}, "expected a list of objects, seconds by feature"),
        ({"overhead": "1"}, "overhead '1': expected seconds, at least 0"),
        ({"version": 2}, "version 2: expected 1"),
        ({"kind": "results"}, "kind 'results': expected cost model"),
        ({"name": 3}, "name 3: expected a string"),
        ({"more": 3}, "unknown field 'more': expected kind, "),
        ({"largest": {"tokens": 3}}, "largest: no field 'requests': expected tokens, requests, read"),
        ({"largest": {"tokens": 3, "requests": 1.5, "read": 9}}, "largest: requests 1.5: expected a whole number"),
        ({"errors": {"steps": 3}}, "errors: no field 'folds': expected steps, "),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path, change, message):
    path = tmp_path / "model.json"
    CostModel("mine", "measured here", ({"1": 0.1},)).write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RequestError) as caught:
        read_cost_model(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b"", b"[" * 100_000])
def test_what_is_no_object_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=r"^[^\n]*model.json: [^\n]+$"):
        read_cost_model(path)
