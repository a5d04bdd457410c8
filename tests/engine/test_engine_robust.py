"""What goes wrong inside a step (interrupts, callbacks, files, drafters) never becomes a wrong answer."""

import io
import random
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from truths import greedy_tokens

import lfm2np
import scheduler
from lfm2np import LLM, Engine, NgramDrafter, RequestError, SamplingParams
from lfm2np.checkpoint.loaded import hand_fixture
from lfm2np.engine.loading import Model
from lfm2np.engine.outputs import RequestOutput
from scheduler import replay

SOURCES = (str(Path(lfm2np.__file__).parent), str(Path(scheduler.__file__).parent))
BOOKS = (lfm2np.engine.engine.__file__, SOURCES[1])  # what an engine's requests are entered in
PROMPTS = {"a": [1, 5, 6, 7, 8], "b": [1, 5, 6, 7, 9, 9, 9], "c": [1, 30, 31]}
PARAMS = {
    "a": SamplingParams(n=3, temperature=1.0, max_tokens=5, ignore_eos=True, seed=3, logprobs=1),
    "b": SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1),
    "c": SamplingParams(temperature=1.0, max_tokens=4, seed=9, ignore_eos=True, prompt_logprobs=1),
}


@pytest.fixture(scope="module")
def trained() -> Model:
    return lfm2np.load()


def greedy(**changes: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 6, "ignore_eos": True} | changes))  # type: ignore[arg-type]


def busy_engine(model: Model, trace: io.StringIO) -> Engine:
    """Preemption, forks, drafts and prefix hits within a few steps."""
    engine = Engine(
        model,
        block_size=2,
        num_blocks=14,
        watermark=0.0,
        max_num_batched_tokens=12,
        drafter=NgramDrafter(),
        trace=trace,
    )
    for name, ids in PROMPTS.items():
        engine.add_request(name, ids, PARAMS[name])
    return engine


class Interrupt:
    """Raises KeyboardInterrupt at the `at`-th line that our own code executes, or only those of some files, or of
    functions of one name."""

    def __init__(self, at: int, sources: tuple[str, ...] = SOURCES, function: str = "") -> None:
        self.at, self.count, self.raised = at, 0, False
        self.sources, self.function = sources, function

    def __call__(self, frame: FrameType, event: str, arg: object) -> object:
        if not frame.f_code.co_filename.startswith(self.sources):
            return None
        if event == "line" and self.function in ("", frame.f_code.co_name):
            self.count += 1
            if self.count == self.at:
                self.raised = True
                raise KeyboardInterrupt
        return self


def finished(engine: Engine, interrupt: Interrupt) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    steps = 0
    while engine.has_unfinished:
        sys.settrace(None if interrupt.raised else interrupt)  # type: ignore[arg-type]
        try:
            got = engine.step()
        except KeyboardInterrupt:
            got = []
        finally:
            sys.settrace(None)
        outputs |= {output.request_id: output for output in got if output.finished}
        steps += 1
        assert steps < 200, "no progress"
    return outputs


def shown(outputs: dict[str, RequestOutput]) -> dict[str, object]:
    return {name: (output.outputs, output.prompt_logprobs) for name, output in outputs.items()}


@pytest.mark.parametrize("where", ["step", "abandon"])
def test_an_interrupt_while_the_trace_is_written_ends_the_run(
    trained: Model, monkeypatch: pytest.MonkeyPatch, where: str
):
    """Else the trace would lack a step that the scheduler took, and not replay."""
    trace = io.StringIO()
    engine = busy_engine(trained, trace)
    engine.step()

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("scheduler.trace.plan_as_json", interrupted)
    if where == "abandon":
        monkeypatch.setattr("lfm2np.engine.engine.forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    with pytest.raises(RequestError, match="interrupted in its bookkeeping"):
        engine.step()
    replay(trace.getvalue().splitlines(), is_whole=False)


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_the_last_step_loses_no_output(trained: Model):
    """Found where outputs were made: the requests were no longer unfinished, and so nobody asked for a refusal."""
    whole = Interrupt(-1, BOOKS[:1], "step")
    truth = shown(finished(busy_engine(trained, io.StringIO()), whole))
    went_on = 0
    for at in range(whole.count - 25, whole.count + 1):
        interrupt = Interrupt(at, BOOKS[:1], "step")
        try:
            outputs = finished(busy_engine(trained, io.StringIO()), interrupt)
        except RequestError as error:
            assert "interrupted in its bookkeeping" in str(error)
            continue
        assert interrupt.raised and shown(outputs) == truth
        went_on += 1
    assert went_on > 5


@pytest.mark.slow
def test_an_interrupt_at_any_line_leaves_the_right_answer_or_a_refusal(trained: Model):
    """Never a wrong token, text or log-probability, never an endless run, never a trace that does not replay."""
    whole = Interrupt(-1)
    truth = shown(finished(busy_engine(trained, io.StringIO()), whole))
    assert whole.count > 3000
    choice, seen = random.Random(0), Counter()
    for _ in range(70):
        interrupt, trace = Interrupt(choice.randint(1, whole.count)), io.StringIO()
        engine = busy_engine(trained, trace)
        try:
            outputs = finished(engine, interrupt)
        except RequestError as error:
            assert "interrupted in its bookkeeping" in str(error)
            seen["refused"] += 1
            continue
        seen["went on"] += interrupt.raised
        assert shown(outputs) == truth
        assert engine.scheduler.pool.num_free == 14
        replay(trace.getvalue().splitlines(), is_whole=False)
    assert seen["went on"] > 40
    assert seen["refused"] > 3


BETWEEN_STEPS = {
    "nothing": lambda engine: None,
    "add_request": lambda engine: engine.add_request("new", [1, 4], TWO_SAMPLES),
    "abort": lambda engine: engine.abort("a"),
    "preempt": lambda engine: engine.preempt("a"),
    "fork": lambda engine: engine.fork("b", "new", seed=4),
}
TWO_SAMPLES = SamplingParams(n=2, temperature=1.0, max_tokens=3, ignore_eos=True, seed=3)


def called_between_steps(model: Model, call: str, interrupt: Interrupt) -> tuple[dict[str, RequestOutput], list[str]]:
    """What comes of a run whose call after the second step may be interrupted, {} if it was refused, and its trace."""
    trace = io.StringIO()
    engine = Engine(model, block_size=2, num_blocks=40, trace=trace)
    engine.add_request("a", [1, 5, 6], TWO_SAMPLES)
    engine.add_request("b", [1, 5, 7], SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True, seed=9))
    engine.step()
    engine.step()
    sys.settrace(interrupt)  # type: ignore[arg-type]
    try:
        BETWEEN_STEPS[call](engine)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    try:
        outputs = {output.request_id: output for _ in range(20) for output in engine.step() if output.finished}
        assert not engine.has_unfinished, "no progress"
    except RequestError as error:
        assert "interrupted in its bookkeeping" in str(error)
        outputs = {}
    return outputs, trace.getvalue().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("call", ["add_request", "abort", "preempt", "fork"])
