"""The trained LFM3: each mechanism is needed, and the engine's tokens are those of a sequence alone."""

from __future__ import annotations

import itertools
from functools import cache

import corpus
import evaluate
import pytest
from without_lfm3 import lfm3_ablations

import lfm2np
from lfm2np.checkpoint.loaded import lfm3_fixture

pytestmark = pytest.mark.slow


@cache
def model() -> lfm2np.Model:
    return lfm2np.load(lfm3_fixture())


def questions(count: int) -> list[corpus.Example]:
    """Held out of training, the tasks in turn."""
    streams = [corpus.examples(3, True, (task,)) for task in corpus.tasks_of("lfm3")]
    return [next(stream) for stream in itertools.islice(itertools.cycle(streams), count)]


def test_it_has_a_window_shorter_than_its_prompts_and_a_head_dim_of_its_own():
    config = model().config
    assert config.head_dim != config.hidden_size // config.num_attention_heads
    assert set(config.layer_types) == {"conv", "full_attention", "sliding_attention"}
    assert config.conv_L_cache == 7 and config.use_attention_gate and config.use_sandwich_norm
    assert config.partial_rotary_factor == 0.5 and config.rope_theta != config.sliding_rope_theta
    lengths = [
        len(model().prompt_ids(corpus.as_text(question)[0]))
        for question in questions(40)
        if question.task in ("far", "edge")
    ]
    assert min(lengths) > config.sliding_window == 16


def test_every_token_of_edge_repeats_what_stood_a_window_ago():
    """After the comma each letter is the one 16 tokens before it: the farthest that the last token's window shows."""
    (example,) = itertools.islice(corpus.examples(3, True, ("edge",)), 1)
    ids = model().tokenizer.encode("".join(corpus.as_text(example)))
    assert ids[-5:-1] == ids[-21:-17]
    assert len(set(ids[-21:-5])) == 16, "the comma, and no letter twice"


@pytest.mark.parametrize("name", lfm3_ablations(model().weights, model().config))
def test_without_a_mechanism_a_task_is_lost(name: str):
    """On few prompts of one task; fixtures/evaluate.py prints the table of all."""
    assert num_right(name) < num_right(None) / 2


@cache
def num_right(without: str | None) -> int:
    """Of six prompts."""
    network = model().weights, model().config
    if without is not None:
        network = lfm3_ablations(*network)[without]
    asked = itertools.islice(corpus.examples(3, True, ("copy",)), 6)
    return sum(evaluate.is_answered(model(), network, example, chat=False) for example in asked)


def test_it_answers_what_it_was_never_trained_on():
    right = [
        model().generate(corpus.as_text(question)[0], max_tokens=40).text == f" {question.answer}"
        for question in questions(16)
    ]
    assert sum(right) >= 14
