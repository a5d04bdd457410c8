"""What the engine's thread does where a step fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from served_app import model, serving

from lfm2np.commands.serve.engine_thread import Failed, Job, Refused, Runner, Told
from lfm2np.engine.engine import Engine
from lfm2np.engine.sampling.params import SamplingParams


def failing(engine: Engine, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """So many steps fail."""
    left, step = iter(range(times)), engine.step

    def failed() -> Any:
        if next(left, None) is not None:
            raise MemoryError("no room")
        return step()

    monkeypatch.setattr(engine, "step", failed)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_step_that_fails_ends_the_engine_which_is_told(monkeypatch: pytest.MonkeyPatch, is_streamed: bool):
    with serving(model()) as served:
        failing(served.engine, monkeypatch, 1)
        fields = {"prompt": "a", "max_tokens": 2, "stream": is_streamed}
        status, reply = served.ask("/v1/completions", fields)
        assert status == 500 and reply["error"]["message"] == "MemoryError: no room"
        status, reply = served.ask("/v1/completions", fields)
        assert status == 503 and "the engine ended" in reply["error"]["message"]
        assert served.get("/health")[0] == 503


def test_whatever_goes_wrong_between_steps_is_told_to_all(monkeypatch: pytest.MonkeyPatch):
    """What is under way, what comes with it, and what comes later."""
    with serving(model()) as served, ThreadPoolExecutor(2) as pool:
        first = pool.submit(served.ask, "/v1/completions", {"prompt": [1], "max_tokens": 200, "ignore_eos": True})
        while not served.service.desk.runner.state.metrics.steps:
            threading.Event().wait(0.005)
        monkeypatch.setattr(served.engine, "add_request", lambda *_: {}["no"])
        second = served.ask("/v1/completions", {"prompt": [[2], [3]]})
        assert [first.result()[0], second[0]] == [500, 500]
        assert "KeyError" in second[1]["error"]["message"]
        assert served.ask("/v1/completions", {"prompt": [3]})[0] == served.get("/health")[0] == 503


@pytest.fixture
def told() -> list[tuple[str, Told]]:
    return []


@pytest.fixture
def runner(told: list[tuple[str, Told]]) -> Iterator[Runner]:
    one = Runner(Engine(model(), num_blocks=10, block_size=4), told.extend)
    yield one
    one.stop()


def job(name: str, tokens: int, max_tokens: int = 2) -> Job:
    return Job(name, tuple(range(1, tokens + 1)), SamplingParams(temperature=0.0, max_tokens=max_tokens))


def wait(told: Sequence[Any], until: Any) -> None:
    """Until it is true of what was told."""
    for _ in range(1000):
        if until():
            return
        threading.Event().wait(0.01)
    raise AssertionError(told)


def test_a_job_that_is_refused_keeps_no_other_from_running(runner: Runner, told: list[tuple[str, Told]]):
    runner.add([job("large", 60), job("small", 3), job("small", 3)])
    wait(told, lambda: any(name == "small" and getattr(event, "finished", False) for name, event in told))
    refused = {name: event.why for name, event in told if isinstance(event, Refused)}
    assert "the pool has 10" in refused["large"] and "already in use" in refused["small"]
    assert not any(isinstance(event, Failed) for _, event in told)


def test_nothing_is_told_of_what_was_aborted(runner: Runner, told: list[tuple[str, Told]]):
    runner.add([job("a", 3, 30), job("b", 3, 30)])
    runner.abort(["a", "no such"])
    wait(told, lambda: any(getattr(event, "finished", False) for _, event in told))
    assert {name for name, _ in told} == {"b"}
