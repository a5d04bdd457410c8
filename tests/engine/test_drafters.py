"""The drafters: a smaller model, greedy and random; prompt lookup."""

import json
from pathlib import Path

import pytest
from builders import raw_config, write_checkpoint
from runs import Run
from truths import greedy_tokens

import lfm2np
from lfm2np import Engine, SamplingParams
from lfm2np.checkpoint.config_json import parse_config
from lfm2np.engine.draft_model import ModelDrafter
from lfm2np.engine.loading import Model

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(scope="module")
def trained() -> Model:
    return lfm2np.load()


@pytest.fixture(scope="module")
def small() -> Model:
    return lfm2np.load(FIXTURES / "draft")


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
