"""fixtures/serve_soak.py: what it calls wrong, and a small run of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import serve_soak
from serve_soak import Ask, Outcome, failures

ASKS = [Ask("waited", 0, 0.0), Ask("left", 0, 0.0), Ask("slow", 0, 0.0), Ask("refused", 4, 0.0)]
TRUTH = {0: [[[5, 2], "a", [-0.5, -0.25], "stop"]]}
RIGHT = Outcome([TRUTH[0], True, True, 404], [80.0, 100.0, 120.0])


def test_a_run_in_which_all_is_right_is_right():
    assert failures(ASKS, TRUTH, RIGHT) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"answers": [[[[5, 3], "a", [-0.5, -0.25], "stop"]], True, True, 404]}, "waited: a wrong answer, 1 times"),
        ({"answers": [[[[5, 2], "a", [-0.5, -0.2], "stop"]], True, True, 404]}, "waited: a wrong answer, 1 times"),
        ({"answers": [None, True, True, 404]}, "waited: no answer, 1 times"),
        ({"answers": [TRUTH[0], None, True, 404]}, "left: no answer, 1 times"),
        ({"answers": [TRUTH[0], True, True, 400]}, "refused: a wrong answer, 1 times"),
        ({"megabytes": [80.0, 100.0, 120.1]}, "memory grew from 100 to 120 MB"),
        ({"held": {"lfm2np:num_requests_running": 1.0}}, "held in the end"),
        ({"exit_code": -9}, "exit code -9"),
    ],
)
def test_whatever_is_wrong_with_a_run_is_named(change: dict[str, Any], sentence: str):
    (failure,) = failures(ASKS, TRUTH, replace(RIGHT, **change))
    assert failure.startswith(sentence)


@pytest.mark.slow
def test_a_small_run_ends_well_and_one_with_another_truth_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(serve_soak, "KINDS", {"waited": 0.8, "refused": 0.2})
    assert serve_soak.main(["--requests", "10", "--clients", "4"]) == 0
    assert "10 requests of 4 clients" in capsys.readouterr().out
    monkeypatch.setattr(serve_soak, "expected", lambda *_: [])
    assert serve_soak.main(["--requests", "10", "--clients", "4"]) == 1
    assert "waited: a wrong answer" in capsys.readouterr().out
