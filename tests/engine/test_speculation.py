"""Speculative decoding in the engine: any drafter, any acceptance pattern, and not a bit or a block differs."""

import functools
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import LONGEST_PROMPT, MOST_TOKENS, Run
from truths import greedy_tokens

import lfm2np
from lfm2np import Engine, SamplingParams
from lfm2np.engine.drafters import ScriptedDrafter
from lfm2np.engine.loading import Model
from lfm2np.engine.outputs import CompletionOutput, RequestOutput
from lfm2np.errors import ProofError
from lfm2np.suite.audit import AuditedEngine
from scheduler import POLICIES

FIXTURES = Path(__file__).parents[2] / "fixtures"
KINDS = [
    pytest.param("trained", marks=pytest.mark.slow),
    "torture/all_attention",
    "torture/all_convolution",
    "torture/biased_two_taps",
    "torture/moe_minimal_config",
]


@pytest.fixture(scope="module")
def trained() -> Model:
    return lfm2np.load()


@pytest.fixture(scope="module")
def small() -> Model:
    return lfm2np.load(FIXTURES / "draft")


@functools.cache
def truth_of(model: Model, seed: int) -> dict[str, list[int]]:
    """The output tokens of every sample of a run, without speculation."""
    run = Run(model, seed, policy="fcfs", is_audited=False)
    run.go(abort_rate=0.0)
    return {
        name if sample.index == 0 else f"{name}#{sample.index}": list(sample.token_ids)
        for name, output in run.outputs.items()
        for sample in output.outputs
    }


def wrong_at(truth: dict[str, list[int]], wrong: Sequence[bool], vocab_size: int) -> dict[str, list[int]]:
    """Scripts that follow the truth but at the places (taken round and round) where `wrong` says so."""
    return {
        name: [(token + 1) % vocab_size if wrong[place % len(wrong)] else token for place, token in enumerate(ids)]
        for name, ids in truth.items()
    }


