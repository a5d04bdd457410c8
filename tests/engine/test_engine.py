"""The engine against reference.py, bit for bit, over random schedules; bad input; conservation."""

import io
import itertools
import json
from pathlib import Path

import pytest
from runs import BLOCK_SIZES, LONGEST_PROMPT, MOST_TOKENS, Run
from truths import greedy_tokens

import lfm2np
from lfm2np import LLM, Engine, RequestError, SamplingParams
from lfm2np.engine.cache import bytes_per_block
from lfm2np.engine.loading import Model
from lfm2np.errors import ProofError
from lfm2np.suite.audit import AuditedEngine
from scheduler import TraceError, replay
from scheduler.checksum import sealed

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
    *(pytest.param("trained", seed, marks=pytest.mark.slow) for seed in (1, 2, 3)),
    *(pytest.param(name, seed, marks=pytest.mark.slow if name in ALIKE else ()) for seed, name in enumerate(TORTURE)),
]


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trained", "torture/moe_published"])
@pytest.mark.parametrize(("block_size", "caching"), [*zip(BLOCK_SIZES, itertools.cycle([False, True]), strict=False)])
def test_a_pool_that_just_fits_preempts_and_changes_no_bit(name: str, block_size: int, caching: bool):
    least = -(-(LONGEST_PROMPT + MOST_TOKENS) // block_size)
    preemptions, model = 0, lfm2np.load(FIXTURES / name)
    for seed in (2, 3):  # of which memory is short for one at least
        run = Run(
            model,
            seed,
            block_size=block_size,
            num_blocks=least + 1,
            max_num_seqs=8,
            policy="fcfs",
            prefix_caching=caching,
            watermark=0.0,
            max_num_batched_tokens=64,
        )
        run.go(abort_rate=0.0)
        run.require_equal_to_the_reference()
        preemptions += run.engine.metrics.preemptions
    assert preemptions, "the control: memory was short"


def test_prompt_logprobs_are_right_also_under_a_warm_prefix_cache(trained: Model):
    ids = trained.prompt_ids("copy: tivu zo sa di zemu re")
    engine = Engine(trained, block_size=2, num_blocks=60)
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2)
    truth = trained.numerics.log_softmax(trained.logits(ids))
    for name in ("cold", "warm"):
        engine.add_request(name, ids, params)
        (output,) = [output for output in engine.stream() if output.finished]
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        shown = [logprob.logprob for logprob in output.prompt_logprobs if logprob is not None]
        assert shown == [float(truth[row, token]) for row, token in enumerate(ids[1:])]
    engine.add_request("plain", ids, SamplingParams(temperature=0.0, max_tokens=3))
    (output,) = [output for output in engine.stream() if output.finished]
    assert output.metrics is not None
    assert output.metrics.cached_tokens > 0, "the control: the cache was warm"


@pytest.mark.slow
def test_what_a_cached_block_holds_is_what_its_prefix_demands(trained: Model):
    """Keys, values and checkpoints after a busy run equal the reference's."""
    compared = 0
    for seed in range(4):
        run = Run(trained, seed, block_size=3, num_blocks=400, prefix_caching=True, max_num_batched_tokens=7)
        run.go()
        compared += run.engine.verify()
    assert compared > 50
    block = next(iter(run.engine.scheduler.pool.block_of.values()))
    run.engine.cache.checkpoints[block, 0, -1, 0] += 1e-3
    with pytest.raises(ProofError, match=f"block {block}: the checkpoint of convolution layer 0"):
        run.engine.verify()


BAD = [
    ({"prompt": []}, "none, expected at least one"),
    ({"prompt": [1] * 2000}, "prompt of 2000 tokens"),
    ({"prompt": [1, 99999]}, "99999"),
    ({"prompt": [1] * 200, "params": SamplingParams(max_tokens=100)}, "the pool has"),
    ({"prompt": [1], "priority": True}, "priority True"),
    ({"prompt": [1], "cache_salt": 3}, "cache_salt: 3"),
    ({"prompt": [1], "params": SamplingParams(stop_token_ids=[600])}, "600"),
    ({"prompt": [1], "request_id": ""}, "request id ''"),
    ({"prompt": [1], "request_id": "good"}, "already in use"),
]


@pytest.mark.parametrize(("bad", "fragment"), BAD)
def test_bad_input_is_an_error_for_that_request_alone(trained: Model, bad: dict[str, object], fragment: str):
    engine = AuditedEngine(trained, num_blocks=12)
    ids = trained.prompt_ids("sort: 3 6 4")
    engine.add_request("good", ids, SamplingParams(temperature=0.0, max_tokens=4))
    engine.step()
    with pytest.raises(RequestError, match=fragment):
        engine.add_request(**({"request_id": "bad"} | bad))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="not known"):
        engine.abort("nobody")
    (output,) = [output for output in engine.stream() if output.finished]
    assert list(output.outputs[0].token_ids) == list(greedy_tokens(trained, ids, 4))


def test_memory_is_allocated_once_and_is_what_blocks_times_size_says(trained: Model):
    engine = Engine(trained, num_blocks=50, block_size=4, max_num_seqs=3)
    sizes = engine.scheduler.config
    blocks = [array for layer in engine.cache.blocks for array in layer]
    whole = sum(array.nbytes for array in (engine.cache.checkpoints, *blocks))
    assert whole == 50 * bytes_per_block(trained.config, trained.numerics, sizes)
    arrays = list(map(id, blocks))
    for index in range(9):
        engine.add_request(str(index), [1, 5, 6, index + 9], SamplingParams(max_tokens=5))
    list(engine.stream())
    assert arrays == [id(array) for layer in engine.cache.blocks for array in layer]
    assert not engine.scheduler.requests
    assert not engine._requests and not engine._sequences


def test_a_trace_replays_without_the_model_and_a_changed_token_is_found(trained: Model):
    trace = io.StringIO()
    run = Run(trained, 3, trace=trace, num_blocks=60, block_size=2, is_audited=False)
    run.go()
    lines = trace.getvalue().splitlines()
    result = replay(lines, is_whole=False)
    assert result.steps > 10
    for name, ids in result.outputs.items():
        group, _, index = name.partition("#")
        assert ids == list(run.outputs[group].outputs[int(index or 0)].token_ids)
    for number, line in enumerate(lines):
        step = json.loads(line)
        if step["kind"] == "step" and any(len(entry["token_ids"]) == 1 for entry in step["plan"]["scheduled"]):
            step["plan"]["scheduled"][0]["token_ids"][0] += 1
            with pytest.raises(TraceError, match=f"line {number + 1}: plan.scheduled"):
                replay([*lines[:number], json.dumps(sealed(step)), *lines[number + 1 :]])
            return
    pytest.fail("no step with a decode")


def test_samples_of_one_prompt_differ_and_share_its_blocks(trained: Model):
    llm = LLM(trained, block_size=4, prefix_caching=False)
    ids = trained.prompt_ids("copy: tivu zo sa di zemu re")
    (output,) = llm.generate(ids, SamplingParams(n=4, temperature=3.0, max_tokens=6, ignore_eos=True))
    assert len({sample.token_ids for sample in output.outputs}) == 4
    assert llm.engine.metrics.scheduled_tokens == len(ids) + 4 * 5, "the prompt was computed once"
