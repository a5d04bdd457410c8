"""A step's time: the same alone as among others, never less for more work; a plan's shape; fits; published figures."""

from __future__ import annotations

import csv
import io
import json
import re
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_checkpoint import published_config

from lfm2np.checkpoint.config_json import parse_config
from lfm2np.commands.simulate.cost import MODELS, VOCAB, CostModel, StepShape, preset, read_cost_model, shape_of
from lfm2np.commands.simulate.fit import MeasuredSteps, errors_of, fit, gathered, read_steps
from lfm2np.commands.simulate.result import cost_words
from lfm2np.errors import RequestError
from lfm2np.truth.layers import key_value_numbers, parameter_count
from scheduler import BatchPlan, Request, Scheduler, SchedulerConfig, TraceWriter

FIELDS = StepShape._fields
counts = st.one_of(st.integers(0, 20), st.integers(0, 2**20), st.integers(0, 2**40))
shapes = st.builds(StepShape, *([counts] * len(FIELDS)))
seconds = st.one_of(st.just(0.0), st.floats(0, 1e-3), st.floats(0, 1e-300))


@st.composite
def features(draw):
    name = draw(st.sampled_from(("1", *FIELDS)))
    if name == "1" or draw(st.booleans()):
        return name
    first = draw(st.one_of(st.none(), st.integers(0, 600)))
    end = draw(st.one_of(st.none(), st.integers((first or 0) + 1, 5000)))
    return f"{name}[{'' if first is None else first}:{'' if end is None else end}]"


forms = st.lists(st.dictionaries(features(), seconds, max_size=8), min_size=1, max_size=3).map(tuple)
models = st.builds(CostModel, st.just("drawn"), st.just("nowhere"), forms, seconds)


@given(models, st.lists(shapes, min_size=1, max_size=20))
def test_one_step_takes_as_long_alone_as_among_others(model, steps):
    together = model.nanoseconds(gathered([(step, 1.0) for step in steps]).shapes)
    alone = [int(model.nanoseconds(step)) for step in steps]
    assert together.dtype == np.int64 and together.tolist() == alone and min(alone) >= 1


@pytest.mark.slow
@given(models, shapes, st.sampled_from(FIELDS), st.integers(0, 2**20))
def test_more_work_takes_no_less(model, step, name, more):
    assert model.nanoseconds(step._replace(**{name: getattr(step, name) + more})) >= model.nanoseconds(step)


@cache
def planned_run() -> tuple[list[BatchPlan], str]:
    """Plans of a small pool with chunks, hits, forks and drafts; and their trace, step n taking n seconds."""
    config = SchedulerConfig(num_blocks=14, block_size=4, max_num_seqs=5, max_num_batched_tokens=12)
    scheduler, plans, file = Scheduler(config), [], io.StringIO()
    trace = TraceWriter(file, config)
    for index in range(8):
        request = Request(str(index), tuple(range(3 + 4 * (index % 5))), max_tokens=20, prompt_logits=index == 3)
        forks = [Request("fork", request.prompt_token_ids, max_tokens=9)] if index == 1 else []
        scheduler.add(request, forks)
        trace.add(request, forks)
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        offered = {entry.request_id: (7, 7, 7) for entry in plan.scheduled if entry.samples == (entry.request_id,)}
        plan = scheduler.add_drafts(plan, offered)
        tokens = {name: [7] for entry in plan.scheduled for name in entry.samples}
        scheduler.update(plan, tokens)
        plans.append(plan)
        trace.step(plan, offered, tokens, [], {}, (0, 0, 0), float(len(plans)))
    trace.end()
    return plans, file.getvalue()


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
        moved_blocks=sum(move.kind == "copy_block" for move in plan.moves),
    )


def test_the_shape_of_a_plan_is_what_stands_in_it():
    plans, _ = planned_run()
    shapes = [shape_of(plan) for plan in plans]
    assert shapes == [seen(plan) for plan in plans]
    assert all(any(column) for column in zip(*shapes, strict=True)), "each field is above 0 in some step"


# --- its file