def speculate(model: Model, seed: int, wrong: Sequence[bool], most: int, **options: object) -> Run:
    """A random run under a scripted drafter, held against the reference: outputs, logits, and the cache as it goes."""
    script = wrong_at(truth_of(model, seed), wrong, model.config.vocab_size)
    run = Run(model, seed, drafter=ScriptedDrafter(script), num_speculative_tokens=most, **options)
    run.go(verify_rate=0.05)
    run.require_equal_to_the_reference()
    assert run.engine.scheduler.pool.num_free == run.engine.scheduler.pool.num_blocks
    return run


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 8)
@given(
    seed=st.integers(0, 5),
    wrong=st.lists(st.booleans(), min_size=1, max_size=8),
    most=st.integers(1, 9),
    sizes=st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([1, 2, 3, 5, 16]),
            "max_num_seqs": st.integers(1, 8),
            "max_num_batched_tokens": st.sampled_from([1, 2, 3, 7, 16, 64, 500]),
            "policy": st.sampled_from(tuple(POLICIES)),
            "prefix_caching": st.booleans(),
        }
    ),
    spare=st.integers(0, 40),
)
def test_any_acceptance_pattern_gives_the_reference_and_a_clean_cache(
    trained: Model, seed: int, wrong: list[bool], most: int, sizes: dict[str, object], spare: int
):
    """Chunks, preemption, forks, prefix hits and aborts included; memory from "just fits" up."""
    least = -(-(LONGEST_PROMPT + MOST_TOKENS) // int(str(sizes["block_size"])))
    run = speculate(trained, seed, wrong, most, num_blocks=least + spare, **sizes)
    if all(wrong):
        assert run.engine.metrics.accepted_tokens == run.engine.metrics.steps_saved == 0


@pytest.mark.parametrize("name", KINDS)
def test_speculation_equals_the_reference_with_every_kind_of_layer(name: str):
    choice = random.Random(0)
    wrong = [choice.random() < 0.3 for _ in range(7)]
    run = speculate(lfm2np.load(FIXTURES / name), 0, wrong, choice.randint(1, 6), max_num_batched_tokens=64)
    assert run.engine.metrics.draft_tokens > 0


@pytest.mark.parametrize(("policy", "caching"), [*zip(POLICIES, itertools.cycle([False, True]), strict=False)])
def test_a_drafter_that_always_lies_leaves_no_trace_at_all(small: Model, policy: str, caching: bool):
    """Step by step, plan by plan, byte by byte of every array: the run is the one that never speculated."""
    options: dict[str, object] = {
        "policy": policy,
        "prefix_caching": caching,
        "block_size": 2,
        "num_blocks": 30,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 40,
    }
    lies = wrong_at(truth_of(small, 0), [True], small.config.vocab_size)
    plain = Run(small, 0, is_audited=False, **options)  # its memory is compared with that of the other
    lied = Run(small, 0, drafter=ScriptedDrafter(lies), num_speculative_tokens=3, **options)
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


def test_verify_notices_a_rejected_draft_in_the_live_state(trained: Model):
    engine = AuditedEngine(trained, num_blocks=100)
    engine.add_request("a", [1, 5, 6, 7], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    engine.step()
    assert engine.verify() == 1
    engine.cache.states[engine.scheduler.running[0].slot or 0, 0, -1, 0] += 1e-6
    with pytest.raises(ProofError, match="live state of convolution layer 0"):
        engine.verify()


def test_a_right_drafter_saves_the_steps_it_promises(trained: Model):
    ids = trained.tokenizer.encode_chat([{"role": "user", "content": "count: 23 to 31"}])
    plain = greedy_tokens(trained, ids, 40)
    truth = {"a": list(plain)}
    for most, steps in ((1, 10), (2, 7), (4, 4), (30, 2)):
        engine = Engine(trained, drafter=ScriptedDrafter(truth), num_speculative_tokens=most)
        engine.add_request("a", ids, SamplingParams(temperature=0.0, max_tokens=40))
        (output,) = [output for output in engine.stream() if output.finished]
        assert output.outputs[0].token_ids == plain
        assert output.outputs[0].text == trained.tokenizer.decode(plain[:-1])
        count = len(plain)
        assert engine.metrics.steps == -(-count // (most + 1)) == count - engine.metrics.steps_saved
        assert output.metrics is not None
        assert output.metrics.accepted_tokens == engine.metrics.accepted_tokens == sum(engine.metrics.accepted_at)
        assert steps >= engine.metrics.steps


STOPS = [
    SamplingParams(temperature=0.0, max_tokens=40, stop="5 26"),
    SamplingParams(temperature=0.0, max_tokens=40, stop=["27 2", "26"], min_tokens=5, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=40, stop="24", include_stop_str_in_output=True),
    SamplingParams(temperature=0.0, max_tokens=5, stop="no such text"),
    SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=[20, 300], min_tokens=3),
    SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True, min_tokens=21),
    SamplingParams(temperature=0.0, max_tokens=1),
    SamplingParams(temperature=0.0, max_tokens=30, repetition_penalty=1.8, frequency_penalty=0.5, presence_penalty=1.0),
]


@pytest.fixture(scope="module")
def counted(trained: Model) -> tuple[list[int], list[int]]:
    """A prompt, and what follows it."""
    ids = trained.tokenizer.encode_chat([{"role": "user", "content": "count: 23 to 31"}])
    return ids, list(greedy_tokens(trained, ids, 60))


@pytest.mark.parametrize("params", STOPS)
def test_stops_in_the_middle_of_accepted_drafts_cut_exactly_there(
    trained: Model, counted: tuple[list[int], list[int]], params: SamplingParams
):
    """Token ids, text, reason, logprobs and what is cached: all as without drafts."""
    ids, plain = counted
    shown: list[tuple[tuple[CompletionOutput, ...], set[int]]] = []
    for kind, most in (("none", 1), ("right", 4), ("greedy", 4)):
        right = list(shown[0][0][0].token_ids) if shown else []
        drafter = None if kind == "none" else ScriptedDrafter({"a": (right if kind == "right" else plain) + plain})
        engine = AuditedEngine(trained, block_size=3, drafter=drafter, num_speculative_tokens=most, num_blocks=100)
        engine.add_request("a", ids, params)
        (output,) = [output for output in engine.stream() if output.finished]
        shown.append((output.outputs, set(engine.scheduler.pool.block_of)))
        engine.verify()
    assert all(drafted == shown[0] for drafted in shown[1:])
