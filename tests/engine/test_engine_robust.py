"""What goes wrong inside a call ends the engine, which says so; a callback may do more."""

import io
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import lfm2np
from lfm2np import LLM, Engine, RequestError, SamplingParams
from lfm2np.engine.acceptance import next_token
from lfm2np.engine.loading import Model
from lfm2np.engine.outputs import RequestOutput
from lfm2np.errors import NumericsError
from lfm2np.suite.audit import AuditedEngine
from scheduler import RequestRefused, replay


@pytest.fixture(scope="module")
def trained() -> Model:
    return lfm2np.load()


GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
CALLS: dict[str, Callable[[Engine], Any]] = {
    "step": lambda engine: engine.step(),
    "add_request": lambda engine: engine.add_request("new", [1, 4]),
    "abort": lambda engine: engine.abort("a"),
    "preempt": lambda engine: engine.preempt("a"),
    "fork": lambda engine: engine.fork("a", "new"),
}
INTERRUPT, ERROR = KeyboardInterrupt(), OSError("no space left")


@pytest.mark.parametrize(
    ("call", "where", "error"),
    [
        ("step", "lfm2np.engine.engine.forward", INTERRUPT),
        ("step", "lfm2np.engine.engine.commit_step", ERROR),
        ("step", "lfm2np.engine.engine.Engine._report", INTERRUPT),  # a callback
        ("step", "lfm2np.engine.engine.Engine._report", RequestRefused("no")),  # by whatever it calls
        *((call, "scheduler.trace.TraceWriter._write", ERROR) for call in CALLS),
        ("abort", "scheduler.trace.TraceWriter._write", INTERRUPT),
    ],
)
def test_an_exception_ends_the_engine_which_says_so(trained: Model, call: str, where: str, error: BaseException):
    """Whatever is half done then, no later call builds on it, and the trace up to there replays."""
    trace = io.StringIO()
    engine = Engine(trained, block_size=2, num_blocks=40, trace=trace)
    engine.add_request("a", [1, 5, 6], GREEDY)
    engine.step()
    with patch(where, side_effect=error), pytest.raises(type(error)):
        CALLS[call](engine)
    assert engine.has_unfinished and not engine.is_usable
    why = rf"the engine has ended, by {type(error).__name__} in {call}\(\): {error}; make a new one"
    for name, later in CALLS.items():
        with pytest.raises(RequestError, match=rf"^{name}\(\): {why}"):
            later(engine)
    replay(trace.getvalue().splitlines(), is_whole=False)


def test_samples_outlive_the_first_whose_token_could_not_be_chosen(trained: Model):
    """They wait, and compute the prompt themselves."""
    params = SamplingParams(n=3, temperature=1.0, max_tokens=3, seed=4, ignore_eos=True)
    prompt = [1, 5, 6, 7, 8]
    sound, *expected = LLM(trained).generate([prompt], params)[0].outputs

    def failing(*arguments: Any) -> int:
        if arguments[6] == 0:  # the sample's number
            raise NumericsError("no distribution")
        return next_token(*arguments)

    engine = AuditedEngine(trained, block_size=2, num_blocks=40)
    engine.add_request("a", prompt, params)
    with patch("lfm2np.engine.sampler.next_token", side_effect=failing):
        (output,) = [each for each in engine.stream() if each.finished]
    first, *others = output.outputs
    assert first.finish_reason == "error" and not first.token_ids and sound.token_ids
    assert [each.token_ids for each in others] == [each.token_ids for each in expected]


def test_an_abort_leaves_the_samples_that_have_ended_as_they_are(trained: Model):
    engine = AuditedEngine(trained, num_blocks=40, max_num_seqs=1)  # so that one sample ends after the other
    engine.add_request("a", [1, 5, 6], SamplingParams(n=2, max_tokens=2, ignore_eos=True))
    for _ in range(2):
        engine.step()
    assert [each.finish_reason for each in engine.abort("a").outputs] == ["length", "abort"]


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_callback_may_abort_any_request(trained: Model, who: str):
    def callback(name: str, position: int, row: np.ndarray, token: int) -> None:
        if position == 4 and name == "a":
            aborted.append(engine.abort(who))

    aborted: list[RequestOutput] = []
    trace = io.StringIO()
    engine = AuditedEngine(trained, on_logits=callback, num_blocks=100, trace=trace)
    for name in ("a", "b"):
        engine.add_request(name, [1, 5, 6], SamplingParams(n=2, temperature=1.0, max_tokens=6, seed=1, ignore_eos=True))
    outputs = {output.request_id: output for output in engine.stream() if output.finished}
    assert {output.finish_reason for output in aborted[0].outputs} == {"abort"}
    assert set(outputs) == {"a", "b"} - {who}
    replay(trace.getvalue().splitlines(), is_whole=False)