def test_a_model_is_read_as_it_was_written(tmp_path):
    errors = {"steps": 100, "median": 0.05, "p90": 0.125, "total": -0.01}
    largest = {"tokens": 512, "requests": 8, "read": 4096}
    model = CostModel("mine", "measured here", ({"1": 0.1, "tokens[8:]": 1 / 3}, {"read": 1e-9}), 1e-5, errors, largest)
    model.write(tmp_path / "model.json")
    read = read_cost_model(tmp_path / "model.json")
    assert read.as_json() == json.loads((tmp_path / "model.json").read_text())
    assert read.nanoseconds(StepShape(*[9] * 7)) == model.nanoseconds(StepShape(*[9] * 7))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"forms": [{"tokens": -1.0}]}, "tokens -1.0"),
        ({"forms": [{"tokens": True}]}, "tokens true"),
        ({"forms": [{"tokenz": 1.0}]}, "'tokenz'"),
        ({"forms": [{"tokens[8:8]": 1.0}]}, "'tokens[8:8]'"),
        ({"forms": {"tokens": 1.0}}, "'str'"),
        ({"overhead": "1"}, "overhead '1'"),
        ({"kind": "results"}, "cost model"),
        ({"more": 3}, "'more'"),
        (b"{", "simulate --fit"),
        (b"\xff", "not UTF-8"),
        (b"[]", "simulate --fit"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path, change, named):
    path = tmp_path / "model.json"
    CostModel("mine", "measured here", ({"1": 0.1},)).write(path)
    fields = change if isinstance(change, bytes) else json.dumps({**json.loads(path.read_text()), **change}).encode()
    path.write_bytes(fields)
    with pytest.raises(RequestError, match=rf"^{path}: (?!.*{path}).*{re.escape(named)}.*\Z"):
        read_cost_model(path)


# --- published figures

CHANGED = {  # from LFM2-350M's config
    "LFM2-700M": {"hidden_size": 1536, "intermediate_size": 10240, "num_attention_heads": 24},
    "LFM2-1.2B": {"hidden_size": 2048, "intermediate_size": 12288, "num_attention_heads": 32},
}


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_the_config(name):
    raw = published_config("LFM2-350M") | CHANGED[name] if name in CHANGED else published_config(name)
    config, sizes = parse_config(raw, "config.json"), MODELS[name]
    assert sizes.layers_parameters + VOCAB * sizes.hidden == parameter_count(config)
    assert sizes.key_value_numbers == key_value_numbers(config)
    assert sizes.state_numbers == config.layer_types.count("conv") * (config.conv_L_cache - 1) * config.hidden_size
    assert sizes.num_blocks(1.0, 16) == 10**9 // (2 * (16 * sizes.key_value_numbers + sizes.state_numbers))


@pytest.mark.parametrize("name", ["H100", "H100:LFM2-3B", "LFM2-1.2B:H100", "h100:LFM2-1.2B"])
def test_an_unknown_preset_is_refused(name):
    with pytest.raises(RequestError, match=r"GPU:MODEL, of H100, .* and LFM2-350M"):
        preset(name)


# --- fits

TRUTH = CostModel("truth", "nowhere", ({"1": 0.01, "tokens[:8]": 1e-3, "tokens[8:]": 2e-4, "read": 1e-6},))


