"""Many sequences in one ragged pass: the bits of reference.py for each alone."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import threads

import lfm2np
from lfm2np.engine import teacher_forcing, uncached
from lfm2np.engine.loading import Model
from lfm2np.engine.teacher_forcing import score_many
from lfm2np.engine.work.place import Place, cut
from lfm2np.errors import NumericsError, RequestError

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parents[2] / "fixtures"
load = functools.cache(lfm2np.load)


@st.composite
def sequences(draw: st.DrawFn, vocab_size: int) -> list[list[int]]:
    """Of ragged lengths; many begin like others, are others' beginnings, or the same."""
    ids = st.integers(0, vocab_size - 1)
    beginnings = draw(st.lists(st.lists(ids, max_size=8), min_size=1, max_size=2))
    drawn = []
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.sampled_from([[], *beginnings]))
        start = start[: draw(st.integers(0, len(start)))]
        drawn.append([*start, *draw(st.lists(ids, min_size=max(0, 2 - len(start)), max_size=6))])
    return drawn


@pytest.mark.parametrize("name", ["trained", "torture/moe_minimal_config", "torture/lfm3_minimal_config"])
@settings(max_examples=10)
@given(data=st.data())
def test_scores_of_many_are_those_of_each_alone(name: str, data: st.DataObject) -> None:
    """Whatever the budget of a pass, and however the rows of the logits are cut."""
    model = load(FIXTURES / name)
    drawn = data.draw(sequences(model.config.vocab_size))
    alone = [model.score(ids) for ids in drawn]
    place = Place(max_num_batched_tokens=data.draw(st.integers(1, 40)))
    rows = data.draw(st.integers(1, 12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_forcing, "LOGITS_AT_ONCE", rows * model.config.vocab_size)
        scores = score_many(model, drawn, place)
    assert repr(scores) == repr(alone), "repr tells all bits of a float"
    assert place.num_tokens == sum(len(ids) - 1 for ids in drawn)


def test_the_margin_of_a_greedy_token_is_its_lead() -> None:
    row = load(None).logits([1, 5, 6])[-1].astype(np.float64)
    second, first = np.sort(row)[-2:]
    *_, last = load(None).score([1, 5, 6, int(np.argmax(row))])
    assert (last.rank, last.margin) == (1, first - second) and first > second


def overflowing(model: Model, token_id: int) -> Model:
    """The model with a token whose embedding is infinite."""
    values = np.array(model.weights.embedding.values)
    values[token_id] = 0x7F80  # bfloat16's infinity
    embedding = dataclasses.replace(model.weights.embedding, values=values)
    return dataclasses.replace(model, weights=dataclasses.replace(model.weights, embedding=embedding))


@pytest.mark.filterwarnings("error")
def test_an_overflow_in_attention_harms_only_its_own_sequence() -> None:
    model = overflowing(load(None), 9)
    good = [[1, 5, 6, 7], [1, 8, 10], [4, 4]]
    scores = score_many(model, [good[0], [1, 9, 17, 3], good[1], good[2]])
    assert isinstance(scores[1], NumericsError)
    with pytest.raises(NumericsError) as alone:
        model.score([1, 9, 17, 3])
    assert str(scores[1]) == str(alone.value)
    assert [scores[0], scores[2], scores[3]] == [load(None).score(ids) for ids in good]


@pytest.mark.filterwarnings("error")
def test_an_overflow_in_the_logits_harms_only_its_own_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state beyond float32 in one row, as no attention layer follows that would see it."""
    model = load(None)
    original = uncached.hidden_states

    def large(*arguments):  # type: ignore[no-untyped-def]
        states, runs = original(*arguments)
        states[runs[1].rows.start + 1] = 3e38
        return states, runs

    monkeypatch.setattr(uncached, "hidden_states", large)
    monkeypatch.setattr(teacher_forcing, "LOGITS_AT_ONCE", 2 * model.config.vocab_size)
    good = [[1, 5, 6, 7], [1, 8, 10]]
    scores = score_many(model, [good[0], [1, 5, 9, 9, 9], good[1]])
    assert isinstance(scores[1], NumericsError)
    assert "in row 1 is" in str(scores[1]) and "overflow exact" in str(scores[1])
    assert [scores[0], scores[2]] == [model.score(ids) for ids in good]


@pytest.mark.parametrize(("count", "least"), [(2, 1), (3, 700)])
def test_no_score_and_no_overflow_depends_on_the_number_of_threads(monkeypatch, count: int, least: int) -> None:
    model = load(None)
    rng = np.random.default_rng(count)
    states = rng.normal(size=(23, model.config.hidden_size)).astype(np.float32)
    states[[4, 22]] = 3e38
    ids = rng.integers(0, model.config.vocab_size, 23)
    alone, overflows = teacher_forcing.score_rows(model.weights, model.numerics, states, ids)
    monkeypatch.setattr(teacher_forcing, "LOGITS_AT_ONCE", 9 * model.config.vocab_size)
    with threads(count, least):
        scores, also = teacher_forcing.score_rows(model.weights, model.numerics, states, ids)
    assert sorted(overflows) == sorted(also) == [4, 22] and overflows == also
    for name, column in alone.items():
        assert column.dtype == scores[name].dtype
        assert np.array_equal(column, scores[name]), name


def test_a_prompt_that_can_not_be_scored_is_named_before_anything_runs() -> None:
    model, place = load(None), Place()
    most = model.config.max_position_embeddings
    for bad, what in (([1], "1 token to"), ([1, 999999], "999999"), ([1] * (most + 1), f"{most + 1} tokens to score")):
        with pytest.raises(RequestError, match=f"prompt 1: .*{what}"):
            score_many(model, [[1, 2, 3], bad], place)
    assert place.num_tokens == 0


def test_texts_are_prompts_too_and_progress_counts_tokens() -> None:
    seen: list[tuple[int, int]] = []
    place = Place(max_num_batched_tokens=4)
    prompts = [[1, 2, 3], [1, 2, 3], [1, 2, 3, 4, 5, 6]]
    score_many(load(None), prompts, place, lambda *step: seen.append(step))
    assert seen == [(0, 9), (4, 9), (9, 9)]
    assert place.tokens_per_second is not None and place.tokens_per_second > 0
    assert score_many(load(None), ["sort: 3 1"]) == [load(None).score("sort: 3 1")]
    assert score_many(load(None), []) == []


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 20))
def test_cuts_keep_the_order_and_the_budget(sizes: list[int], most: int) -> None:
    runs = cut(range(len(sizes)), sizes, most)
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    for number, run in enumerate(runs):
        assert sum(sizes[index] for index in run) <= most or len(run) == 1
        if number:
            assert sum(sizes[index] for index in [*runs[number - 1], run[0]]) > most, "no cut without need"
