"""The engine against reference.py, bit for bit, over random schedules of every fixture; what it keeps and writes."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import blas
import numpy as np
import pytest
from runs import Run

import lfm2np
from lfm2np import LLM, Draft, Engine, SamplingParams
from lfm2np.checkpoint.loaded import hand_fixture
from lfm2np.engine.loading import Model
from lfm2np.engine.outputs import Grown
from lfm2np.errors import ProofError
from lfm2np.suite.audit import MOST_KNOWN, AuditedEngine
from scheduler import replay

FIXTURES = Path(__file__).parents[2] / "fixtures"
TORTURE = sorted(f"torture/{path.name}" for path in (FIXTURES / "torture").iterdir())
ALIKE = {  # to the engine, as to its layers: others like them have shorter schedules
    "torture/moe_all_experts",
    "torture/moe_near_ties",
    "torture/moe_one_a_token",
    "torture/sharded_mixed_types",
    "torture/six_heads_two_kv",
}
SCHEDULES = [
    ("trained", 0),
    *(pytest.param("trained", seed, marks=pytest.mark.night) for seed in (1, 2, 3)),
    *(pytest.param(name, seed, marks=pytest.mark.night if name in ALIKE else ()) for seed, name in enumerate(TORTURE)),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=0, prompt_logprobs=0)


@pytest.fixture(scope="module")
def trained() -> Model:
    return lfm2np.load()


@pytest.mark.parametrize(("name", "seed"), SCHEDULES)
def test_tokens_and_logits_of_every_schedule_equal_the_reference(name: str, seed: int):
    """Every schedule is another; the property suite draws more of them. In half of them memory is read as well."""
    run = Run(lfm2np.load(FIXTURES / name), seed, is_audited=bool(seed % 2))
    run.go()
    run.require_equal_to_the_reference()
    assert run.engine.scheduler.pool.num_free == run.engine.scheduler.pool.num_blocks


@pytest.mark.parametrize(
    ("array_of", "says"),
    [
        (lambda engine, block: engine.cache.checkpoints[block, 0, -1], "block {block}: the checkpoint of convolution"),
        (lambda engine, block: engine.cache.blocks[0][0][block, 0], "block {block}: keys or values of attention"),
        (lambda engine, block: engine.cache.states[0, 0, -1], "slot 0: the live state of convolution layer 0"),
    ],
    ids=["checkpoint", "keys", "state"],
)
def test_memory_that_is_not_the_references_is_named(
    trained: Model, array_of: Callable[[AuditedEngine, int], np.ndarray], says: str
):
    engine = AuditedEngine(trained, block_size=3, num_blocks=100)
    engine.add_request("a", [1, 5, 6, 7], GREEDY)
    engine.step()
    assert engine.verify() == 2
    (block,) = engine.scheduler.pool.block_of.values()
    cells = array_of(engine, block)
    cells[...] = np.where(cells == 0, 1, 0)
    with pytest.raises(ProofError, match=says.format(block=block)):
        engine.verify()


@pytest.mark.night
def test_an_audit_keeps_a_bounded_number_of_sequences():
    engine = AuditedEngine(lfm2np.load(hand_fixture()), block_size=1, num_blocks=200)
    for name in range(MOST_KNOWN // 3):
        engine.add_request(
            str(name), [1, 2 + name % 8, 2 + name // 8], SamplingParams(n=3, max_tokens=9, temperature=3.0)
        )
    list(engine.stream())
    assert len(engine.audit._known) == MOST_KNOWN


def test_samples_of_one_prompt_share_its_blocks(trained: Model):
    llm = LLM(trained, block_size=4, prefix_caching=False)
    ids = trained.prompt_ids("copy: tivu zo sa di zemu re")
    llm.generate(ids, SamplingParams(n=4, temperature=3.0, max_tokens=6, ignore_eos=True))
    assert llm.engine.metrics.scheduled_tokens == len(ids) + 4 * 5, "the prompt was computed once"


def test_a_fork_goes_on_with_noise_of_its_own_and_who_is_preempted_as_if_undisturbed(trained: Model):
    params = SamplingParams(temperature=1.5, max_tokens=8, seed=3, ignore_eos=True, logprobs=1)
    (plain,) = LLM(trained).generate([1, 5, 6], params)[0].outputs
    trace = io.StringIO()
    engine = AuditedEngine(trained, num_blocks=100, block_size=2, trace=trace)
    engine.add_request("a", [1, 5, 6], params)
    for _ in range(3):
        engine.step()
    engine.fork("a", "same", seed=3)
    engine.fork("a", "other", seed=4)
    engine.step()
    engine.preempt("a")
    outputs = {output.request_id: output.outputs[0] for output in engine.stream() if output.finished}
    assert outputs["a"] == outputs["same"] == plain
    assert outputs["other"].token_ids[:3] == plain.token_ids[:3] and outputs["other"].token_ids != plain.token_ids
    replay(trace.getvalue().splitlines(), is_whole=False)


def test_time_per_token_is_that_of_the_tokens_that_a_request_computed(trained: Model):
    """Of a fork it had counted inherited tokens, and of samples one after another the whole time."""
    now = [0.0]

    def ended(engine: Engine) -> dict[str, float | None]:
        times: dict[str, float | None] = {}
        while engine.has_unfinished:
            now[0] += 1.0
            times |= {each.request_id: each.metrics.time_per_output_token for each in engine.step() if each.metrics}
        return times

    engine = Engine(trained, clock=lambda: now[0], max_num_seqs=2)
    engine.add_request("a", [1, 5, 6], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    for _ in range(4):
        now[0] += 1.0
        engine.step()
    engine.fork("a", "b")
    assert ended(engine) == {"a": 1.0, "b": 1.0}
    engine = Engine(trained, clock=lambda: now[0], max_num_seqs=1)
    engine.add_request("a", [1, 5, 6], SamplingParams(n=2, max_tokens=6, ignore_eos=True))
    assert ended(engine) == {"a": 1.0}


def test_numpy_ids_from_a_drafter_are_plain_ints_in_the_trace(trained: Model):
    class Numpy:
        is_random = False

        def propose(self, contexts):  # type: ignore[no-untyped-def]
            return [Draft(np.array([0, 6][: context.count])) for context in contexts]  # type: ignore[arg-type]

    trace = io.StringIO()
    engine = Engine(trained, drafter=Numpy(), trace=trace)
    engine.add_request("a", [1, 5, 6], GREEDY)
    list(engine.stream())
    assert type(engine.metrics.accepted_tokens) is int
    replay(trace.getvalue().splitlines(), is_whole=False)


def test_outputs_stay_what_they_were_and_share_what_has_grown(trained: Model) -> None:
    """Each was a copy of all tokens so far, so that generating n of them copied n * n / 2."""
    engine = Engine(trained, num_blocks=40)
    engine.add_request("a", [1, 5, 6], GREEDY)
    *outputs, last = engine.stream()
    ids, (sample,) = last.outputs[0].token_ids, last.outputs
    assert isinstance(ids, tuple) and isinstance(sample.logprobs, tuple) and isinstance(last.prompt_logprobs, tuple)
    for count, output in enumerate(outputs, start=1):
        (sample,) = output.outputs
        assert isinstance(sample.token_ids, Grown) and isinstance(sample.logprobs, Grown)
        assert sample.token_ids == ids[:count] and ids[:count] == sample.token_ids and sample.token_ids != ids
        assert (sample.token_ids[-1], sample.token_ids[1:]) == (ids[count - 1], ids[1:count])
        assert (len(sample.logprobs), output.prompt_logprobs) == (count, last.prompt_logprobs)
        with pytest.raises(IndexError):
            sample.token_ids[count]


def test_a_trace_names_the_kernels_that_its_bits_are_of():
    traces = {name: io.StringIO() for name in ("exact", "float32")}
    for name, trace in traces.items():
        Engine(lfm2np.load(numerics=name), trace=trace)
    exact, float32 = (json.loads(trace.getvalue()) for trace in traces.values())
    assert "blas_kernel" not in exact, "which depends on none"
    assert float32["blas_kernel"] == blas.here().kernel