def test_an_interrupt_at_every_line_of_a_call_between_steps(call: str):
    """As if it had not been made, or as if it had not been interrupted, or a refusal; the trace replays to the end."""
    model, whole = lfm2np.load(hand_fixture()), Interrupt(-1, BOOKS)
    called = shown(called_between_steps(model, call, whole)[0])
    not_made = shown(called_between_steps(model, "nothing", Interrupt(-1))[0])
    assert called != not_made or call == "preempt"
    refused = 0
    for at in range(1, whole.count + 1):
        outputs, lines = called_between_steps(model, call, Interrupt(at, BOOKS))
        refused += not outputs
        assert not outputs or shown(outputs) in (called, not_made)
        replay(lines, is_whole=False)
    assert 0 < refused < whole.count


def test_an_exception_in_a_callback_comes_when_the_step_is_complete(trained: Model):
    calls = []

    def callback(name: str, position: int, row: np.ndarray, token: int) -> None:
        calls.append(name)
        if len(calls) in (2, 7, 9):
            raise ValueError("from the callback")

    engine = Engine(trained, on_logits=callback, num_blocks=100, check=True)
    engine.add_request("a", [1, 5, 6], greedy(stop=["ass"], max_tokens=9))
    engine.add_request("b", [1, 7, 6], greedy(max_tokens=4, logprobs=1))
    outputs, raised = {}, 0
    while engine.has_unfinished:
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except ValueError:
            raised += 1
    assert raised == 3
    for name, ids, params in (
        ("a", [1, 5, 6], greedy(stop=["ass"], max_tokens=9)),
        ("b", [1, 7, 6], greedy(max_tokens=4, logprobs=1)),
    ):
        (plain,) = LLM(trained).generate(ids, params)
        assert outputs[name].outputs == plain.outputs


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_callback_may_abort_any_request(trained: Model, who: str):
    def callback(name: str, position: int, row: np.ndarray, token: int) -> None:
        if position == 4 and name == "a":
            aborted.append(engine.abort(who))

    aborted: list[RequestOutput] = []
    trace = io.StringIO()
    engine = Engine(trained, on_logits=callback, num_blocks=100, check=True, trace=trace)
    for name in ("a", "b"):
        engine.add_request(name, [1, 5, 6], SamplingParams(n=2, temperature=1.0, max_tokens=6, seed=1, ignore_eos=True))
    outputs = {output.request_id: output for output in engine.stream() if output.finished}
    assert {output.finish_reason for output in aborted[0].outputs} == {"abort"}
    assert set(outputs) == {"a", "b"} - {who}
    replay(trace.getvalue().splitlines(), is_whole=False)


def test_a_drafter_may_not_call_its_engine(trained: Model):
    class Aborting(NgramDrafter):
        def propose(self, contexts):  # type: ignore[no-untyped-def]
            engine.abort("a")
            return []

    engine = Engine(trained, drafter=Aborting(), num_blocks=100, check=True)
    engine.add_request("a", [1, 5, 6, 5, 6], greedy())
    (output,) = [one for one in engine.stream() if one.finished]
    assert output.outputs[0].token_ids == greedy_tokens(trained, [1, 5, 6, 5, 6], 6)
    assert output.metrics is not None
    assert "called from inside a step" in str(output.metrics.draft_error)


class Failing(io.StringIO):
    """A file that fails once, at the n-th write."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def write(self, text: str) -> int:
        self.at -= 1
        if self.at == 0:
            raise OSError("no space left")
        return super().write(text)


@pytest.mark.parametrize("at", range(2, 9))
def test_a_trace_that_can_not_be_written_harms_no_request(trained: Model, at: int):
    engine = Engine(trained, trace=Failing(at), num_blocks=100, check=True)
    failures, outputs = 0, {}
    for name in ("a", "b"):
        try:
            engine.add_request(name, [1, 5, 6], greedy(max_tokens=4))
        except OSError:
            failures += 1
    while engine.has_unfinished:
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except OSError:
            failures += 1
    assert failures == (at < 8)
    assert {name: output.outputs[0].token_ids for name, output in outputs.items()} == dict.fromkeys(
        ("a", "b"), greedy_tokens(trained, [1, 5, 6], 4)
    )