def some_steps(count: int, seed: int) -> MeasuredSteps:
    """What TRUTH says, without errors."""
    rng = np.random.default_rng(seed)
    requests = rng.integers(1, 30, count)
    tokens = requests + rng.integers(0, 2, count) * rng.integers(0, 500, count)
    read = tokens + requests * rng.integers(0, 2000, count)
    nothing = np.zeros(count, np.int64)
    shapes = StepShape(tokens, requests, tokens * read // requests, read, requests, nothing, nothing)
    return MeasuredSteps(shapes, TRUTH.nanoseconds(shapes) / 1e9)


def errors_on(model: CostModel, steps: MeasuredSteps) -> dict[str, float]:
    return errors_of(model.nanoseconds(steps.shapes) / 1e9, steps.seconds)


def test_a_known_model_is_found_again_and_what_no_step_has_costs_nothing():
    model = fit(some_steps(300, 1), "found", "nowhere")
    assert model.errors is not None and model.errors["p90"] < 1e-4 and abs(model.errors["total"]) < 1e-3
    assert errors_on(model, some_steps(300, 2))["p90"] < 1e-4
    (form,) = model.forms
    assert not {"checkpoints", "moved_blocks"} & form.keys() and all(value > 0 for value in form.values())


def test_the_time_of_all_steps_is_met_where_noise_is_skewed():
    """A simulation adds many steps, so their mean has to be right, not their median."""
    steps = some_steps(2000, 1)
    noise = np.random.default_rng(0).exponential(0.2, 2000)
    model = fit(MeasuredSteps(steps.shapes, steps.seconds * (1.0 + noise)), "found", "nowhere")
    assert model.errors is not None and abs(model.errors["total"]) < 0.03
    assert errors_on(model, steps)["total"] == pytest.approx(0.2, abs=0.04)


def test_errors_are_those_of_steps_that_were_not_fitted():
    """The last fifth takes twice as long: from the others it is predicted half as long."""
    steps = some_steps(200, 1)
    steps.seconds[160:] *= 2.0
    errors = fit(steps, "found", "nowhere").errors
    assert errors is not None and errors["p90"] >= 0.499
    with pytest.raises(RequestError, match="9 measured steps: expected at least 10"):
        fit(some_steps(9, 1), "few", "nowhere")


def test_steps_that_something_else_made_long_are_said_to_be_missing_in_simulated_times():
    """Every twentieth takes a hundred times as long: the median error hides five sixths of the time."""
    steps = some_steps(400, 1)
    steps.seconds[::20] *= 100.0
    model = fit(steps, "found", "nowhere")
    assert model.errors is not None and model.errors["total"] < -0.5
    warning = f"and by {100 * model.errors['total']:+.0f} % of all their time: simulated times are no better)"
    assert cost_words(vars(model)).endswith(warning)
    assert "simulated times" not in cost_words(vars(fit(some_steps(400, 1), "right", "nowhere")))


def test_more_tokens_than_were_measured_still_cost_and_are_beyond():
    steps = some_steps(300, 1)
    model = fit(steps, "found", "nowhere")
    longest, other = (StepShape(tokens, 1, 0, 5000, 1, 0, 0) for tokens in (int(steps.shapes.tokens.max()), 5000))
    more = TRUTH.nanoseconds(other) - TRUTH.nanoseconds(longest)
    assert model.nanoseconds(other) - model.nanoseconds(longest) == pytest.approx(more, rel=0.05)
    assert model.is_beyond(other) and not model.is_beyond(longest) and not TRUTH.is_beyond(other)


# --- measured steps


def test_each_form_of_file_holds_the_same_steps(tmp_path):
    plans, trace = planned_run()
    shapes = [shape_of(plan) for plan in plans]
    rows = [{**shape._asdict(), "seconds": float(number)} for number, shape in enumerate(shapes, start=1)]
    (tmp_path / "trace.jsonl").write_text(trace)
    (tmp_path / "broken.jsonl").write_text("".join(trace.splitlines(keepends=True)[:-1]))  # without its last line
    with (tmp_path / "steps.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    for name in ("trace.jsonl", "broken.jsonl", "steps.csv"):
        steps = read_steps(tmp_path / name)
        assert [StepShape(*map(int, each)) for each in zip(*steps.shapes, strict=True)] == shapes, name
        assert steps.seconds.tolist() == [row["seconds"] for row in rows], name


def test_what_a_log_leaves_out_is_estimated(tmp_path):
    """Two requests that decode at 10 positions each; one prompt's second half, 5 tokens of 10."""
    path = tmp_path / "log.csv"
    path.write_text("tokens,context,requests,seconds\n2,20,2,0.5\n\n5,10,1,2\n")
    decodes, prompt = (StepShape(*map(int, each)) for each in zip(*read_steps(path).shapes, strict=True))
    assert decodes == StepShape(2, 2, 20, 20, 2, 0, 0)
    assert prompt == StepShape(5, 1, 6 + 7 + 8 + 9 + 10, 10, 1, 0, 0)


HEAD = "tokens,read,requests,seconds\n"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "no measured steps"),
        (HEAD, "no measured steps"),
        ("tokens,read,requests\n1,1,1\n", "line 2: tokens, read, requests: expected tokens, requests, read, seconds"),
        (HEAD + "1,1,1\n", "line 2: seconds None"),
        (HEAD + "1,1,1,1,1\n", "line 2"),
        (HEAD + "1,1,1,x\n", "line 2: seconds 'x'"),
        (HEAD + "1,1,1,0\n", "line 2: seconds '0'"),
        (HEAD + "1,1,1,NaN\n", "line 2: seconds 'NaN'"),
        (HEAD + "1,1,1,1\n1.5,2,1,1\n", "line 3: tokens '1.5'"),
        (HEAD + "1,2,2,1\n", "line 2: expected requests 2 <= tokens 1"),
        (HEAD + "3,2,1,1\n", "line 2: expected requests 1 <= tokens 3 <= read 2"),
        (HEAD + "1,-1,1,1\n", "line 2: read '-1'"),
        ("tokens,read,requests,seconds,sampld\n1,1,1,1,1\n", "sampld"),
        ('{"kind": "header"}\n', "line 1: kind 'header'"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path, content, named):
    path = tmp_path / "steps"
    path.write_text(content)
    with pytest.raises(RequestError, match=rf"^{path}: .*{re.escape(named)}.*\Z"):
        read_steps(path)
