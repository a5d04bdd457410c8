"""What goes wrong inside a step (interrupts, callbacks, files, drafters) never becomes a wrong answer."""

import dataclasses
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
from lfm2np import LLM, Draft, Engine, ModelDrafter, NgramDrafter, RequestError, SamplingParams
from lfm2np.loaded import hand_fixture
from lfm2np.loading import Model
from lfm2np.outputs import RequestOutput
from scheduler import replay

SOURCES = (str(Path(lfm2np.__file__).parent), str(Path(scheduler.__file__).parent))
BOOKS = (lfm2np.engine.__file__, SOURCES[1])  # what an engine's requests are entered in
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
    """Preemption, swapping, forks, drafts and prefix hits within a few steps."""
    engine = Engine(
        model,
        block_size=2,
        num_blocks=14,
        watermark=0.0,
        num_host_blocks=4,
        max_num_batched_tokens=12,
        drafter=NgramDrafter(),
        trace=trace,
    )
    for name, ids in PROMPTS.items():
        engine.add_request(name, ids, PARAMS[name])
    return engine


class Interrupt:
    """Raises KeyboardInterrupt at the `at`-th line that our own code executes, or only those of some files."""

    def __init__(self, at: int, sources: tuple[str, ...] = SOURCES) -> None:
        self.at, self.count, self.raised = at, 0, False
        self.sources = sources

    def __call__(self, frame: FrameType, event: str, arg: object) -> object:
        if not frame.f_code.co_filename.startswith(self.sources):
            return None
        if event == "line":
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
        outputs |= {one.request_id: one for one in got if one.finished}
        steps += 1
        assert steps < 200, "no progress"
    return outputs


def shown(outputs: dict[str, RequestOutput]) -> dict[str, object]:
    return {name: (one.outputs, one.prompt_logprobs) for name, one in outputs.items()}


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
        monkeypatch.setattr("lfm2np.engine.forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    with pytest.raises(RequestError, match="interrupted in its bookkeeping"):
        engine.step()
    replay(trace.getvalue().splitlines())


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
        replay(trace.getvalue().splitlines())
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
        outputs = {one.request_id: one for _ in range(20) for one in engine.step() if one.finished}
        assert not engine.has_unfinished, "no progress"
    except RequestError as error:
        assert "interrupted in its bookkeeping" in str(error)
        outputs = {}
    return outputs, trace.getvalue().splitlines()


@pytest.mark.parametrize("call", ["add_request", "abort", "preempt", "fork"])
def test_an_interrupt_at_every_line_of_a_call_between_steps(call: str):
    """As if it had not been made, or as if it had not been interrupted, or a refusal; the trace replays to the end."""
    model, whole = lfm2np.load(hand_fixture()), Interrupt(-1, BOOKS)
    made = shown(called_between_steps(model, call, whole)[0])
    not_made = shown(called_between_steps(model, "nothing", Interrupt(-1))[0])
    assert made != not_made or call == "preempt"
    refused = 0
    for at in range(1, whole.count + 1):
        outputs, lines = called_between_steps(model, call, Interrupt(at, BOOKS))
        refused += not outputs
        assert not outputs or shown(outputs) in (made, not_made)
        replay(lines)
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
            outputs |= {one.request_id: one for one in engine.step()}
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
    outputs = {one.request_id: one for one in engine.stream() if one.finished}
    assert {one.finish_reason for one in aborted[0].outputs} == {"abort"}
    assert set(outputs) == {"a", "b"} - {who}
    replay(trace.getvalue().splitlines())


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
            outputs |= {one.request_id: one for one in engine.step()}
        except OSError:
            failures += 1
    assert failures == (at < 8)
    assert {name: one.outputs[0].token_ids for name, one in outputs.items()} == dict.fromkeys(
        ("a", "b"), greedy_tokens(trained, [1, 5, 6], 4)
    )


def overflowing(model: Model, token_id: int) -> Model:
    """The model with an embedding that no arithmetic survives."""
    values = np.array(model.weights.embedding.values)
    values[token_id] = 0x7F80
    embedding = dataclasses.replace(model.weights.embedding, values=values)
    return dataclasses.replace(model, weights=dataclasses.replace(model.weights, embedding=embedding))


class Nines:
    is_random = False

    def propose(self, contexts):  # type: ignore[no-untyped-def]
        return [Draft((9,) * one.count) for one in contexts]


def test_a_wrong_draft_that_overflows_changes_nothing(trained: Model):
    model = overflowing(trained, 9)
    ids = trained.prompt_ids("sort: 3 6 4")
    shown = []
    for drafter in (None, Nines()):
        engine = Engine(model, drafter=drafter, block_size=2, num_blocks=100, check=True)
        engine.add_request("a", ids, greedy())
        engine.add_request("b", trained.prompt_ids("sort: 1"), greedy())
        outputs = {one.request_id: one for one in engine.stream() if one.finished}
        shown.append([outputs[name].outputs for name in ("a", "b")])
        assert [bool(one.metrics and one.metrics.draft_error) for one in outputs.values()] == [drafter is not None] * 2
    assert shown[0] == shown[1]


def test_a_draft_model_that_overflows_costs_only_its_request_speed(trained: Model):
    ids = {"good": trained.prompt_ids("sort: 3 6 4"), "bad": trained.prompt_ids("sort: 3 6 9")}
    small = overflowing(lfm2np.load(lfm2np.draft_fixture()), ids["bad"][-1])
    engine = Engine(trained, drafter=ModelDrafter(small, trained))
    for name, prompt in ids.items():
        engine.add_request(name, prompt, greedy())
    outputs = {one.request_id: one for one in engine.stream() if one.finished}
    for name, prompt in ids.items():
        assert outputs[name].outputs == LLM(trained).generate(prompt, greedy())[0].outputs
        metrics = outputs[name].metrics
        assert metrics is not None
        assert ("draft model: " in str(metrics.draft_error)) == (name == "bad")
        assert (metrics.accepted_tokens > 0) == (name == "good")


def test_numpy_ids_from_a_drafter_are_plain_ints_in_the_trace(trained: Model):
    class Numpy:
        is_random = False

        def propose(self, contexts):  # type: ignore[no-untyped-def]
            return [Draft(np.array([0, 6][: one.count])) for one in contexts]  # type: ignore[arg-type]

    trace = io.StringIO()
    engine = Engine(trained, drafter=Numpy(), trace=trace)
    engine.add_request("a", [1, 5, 6], greedy())
    list(engine.stream())
    assert type(engine.metrics.accepted_tokens) is int
    replay(trace.getvalue().splitlines())


def test_an_object_that_can_not_draft_is_refused_at_once(trained: Model):
    with pytest.raises(RequestError, match="drafter object: it has no is_random"):
        Engine(trained, drafter=object())  # type: ignore[arg-type]


def test_no_request_is_named_like_a_sample_of_another(trained: Model):
    engine = Engine(trained, num_blocks=100, check=True)
    engine.add_request("a", [1, 5, 6], SamplingParams(n=2, temperature=2.0, seed=2, max_tokens=20))
    for _ in engine.stream():
        if engine.has_unfinished:
            with pytest.raises(RequestError, match="'a#1' is already in use"):
                engine.add_request("a#1", [1, 5, 6])
    engine.add_request("a#1", [1, 5, 6], greedy())
    with pytest.raises(RequestError, match="'a#1' is already in use"):
        engine.add_request("a", [1, 5, 6], SamplingParams(n=2))
    assert len([one for one in engine.stream() if one.finished]) == 1


def test_a_salt_that_has_no_utf8_form_is_refused(trained: Model):
    engine = Engine(trained, block_size=2)
    with pytest.raises(RequestError, match="cache_salt: lone surrogate"):
        engine.add_request("bad", [1, 5, 6, 7], greedy(), cache_salt="\ud800")
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    "sizes",
    [
        {"block_size": 2.5},
        {"block_size": True},
        {"num_blocks": "3"},
        {"max_num_batched_tokens": None},
        {"num_host_blocks": 1.5},
        {"watermark": "x"},
        {"policy": []},
    ],
)
def test_sizes_of_another_type_are_refused(trained: Model, sizes: dict[str, object]):
    with pytest.raises(RequestError, match=next(iter(sizes))):
        Engine(trained, **({"num_blocks": 10} | sizes))  # type: ignore[arg-type]


