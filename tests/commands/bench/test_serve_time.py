"""What HTTP costs is measured on a server that really serves, and told with what it is a ratio of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lfm2np.commands.bench import serve_time
from lfm2np.commands.bench.serve_time import ServeTime, Waited, as_json, as_text, asked, measure_serve
from lfm2np.commands.bench.sides.serve_side import ServeSide
from lfm2np.commands.serve import extra
from lfm2np.errors import RequestError
from scheduler import POLICIES

SMALL = Path(__file__).parents[3] / "fixtures" / "torture" / "six_heads_two_kv"


@pytest.mark.slow
def test_each_side_is_measured_each_round_and_each_policy_once(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"CLIENTS": 2, "EACH": 2, "PROMPT": 4, "NEW_TOKENS": 3, "ARRIVALS": 4, "LONG": 9}.items():
        monkeypatch.setattr(serve_time, name, value)
    times = measure_serve(SMALL, "float32", 2, 1, lambda done, total: None)
    assert len(times.direct) == len(times.over_http) == 2 and min(times.direct + times.over_http) > 0
    assert times.waited.keys() == POLICIES.keys() and all(len(waits) == 4 for waits in times.waited.values())
    assert all(0 < wait.first <= wait.whole for waited in times.waited.values() for wait in waited)
    assert json.loads(json.dumps(as_json(times)))["waited"].keys() == POLICIES.keys()


def test_the_ratio_is_taken_within_each_round():
    waited = [Waited(1.0, 0.5, 2.0), Waited(3.0, 0.1, 4.0)]
    times = ServeTime([10.0, 30.0, 20.0], [12.5, 30.0, 40.0], 0.5, {"fcfs": waited})
    text = as_text("exact", times)
    assert "HTTP / direct 0.80 (0.50 to 1.00)" in text
    assert text.splitlines()[-1].split() == ["fcfs", "2.00", "3.00", "0.30", "0.50", "3.00"]


def test_an_answer_that_is_none_is_an_error():
    side = ServeSide("float32")
    side.load(SMALL, 1)
    port = side.open("fcfs", 1)["port"]
    try:
        with pytest.raises(RequestError, match="HTTP 400 and 0 tokens"):
            asked(port, [10**6])
    finally:
        side.shut()


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extra, "NEEDED", ("no_such_package",))
    with pytest.raises(RequestError, match="no_such_package: not installed; bench serve needs the extra `serve`"):
        measure_serve(SMALL, "float32", 1, 1, lambda done, total: None)
