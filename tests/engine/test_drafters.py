"""The drafters: a smaller model, greedy and random; prompt lookup."""

import json
from pathlib import Path

import numpy as np
import pytest
from builders import raw_config, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from runs import Run
from truths import greedy_tokens

import lfm2np
from lfm2np import Engine, RequestError, SamplingParams
from lfm2np.checkpoint.config_json import parse_config
from lfm2np.engine.draft_model import ModelDrafter
from lfm2np.engine.drafters import DraftContext, NgramDrafter
from lfm2np.engine.loading import Model
from lfm2np.engine.sampling.choice import request_seed
from lfm2np.engine.sequential import alone
from lfm2np.errors import CheckpointError
from lfm2np.suite.audit import AuditedEngine

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(scope="module")
def trained() -> Model:
    return lfm2np.load()


@pytest.fixture(scope="module")
def small() -> Model:
    return lfm2np.load(FIXTURES / "draft")


def test_the_draft_models_greedy_guesses_are_its_own_greedy_tokens(trained: Model, small: Model):
    drafter = ModelDrafter(small, trained, block_size=3)
    prompts = [trained.prompt_ids(text) for text in ("add: 3 + 4 ->", "copy: tivu zo ->", "sort: 3 1")]
    for count in (1, 3, 5):
        contexts = [
            DraftContext(str(index), tuple(ids), len(ids), SamplingParams(), 0, 0, count)
            for index, ids in enumerate(prompts)
        ]
        for draft, ids in zip(drafter.propose(contexts), prompts, strict=True):
            expected, sequence = [], list(ids)
            for _ in range(count):
                expected.append(int(np.argmax(small.logits(sequence)[-1])))
                sequence.append(expected[-1])
            assert list(draft.token_ids) == expected


@pytest.mark.slow
def test_random_guesses_are_a_function_of_the_prefix_and_the_seed(trained: Model, small: Model):
    """So the tokens that come are too: equal to one token after the other, whatever the batch, blocks, budget and K."""
    ids = [trained.prompt_ids(text) for text in ("copy: tivu zo sa ->", "story", "count: 3 to 9 ->", "sort: 4 1")]
    params = [
        SamplingParams(temperature=1.3, max_tokens=9, seed=5, n=3, ignore_eos=True),
        SamplingParams(temperature=2.0, max_tokens=12, seed=6, top_k=20, repetition_penalty=1.3, logit_bias={40: 3.0}),
        SamplingParams(temperature=0.0, max_tokens=8),
        SamplingParams(temperature=3.0, max_tokens=10, top_p=0.9, min_p=0.01, stop_token_ids=[30, 31], min_tokens=4),
    ]
    expected = {}
    for index, (prompt, param) in enumerate(zip(ids, params, strict=True)):
        for sample in range(param.n):
            seed = request_seed(param, 0, str(index))
            slow = ModelDrafter(small, trained, "random", prefix_caching=False)
            tokens = [step.token_id for step in alone(trained, prompt, param, seed, sample, slow)]
            plain = [step.token_id for step in alone(trained, prompt, param, seed, sample)]
            expected[index, sample] = tokens
            assert (tokens != plain) or param.temperature < 2.0, "the control: the rule is another one"
    for most, budget, size, seqs in ((1, 500, 16, 8), (3, 5, 1, 8), (6, 13, 2, 2), (4, 1, 3, 3), (9, 64, 5, 5)):
        engine = AuditedEngine(
            trained,
            drafter=ModelDrafter(small, trained, "random"),
            num_speculative_tokens=most,
            max_num_batched_tokens=budget,
            block_size=size,
            max_num_seqs=seqs,
            num_blocks=60 // size + 1,
        )
        for index, (prompt, param) in enumerate(zip(ids, params, strict=True)):
            engine.add_request(str(index), prompt, param)
        outputs = {output.request_id: output for output in engine.stream() if output.finished}
        actual = {
            (int(name), sample.index): list(sample.token_ids)
            for name, output in outputs.items()
            for sample in output.outputs
        }
        assert actual == expected
        assert engine.metrics.accepted_tokens > 0 or budget == 1


def test_a_draft_model_whose_context_or_pool_ends_stops_guessing_and_harms_nothing(trained: Model, small: Model):
    ids = trained.prompt_ids("copy: tivu zo sa di zemu re ->")
    plain = greedy_tokens(trained, ids, 12)
    for sampling in ("greedy", "random"):
        drafter = ModelDrafter(small, trained, sampling, block_size=2, num_blocks=len(ids) // 2 + 2)
        engine = Engine(trained, drafter=drafter)
        engine.add_request("a", ids, SamplingParams(temperature=0.0, max_tokens=12))
        (output,) = [output for output in engine.stream() if output.finished]
        assert output.outputs[0].token_ids == plain
        assert output.metrics is not None
        assert output.metrics.draft_error is None
        assert 0 < output.metrics.draft_tokens < 9


def test_a_draft_model_of_another_vocabulary_is_refused(trained: Model):
    other = lfm2np.load(FIXTURES / "torture" / "wide_heads")
    with pytest.raises(CheckpointError, match="vocab_size"):
        ModelDrafter(other, trained)
    with pytest.raises(RequestError, match="draft sampling 'maybe'"):
        ModelDrafter(trained, trained, "maybe")


@pytest.mark.slow
def test_a_dense_draft_model_of_a_sparse_target_changes_no_bit(tmp_path: Path):
    """The target's steps then hold the drafts of several requests, and each expert's product some rows of each."""
    target = lfm2np.load(FIXTURES / "torture" / "moe_published")
    raw = raw_config(vocab_size=target.config.vocab_size, eos_token_id=7)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    write_checkpoint(tmp_path, parse_config(raw, "config.json"))
    for seed in range(3):
        drafter = ModelDrafter(lfm2np.load(tmp_path), target, num_blocks=200)
        run = Run(target, seed, drafter=drafter, num_speculative_tokens=3, max_num_batched_tokens=64, policy="fcfs")
        run.go()
        run.require_equal_to_the_reference()
        assert run.engine.metrics.draft_tokens > 0


# --- prompt lookup


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    longest=st.integers(1, 6),
    shortest=st.integers(1, 6),
    count=st.integers(1, 5),
)
def test_prompt_lookup_takes_the_longest_suffix_and_its_first_place(
    ids: list[int], longest: int, shortest: int, count: int
):
    if shortest > longest:
        with pytest.raises(RequestError, match="longest n-gram"):
            NgramDrafter(longest, shortest)
        return
    context = DraftContext("a", tuple(ids), 1, SamplingParams(), 0, 0, count)
    (draft,) = NgramDrafter(longest, shortest).propose([context])
    places = [  # (length, -start) of every earlier place of every suffix
        (size, -start)
        for size in range(shortest, longest + 1)
        for start in range(len(ids) - size)
        if ids[start : start + size] == ids[len(ids) - size :]
    ]
    if not places:
        assert draft.token_ids == ()
        return
    size, start = max(places)[0], -max(places)[1]
    assert list(draft.token_ids) == ids[start + size :][:count]
    assert draft.token_ids
