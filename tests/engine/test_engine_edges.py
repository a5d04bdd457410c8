"""The engine at its edges: drafts that overflow or are no plain ints, names and sizes that can not be, forks."""

import dataclasses
import io
import json

import blas
import numpy as np
import pytest

import lfm2np
from lfm2np import LLM, Draft, Engine, ModelDrafter, RequestError, SamplingParams
from lfm2np.checkpoint.loaded import hand_fixture
from lfm2np.engine.loading import Model
from lfm2np.suite.audit import AuditedEngine
from scheduler import replay


@pytest.fixture(scope="module")
def trained() -> Model:
    return lfm2np.load()


def greedy(**changes: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 6, "ignore_eos": True} | changes))  # type: ignore[arg-type]


def overflowing(model: Model, token_id: int) -> Model:
    """The model with an embedding that no arithmetic survives."""
    values = np.array(model.weights.embedding.values)
    values[token_id] = 0x7F80
    embedding = dataclasses.replace(model.weights.embedding, values=values)
    return dataclasses.replace(model, weights=dataclasses.replace(model.weights, embedding=embedding))


def test_a_draft_model_that_overflows_costs_only_its_request_speed(trained: Model):
    ids = {"good": trained.prompt_ids("sort: 3 6 4"), "bad": trained.prompt_ids("sort: 3 6 9")}
    small = overflowing(lfm2np.load(lfm2np.draft_fixture()), ids["bad"][-1])
    engine = Engine(trained, drafter=ModelDrafter(small, trained))
    for name, prompt in ids.items():
        engine.add_request(name, prompt, greedy())
    outputs = {output.request_id: output for output in engine.stream() if output.finished}
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
            return [Draft(np.array([0, 6][: context.count])) for context in contexts]  # type: ignore[arg-type]

    trace = io.StringIO()
    engine = Engine(trained, drafter=Numpy(), trace=trace)
    engine.add_request("a", [1, 5, 6], greedy())
    list(engine.stream())
    assert type(engine.metrics.accepted_tokens) is int
    replay(trace.getvalue().splitlines(), is_whole=False)


def test_no_request_is_named_like_a_sample_of_another(trained: Model):
    engine = AuditedEngine(trained, num_blocks=100)
    engine.add_request("a", [1, 5, 6], SamplingParams(n=2, temperature=2.0, seed=2, max_tokens=20))
    for _ in engine.stream():
        if engine.has_unfinished:
            with pytest.raises(RequestError, match="'a#1' is already in use"):
                engine.add_request("a#1", [1, 5, 6])
    engine.add_request("a#1", [1, 5, 6], greedy())
    with pytest.raises(RequestError, match="'a#1' is already in use"):
        engine.add_request("a", [1, 5, 6], SamplingParams(n=2))
    assert len([output for output in engine.stream() if output.finished]) == 1


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
        {"max_waiting_tokens": 1.5},
        {"watermark": "x"},
        {"policy": []},
    ],
)
def test_sizes_of_another_type_are_refused(trained: Model, sizes: dict[str, object]):
    with pytest.raises(RequestError, match=next(iter(sizes))):
        Engine(trained, **({"num_blocks": 10} | sizes))  # type: ignore[arg-type]


def test_preempt_and_fork_between_steps(trained: Model):
    """A preempted request goes on as if undisturbed; a fork has its parent's tokens, then its own."""
    params = SamplingParams(temperature=1.5, max_tokens=8, seed=3, ignore_eos=True, logprobs=1)
    (plain,) = LLM(trained).generate([1, 5, 6], params)
    trace = io.StringIO()
    engine = AuditedEngine(trained, num_blocks=100, block_size=2, trace=trace)
    engine.add_request("a", [1, 5, 6], params)
    for _ in range(3):
        engine.step()
    engine.fork("a", "same", seed=3)
    engine.fork("a", "other", seed=4)
    engine.step()
    engine.preempt("a")
    with pytest.raises(RequestError, match="not running"):
        engine.preempt("a")
    outputs = {output.request_id: output.outputs[0] for output in engine.stream() if output.finished}
    assert outputs["a"] == plain.outputs[0]
    assert outputs["same"] == plain.outputs[0]
    assert outputs["other"].token_ids[:3] == plain.outputs[0].token_ids[:3]
    assert outputs["other"].token_ids != plain.outputs[0].token_ids
    replay(trace.getvalue().splitlines(), is_whole=False)
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


def test_a_trace_names_the_kernels_that_its_bits_are_of():
    traces = {name: io.StringIO() for name in ("exact", "float32")}
    for name, trace in traces.items():
        Engine(lfm2np.load(numerics=name), trace=trace)
    exact, float32 = (json.loads(trace.getvalue()) for trace in traces.values())
    assert "blas_kernel" not in exact, "which depends on none"
    assert float32["blas_kernel"] == blas.here().kernel
