"""Speculative decoding in the engine: not a bit, block or step differs from what it promises."""

import functools
import itertools
from pathlib import Path

import pytest
from runs import Run
from truths import greedy_tokens

import lfm2np
from lfm2np import Engine, SamplingParams
from lfm2np.engine.drafters import ScriptedDrafter
from lfm2np.engine.loading import Model
from lfm2np.engine.outputs import CompletionOutput, RequestOutput
from lfm2np.suite.audit import AuditedEngine
from scheduler import POLICIES

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(scope="module")
def trained() -> Model:
    return lfm2np.load()


@functools.cache
def lies() -> tuple[Model, dict[str, list[int]]]:
    """A model, and drafts for every sample of a run, none of which is what comes."""
    model = lfm2np.load(FIXTURES / "draft")
    run = Run(model, 0, policy="fcfs", is_audited=False)
    run.go(abort_rate=0.0)
    return model, {
        f"{name}#{sample.index}" if sample.index else name: [
            (token + 1) % model.config.vocab_size for token in sample.token_ids
        ]
        for name, output in run.outputs.items()
        for sample in output.outputs
    }


@pytest.mark.parametrize(("policy", "caching"), [*zip(POLICIES, itertools.cycle([False, True]), strict=False)])
def test_a_drafter_that_always_lies_leaves_no_trace_at_all(policy: str, caching: bool):
    """Step by step, plan by plan, byte by byte of every array: the run is the one that never speculated."""
    options: dict[str, object] = {
        "policy": policy,
        "prefix_caching": caching,
        "block_size": 2,
        "num_blocks": 30,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 40,
    }
    small, script = lies()
    plain = Run(small, 0, is_audited=False, **options)  # its memory is compared with that of the other
    lied = Run(small, 0, drafter=ScriptedDrafter(script), num_speculative_tokens=3, **options)
    for name, (_, ids, params) in sorted(plain.requests.items()):
        plain.engine.add_request(name, ids, params)
        lied.engine.add_request(name, ids, params)
    while plain.engine.has_unfinished:
        first = [strip(output) for output in plain.engine.step()]
        assert [strip(output) for output in lied.engine.step()] == first
        require_same_memory(plain.engine, lied.engine)
    assert not lied.engine.has_unfinished
    assert lied.engine.metrics.draft_tokens > 20
    assert lied.engine.metrics.accepted_tokens == 0
    assert lied.engine.metrics.steps == plain.engine.metrics.steps


def strip(output: RequestOutput) -> tuple[object, ...]:
    return output.request_id, output.outputs, output.prompt_logprobs, output.finished


def require_same_memory(engine: Engine, other: Engine) -> None:
    for mine, theirs in zip(engine.scheduler.running, other.scheduler.running, strict=True):
        assert (mine.tables, mine.slot, mine.token_ids) == (theirs.tables, theirs.slot, theirs.token_ids)
    assert engine.scheduler.pool.free_order() == other.scheduler.pool.free_order()
    assert engine.scheduler.pool.block_of == other.scheduler.pool.block_of
    assert engine.scheduler.prefix_cache.statistics == other.scheduler.prefix_cache.statistics
    for name in ("states", "checkpoints"):
        assert getattr(engine.cache, name).tobytes() == getattr(other.cache, name).tobytes(), name
    for mine, theirs in zip(engine.cache.blocks, other.cache.blocks, strict=True):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(mine, theirs, strict=True))


@pytest.fixture(scope="module")
def counted(trained: Model) -> tuple[list[int], list[int]]:
    """A prompt, and what follows it."""
    ids = trained.tokenizer.encode_chat([{"role": "user", "content": "count: 23 to 31"}])
    return ids, list(greedy_tokens(trained, ids, 60))


def test_a_right_drafter_saves_the_steps_it_promises(trained: Model, counted: tuple[list[int], list[int]]):
    ids, plain = counted
    for most, steps in ((1, 10), (2, 7), (4, 4), (30, 2)):
        engine = Engine(trained, drafter=ScriptedDrafter({"a": plain}), num_speculative_tokens=most)
        engine.add_request("a", ids, SamplingParams(temperature=0.0, max_tokens=40))
        (output,) = [output for output in engine.stream() if output.finished]
        assert list(output.outputs[0].token_ids) == plain
        assert engine.metrics.steps == -(-len(plain) // (most + 1)) == len(plain) - engine.metrics.steps_saved <= steps
        assert output.metrics is not None
        assert output.metrics.accepted_tokens == engine.metrics.accepted_tokens == sum(engine.metrics.accepted_at)


@pytest.mark.parametrize(
    "stops",
    [
        {"stop": "5 26"},
        {"stop": ["27 2", "26"], "min_tokens": 5, "logprobs": 2},
        {"stop": "24", "include_stop_str_in_output": True},
        {"max_tokens": 5, "stop": "no such text"},
        {"stop_token_ids": [20, 300], "min_tokens": 3},
        {"max_tokens": 25, "ignore_eos": True, "min_tokens": 21},
        {"max_tokens": 30, "repetition_penalty": 1.8, "frequency_penalty": 0.5, "presence_penalty": 1.0},
    ],
    ids=lambda stops: next(iter(stops)),
)
def test_stops_in_the_middle_of_accepted_drafts_cut_exactly_there(
    trained: Model, counted: tuple[list[int], list[int]], stops: dict[str, object]
):
    """Token ids, text, reason, logprobs and what is cached: all as without drafts."""
    ids, plain = counted
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **stops})  # type: ignore[arg-type]
    shown: list[tuple[tuple[CompletionOutput, ...], set[int]]] = []
    for kind in ("none", "right", "greedy"):
        right = list(shown[0][0][0].token_ids) if shown else []
        drafter = None if kind == "none" else ScriptedDrafter({"a": (right if kind == "right" else plain) + plain})
        engine = AuditedEngine(trained, block_size=3, drafter=drafter, num_blocks=100)
        engine.add_request("a", ids, params)
        (output,) = [output for output in engine.stream() if output.finished]
        shown.append((output.outputs, set(engine.scheduler.pool.block_of)))
        engine.verify()
    assert shown[1:] == shown[:1] * 2
