"""Measured steps of any engine: CSV, JSON lines and our traces say the same; a bad file is named in one line."""

from __future__ import annotations

import csv
import json

import pytest
from planned import planned_run

from lfm2np.commands.simulate.cost import FIELDS, StepShape, shape_of
from lfm2np.commands.simulate.steps import read_steps
from lfm2np.errors import RequestError


def of_single(steps) -> list[StepShape]:
    return [StepShape(*(int(getattr(steps.shapes, name)[index]) for name in FIELDS)) for index in range(len(steps))]


def test_each_form_holds_the_same_steps(tmp_path):
    plans, trace = planned_run()
    shapes = [shape_of(plan) for plan in plans]
    rows = [
        {**{name: getattr(shape, name) for name in FIELDS}, "seconds": float(number)}
        for number, shape in enumerate(shapes, start=1)
    ]
    (tmp_path / "trace.jsonl").write_text(trace)
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (tmp_path / "steps.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    for name in ("trace.jsonl", "steps.jsonl", "steps.csv"):
        steps = read_steps(tmp_path / name)
        assert of_single(steps) == shapes, name
        assert steps.seconds.tolist() == [row["seconds"] for row in rows], name


def test_what_a_log_leaves_out_is_estimated(tmp_path):
    """Two requests that decode at 10 positions each; one prompt's second half, 5 tokens of 10."""
    path = tmp_path / "log.csv"
    path.write_text("tokens,context,requests,seconds\n2,20,2,0.5\n\n5,10,1,2\n")
    decodes, prompt = of_single(read_steps(path))
    assert decodes == StepShape(2, 2, 20, 20, 2, 0, 0, 0)
    assert prompt == StepShape(5, 1, 6 + 7 + 8 + 9 + 10, 10, 1, 0, 0, 0)


HEAD = "tokens,read,requests,seconds\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no measured steps: expected at least one"),
        (HEAD, "no measured steps: expected at least one"),
        ("tokens,read,requests\n1,1,1\n", "line 2: no field 'seconds': expected tokens, requests, context and seconds"),
        (HEAD + "1,1,1\n", "line 2: 3 columns: expected 4, as in line 1"),
        (HEAD + "1,1,1,x\n", "line 2: seconds 'x': expected a number above 0"),
        (HEAD + "1,1,1,nan\n", "line 2: seconds nan: expected a number above 0"),
        (HEAD + "1,1,1,0\n", "line 2: seconds 0: expected a number above 0"),
        (HEAD + "1,1,1,1\n1.5,2,1,1\n", "line 3: tokens 1.5: expected a whole number, at least 0"),
        (HEAD + "1,2,2,1\n", "line 2: tokens 1: expected at least one for each of 2 requests"),
        (HEAD + "3,2,1,1\n", "line 2: read 2: expected at least the 3 tokens themselves"),
        ("tokens,tokens\n1,1\n", "line 1: column 'tokens' comes 2 times: expected once"),
        ("tokens,read,requests,seconds,sampld\n1,1,1,1,1\n", "line 2: unknown field 'sampld': expected tokens, "),
        ('{"tokens": 1, "read": 1, "requests": 1, "seconds": 1}\n[]\n', "line 2: []: expected an object"),
        (
            '{"tokens": 1, "read": 1, "requests": 1, "seconds": 1, "context": 1}\n',
            "line 1: both 'context' and 'read': ",
        ),
        ('{"tokens": true, "read": 1, "requests": 1, "seconds": 1}\n', "line 1: tokens true: expected a whole number"),
        ('{"tokens": 1,\n', "line 1: invalid JSON: "),
        ('{"kind": "header"}\n', "line 1: kind 'header', version None: expected header, 3"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path, content, message):
    path = tmp_path / "steps"
    path.write_text(content)
    with pytest.raises(RequestError) as caught:
        read_steps(path)
    assert str(caught.value).startswith(f"{path}: {message}") and "\n" not in str(caught.value)


def test_a_trace_without_times_is_refused_and_one_that_broke_off_is_read(tmp_path):
    plans, trace = planned_run()
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(trace.splitlines(keepends=True)[:-1]))
    assert len(read_steps(path)) == len(plans)
    header, *others = [json.loads(line) for line in trace.splitlines()]
    lines = [{**line, "seconds": None} if line["kind"] == "step" else line for line in others]
    lines = [{name: value for name, value in line.items() if name != "sha256"} for line in lines]
    del header["sha256"]
    path.write_text("".join(json.dumps(line) + "\n" for line in [{**header, "checksums": False}, *lines]))
    with pytest.raises(RequestError, match=r"line 10: not a measured step: seconds null: expected a number above 0$"):
        read_steps(path)
