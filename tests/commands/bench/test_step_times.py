"""Steps that are measured: shapes are those of the engine's trace, times those of the clock, and all kinds come."""

from __future__ import annotations

import io
import itertools
import random
from pathlib import Path

import pytest

import lfm2np
from lfm2np.commands.bench.step_times import MOST_OUTPUT, Episode, drawn_request, measure, recorded, run_episode
from lfm2np.commands.simulate.cost import FIELDS
from lfm2np.commands.simulate.steps import gathered, read_steps
from lfm2np.engine.engine import Engine
from lfm2np.errors import RequestError

SMALL = Path(__file__).parents[3] / "fixtures" / "torture" / "six_heads_two_kv"
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_blocks": 64}


@pytest.fixture(scope="module")
def model() -> lfm2np.Model:
    return lfm2np.load(SMALL)


def test_a_recorder_and_a_trace_have_the_same_steps(model, tmp_path):
    file = io.StringIO()
    traced, watched = Engine(model, trace=file, **SIZES), Engine(model, **SIZES)
    shapes = recorded(watched)
    for engine in (traced, watched):
        draw = random.Random(5)
        for number in range(6):
            engine.add_request(str(number), *drawn_request(draw, 60, model.config.vocab_size))
        list(engine.stream())
    (tmp_path / "trace.jsonl").write_text(file.getvalue())
    steps = read_steps(tmp_path / "trace.jsonl")
    expected = gathered([(shape, 1.0) for shape in shapes])
    for name in FIELDS:
        assert getattr(steps.shapes, name).tolist() == getattr(expected.shapes, name).tolist(), name


@pytest.mark.slow
def test_steps_of_all_kinds_are_measured(model):
    """With a clock that is one second later whenever it is asked: decodes, prompts, parts of prompts, and both."""
    clock = map(float, itertools.count()).__next__
    steps = gathered(measure(model, 2500.0, 100, clock=clock, **SIZES))
    tokens, requests, sampled = steps.shapes.tokens, steps.shapes.requests, steps.shapes.sampled
    assert (steps.seconds == 1.0).all() and len(steps) > 100
    for requests_in_step in range(1, 5):
        assert ((tokens == requests) & (requests == requests_in_step)).any(), "decodes"
    assert ((tokens > 8) & (requests == 1) & (sampled == 1)).any(), "a prompt"
    assert ((tokens == 32) & (sampled == 0)).any(), "a part of a prompt"
    assert ((tokens == 8) & (sampled == 0)).any(), "a part of a prompt, under a quarter of the budget"
    assert ((tokens > requests) & (requests > 1) & (sampled == requests)).any(), "prompts beside decodes"


def test_an_episode_leaves_nothing_behind(model):
    engine = Engine(model, **SIZES)
    names = map(str, itertools.count())
    steps = run_episode(engine, Episode(together=3, longest=40), random.Random(1), names, float("inf"))
    assert steps and max(shape.requests for shape, _ in steps) <= 3
    assert not engine.has_unfinished and engine.scheduler.pool.num_free == 64


def test_a_prompt_beyond_the_context_is_refused(model):
    most = model.config.max_position_embeddings - MOST_OUTPUT
    with pytest.raises(RequestError, match=rf"^prompts of up to {most + 1} tokens: expected 1 to {most}$"):
        measure(model, 1.0, most + 1, **SIZES)
