"""The page of a model with a mixture of experts: its rows, classes and numbers are the recorded run's, and the routes
are those of reference.py."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import Counter
from fractions import Fraction
from html import unescape
from pathlib import Path

import drawn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lfm2np
from lfm2np.commands.cli import main
from lfm2np.engine.loading import Model
from lfm2np.oracle.judging.routes import routed as keeping_routes
from lfm2np.oracle.report.markup import counted, number
from lfm2np.teaching.drawings import demo
from lfm2np.teaching.drawings.all_views import draw
from lfm2np.teaching.drawings.runs.detail import EXPERT, MOST_CALLS, PRODUCT, REQUEST
from lfm2np.teaching.drawings.runs.expert_choices import read_evenly, routes
from lfm2np.teaching.drawings.runs.recorded import Coming, recorded
from lfm2np.teaching.drawings.runs.recorded_run import Run, read_run
from lfm2np.teaching.drawings.terminal_drawing import as_text
from lfm2np.teaching.drawings.views.worksheet import of_experts
from lfm2np.truth import reference
from lfm2np.truth.weights import FeedForwardWeights

pytestmark = pytest.mark.slow

TORTURE = Path(__file__).parents[3] / "fixtures" / "torture"
SPARSE = ("moe_published", "moe_fused_no_bias", "moe_one_a_token", "moe_all_experts", "moe_one_expert", "moe_near_ties")
PROMPTS = {"a": [1, 17, 30, 5, 9], "b": [1, 3, 8], "c": [1, *range(11, 22)]}


def three(model: Model) -> Run:
    coming = [Coming(name, ids, demo.greedy(6), 2 * (name == "c")) for name, ids in PROMPTS.items()]
    return read_run(recorded(model, coming, max_num_batched_tokens=10))


@functools.cache
def recorded_on(name: str) -> tuple[Model, Run]:
    model = lfm2np.load(TORTURE / name)
    return model, three(model)


@functools.cache
def demo_lines() -> list[str]:
    model = recorded_on("moe_published")[0]
    return demo.main_lines(model)


@functools.cache
def demo_run() -> Run:
    return read_run(demo_lines())


@functools.cache
def page() -> str:
    return draw(demo_run(), lfm2np.load(), "the demo's run on moe_published", "lfm2np draw --demo")


def routes_alone(model: Model, ids: list[int]) -> list[list[tuple[int, ...]]]:
    """By sparse layer and position the experts that the whole sequence, computed by itself, goes to."""
    numerics, kept = keeping_routes(model.numerics)
    reference.hidden_states(model.weights, model.config, numerics, ids)
    return [[tuple(map(int, row)) for row in layer] for layer in kept.chosen().transpose(1, 0, 2)]


# --- what is recorded


@pytest.mark.parametrize("name", SPARSE)
def test_recorded_routes_and_tokens_are_those_of_each_request_alone(name: str) -> None:
    model, run = recorded_on(name)
    for request, prompt in PROMPTS.items():
        said = [token for step in run.steps for token in step.tokens.get(request, ())]
        rows = model.logits([*prompt, *said])[len(prompt) - 1 : -1]
        assert said == [int(np.argmax(row)) for row in rows]
        alone = routes_alone(model, [*prompt, *said])
        for step in run.steps:
            first = 0
            for entry in step.entries:
                rows = slice(first, first + len(entry.token_ids))
                first = rows.stop
                if entry.request_id == request:
                    assert [list(route.chosen[rows]) for route in routes(step)] == [
                        layer[entry.start : entry.stop] for layer in alone
                    ]


def test_every_expert_that_is_chosen_has_its_products_and_the_router_one_over_all_tokens() -> None:
    """Two products an expert, over as many rows as chose it, named as the checkpoint names it; numbers of few."""
    model, run = recorded_on("moe_published")
    seen = False
    for step in run.steps:
        for layer in range(model.config.num_hidden_layers):
            mine = [each for each in step.operations if each["layer"] == layer and "feed_forward" in each["name"]]
            names = [each["name"] for each in mine if each["class"] == PRODUCT]
            dense = ["feed_forward.w1, w3", "feed_forward.w2"]
            assert names == (["feed_forward.gate"] if model.config.is_sparse(layer) else dense)
            assert all(
                each["output"]["shape"][0] == step.num_tokens
                for each in mine
                if each["class"] not in (REQUEST, EXPERT) and "expert" not in each
            )
        for chosen in routes(step):
            mine = [each for each in step.operations if each["layer"] == chosen.layer and each["class"] == EXPERT]
            assert {each["operation"] for each in mine} == {"linear"}
            assert {each["name"]: each["output"]["shape"][0] for each in mine} == {
                f"feed_forward.experts.{expert}.{part}": count
                for expert, count in enumerate(chosen.rows)
                if count
                for part in ("w1, w3", "w2")
            }
            assert sum(chosen.rows) == chosen.num_choices == 2 * step.num_tokens
            assert chosen.num_read == sum(count > 0 for count in chosen.rows)
            first = [bool(each["output"]["values"]) for each in mine if each["name"].endswith("w3")]
            assert first == [index < MOST_CALLS for index in range(len(first))]
            seen |= len(first) > MOST_CALLS
    assert seen
    count = Counter(each["operation"] for step in run.steps for each in step.operations)
    assert count["sigmoid"] == count["prefer"] == count["best"] == count["shares"] == count["mix"] == 3 * len(run.steps)


def test_an_experts_numbers_are_its_weights_times_the_rows_that_chose_it() -> None:
    model, run = recorded_on("moe_published")
    compared = 0
    for operation in (each for step in run.steps for each in step.operations if each["class"] == EXPERT):
        values = operation["inputs"]["x"]["values"]
        if not len(values) or len(values[0]) != operation["inputs"]["x"]["shape"][1]:
            continue  # not recorded whole
        mixture = model.weights.layers[operation["layer"]].feed_forward
        assert not isinstance(mixture, FeedForwardWeights)
        weights = mixture.expert(operation["expert"])
        matrix = weights.gate_up_proj if operation["name"].endswith("w3") else weights.down_proj
        output = model.numerics.linear(np.array(values, np.float32), matrix)
        for row, value in zip(output, operation["output"]["values"], strict=False):  # of a large one the first rows
            assert np.array_equal(np.float32(value), row[: len(value)])
            compared += len(value)
    assert compared > 500


def test_streamed_experts_are_recorded_too() -> None:
    run = recorded_on("moe_published")[1]
    streamed = lfm2np.load(TORTURE / "moe_published", weights="streamed")
    assert [step.tokens for step in three(streamed).steps] == [step.tokens for step in run.steps]


def test_a_dense_run_has_no_experts() -> None:
    run, text = drawn.demo_run(), drawn.demo_page()
    assert not any(routes(step) for step in run.steps) and of_experts(run) == []
    assert EXPERT not in text and 'id="experts"' not in text
    assert "expert" not in as_text(run, 0, colour=False)


# --- what follows from it


@given(st.integers(1, 5), st.data(), st.integers(1, 3))
def test_read_evenly_is_the_average_over_all_choices(experts: int, data: st.DataObject, tokens: int) -> None:
    per_token = data.draw(st.integers(1, experts))
    ways = list(itertools.combinations(range(experts), per_token))
    drawn = list(itertools.product(ways, repeat=tokens))
    if len(drawn) > 1000:
        return
    mean = Fraction(sum(len(set().union(*map(set, one))) for one in drawn), len(drawn))
    assert read_evenly(experts, per_token, tokens) == pytest.approx(float(mean), rel=1e-9)


# --- the page, exercises and the terminal


def tables_of(page: str) -> dict[str, list[list[str]]]:
    """Rows of cells, the first of headings, by the table's caption."""
    return {
        unescape(caption): [
            [unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
            for row in re.findall(r"<tr[^>]*>(.*?)</tr>", body)
        ]
        for caption, body in re.findall(r"<caption>(.*?)</caption>(.*?)</table>", page)
    }


def view_of(page: str) -> str:
    return re.split(r'(?=<section id=")', page[page.index('<section id="experts"') :])[1]


def test_the_page_shows_the_routing_of_the_run() -> None:
    tables = tables_of(view_of(page()))
    for step in demo_run().steps:
        rows = tables[f"Step {step.number}: rows of each expert"][1:]
        assert rows == [
            [
                f"block {route.layer}",
                *(str(count or "") for count in route.rows),
                str(route.num_choices),
                str(route.num_read),
            ]
            for route in routes(step)
        ]
    first = [(step, routes(step)[0]) for step in demo_run().steps if step.entries]
    assert tables["Experts of the first sparse block"][1:] == [
        [
            *map(str, (step.number, tokens := step.num_tokens, 2 * tokens, len({*sum(layer.chosen, ())}))),
            number(read_evenly(8, 2, tokens), 3),
            str(max(layer.rows)),
        ]
        for step, layer in first
    ]


def test_the_classes_of_the_page_have_the_fourth() -> None:
    tables = tables_of(page())
    for step in demo_run().steps:
        rows = {row[0]: row[2:] for row in tables[f"What step {step.number} batches, and what not"][1:]}
        assert set(rows) == {operation["class"] for operation in step.operations}
        mine = [operation for operation in step.operations if operation["class"] == EXPERT]
        assert rows[EXPERT] == [str(len(mine)), str(sum(each["output"]["shape"][0] for each in mine))]


def test_the_figure_has_a_square_for_every_choice() -> None:
    figures = re.findall(r"<svg.*?</svg>", view_of(page()))
    for step in demo_run().steps:
        layer = routes(step)[0]
        title = f"Step {step.number}, block {layer.layer}: the rows of each expert"
        figure = next(picture for picture in figures if f">{title}<" in picture)
        squares = re.findall(r"<title>row (\d+): [^<]*?: expert (\d+)</title>", figure)
        assert [(int(row), int(expert)) for row, expert in squares] == [
            (row, expert) for expert in range(8) for row, chosen in enumerate(layer.chosen) if expert in chosen
        ]
        labels = [counted(count, "row") if count else "not read" for count in layer.rows]
        assert re.findall(r">(\d+ rows?|not read)</text>", figure) == labels


@pytest.mark.parametrize("name", SPARSE)
def test_exercises_have_the_answers_of_the_run(name: str) -> None:
    _, run = recorded_on(name)
    questions = {title: str(question) for title, question, _ in of_experts(run)}
    answers = {title: answer for title, _, answer in of_experts(run)}
    listed = re.findall(r"\u201d ([\d, ]+)", questions["Products of experts."])
    rows = Counter(int(expert) for line in listed for expert in line.rstrip(", ").split(", "))
    counts = ", ".join(f"expert {expert} over {counted(rows[expert], 'row')}" for expert in sorted(rows))
    assert answers["Products of experts."] == f"{len(rows)}: {counts}"
    assert answers["Weights that are read."] == f"{sum(rows.values())} times, and {len(rows)} times"


def test_the_terminal_shows_rows_of_each_expert() -> None:
    run = recorded_on("moe_published")[1]
    for step in run.steps:
        lines = as_text(run, step.number, colour=False).splitlines()
        for layer in routes(step):
            (line,) = [text for text in lines if text.startswith(f"  block {layer.layer} ")]
            words = line.split()
            assert [0 if word == "." else int(word) for word in words[2:10]] == layer.rows
            assert line.endswith(f"{counted(layer.num_read, 'expert')} for {counted(layer.num_choices, 'choice')}")


def test_the_commands_record_replay_and_draw_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, out = tmp_path / "run.jsonl", tmp_path / "page.html"
    directory = str(TORTURE / "moe_published")
    asked = ["generate", "--model", directory, "--prompt-ids", "1,17,42", "--max-tokens", "3"]
    assert main([*asked, "--trace", str(trace), "--trace-detail", "--prove"]) == 0
    assert all(len(routes(step)) == 3 for step in read_run(trace.read_text().splitlines()).steps)
    assert main(["draw", str(trace), "--replay"]) == 0
    assert main(["draw", str(trace), "-o", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 3
    assert 'id="experts"' in out.read_text(encoding="utf-8")

    def lines_of(model: Model) -> list[str]:
        assert str(model.path) == directory
        return demo_lines()

    monkeypatch.setattr(demo, "main_lines", lines_of)
    assert main(["draw", "--demo", "--model", directory, "--terminal", "--step", "0"]) == 0
    assert "rows of each expert" in capsys.readouterr().out