def test_metrics_of_an_abandoned_step_count_no_preemption(trained: Model, monkeypatch: pytest.MonkeyPatch):
    engine = Engine(trained)
    engine.add_request("a", [1, 5, 6], greedy())
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr("lfm2np.engine.forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    (output,) = [one for one in engine.stream() if one.finished]
    assert output.metrics is not None
    assert engine.metrics.preemptions == output.metrics.preemptions == engine.scheduler.num_preemptions == 0


def test_a_request_that_never_ran_has_no_queue_time(trained: Model):
    engine = Engine(trained)
    engine.add_request("a", [1, 5, 6], greedy())
    metrics = engine.abort("a").metrics
    assert metrics is not None
    assert metrics.queue_time is None


def test_preempt_and_fork_between_steps(trained: Model):
    """A preempted request goes on as if undisturbed; a fork has its parent's tokens, then its own."""
    params = SamplingParams(temperature=1.5, max_tokens=8, seed=3, ignore_eos=True, logprobs=1)
    (plain,) = LLM(trained).generate([1, 5, 6], params)
    trace = io.StringIO()
    engine = Engine(trained, num_blocks=100, check=True, block_size=2, trace=trace)
    engine.add_request("a", [1, 5, 6], params)
    for _ in range(3):
        engine.step()
    engine.fork("a", "same", seed=3)
    engine.fork("a", "other", seed=4)
    engine.step()
    engine.preempt("a")
    with pytest.raises(RequestError, match="not running"):
        engine.preempt("a")
    outputs = {one.request_id: one.outputs[0] for one in engine.stream() if one.finished}
    assert outputs["a"] == plain.outputs[0]
    assert outputs["same"] == plain.outputs[0]
    assert outputs["other"].token_ids[:3] == plain.outputs[0].token_ids[:3]
    assert outputs["other"].token_ids != plain.outputs[0].token_ids
    replay(trace.getvalue().splitlines())
    for call, fragment in (
        (lambda: engine.fork("nobody", "x"), "not known"),
        (lambda: engine.preempt("nobody"), "not known"),
    ):
        with pytest.raises(RequestError, match=fragment):
            call()


def test_an_interrupt_that_ends_the_run_is_what_generate_raises(monkeypatch: pytest.MonkeyPatch):
    """Not that its requests can't be aborted any more."""
    llm = LLM(lfm2np.load(hand_fixture()), num_blocks=40)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.scheduler, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([1, 5, 6])
