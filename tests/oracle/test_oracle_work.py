"""Check and vectors on executors and from files of results: what is exact is the same, bit for bit."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from truths import truth_of
from vector_sets import few, six

from lfm2np.commands.cli.shared.work import WORKS
from lfm2np.engine.loading import Model
from lfm2np.engine.work.place import Place, Workers
from lfm2np.engine.work.results_file import ResultsFile, merged, spot_check
from lfm2np.errors import NumericsError
from lfm2np.oracle.check import Checked, check, judged
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.judging import truth as truth_module
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.judging.truth import Spoken, Truth, spoken_truths
from lfm2np.oracle.vectors.golden import verify
from lfm2np.truth import reference

pytestmark = [pytest.mark.rounding, pytest.mark.slow]


@pytest.fixture(scope="module")
def asked(model: Model) -> Checked:
    return check(model, PythonTarget("engines:bfloat16", model.path), "bfloat16", cases=["short-prompts"])


def bits(truth: Truth) -> list[bytes | int | tuple[int, ...]]:
    values = [getattr(truth, field.name) for field in fields(truth)]
    return [value.tobytes() if isinstance(value, np.ndarray) else value for value in values]


@settings(max_examples=15)
@given(
    st.dictionaries(
        st.lists(st.integers(0, 511), min_size=2, max_size=12).map(tuple),
        st.dictionaries(st.integers(0, 10), st.lists(st.integers(0, 511), max_size=3), max_size=3),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 30),
    st.integers(1, 12),
)
def test_truths_of_a_ragged_pass_are_those_of_each_alone(
    model: Model, wanted: dict[tuple[int, ...], dict[int, list[int]]], budget: int, rows: int
) -> None:
    """Whatever the budget of a pass, and however the rows of the logits are cut; and they are the reference's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truth_module, "LOGITS_AT_ONCE", rows * model.config.vocab_size)
        truths = spoken_truths(
            model, {Spoken(ids): rows for ids, rows in wanted.items()}, Place(max_num_batched_tokens=budget)
        )
    for truth, (ids, tokens) in zip(truths, wanted.items(), strict=True):
        assert bits(truth) == bits(truth_of(model, ids, tokens))
        logits = reference.logits(model.weights, model.config, model.numerics, ids[:-1])
        rows = truth.known_rows
        assert rows.tolist() == ([row for row in sorted(tokens) if row < len(logits)] or list(range(len(logits))))
        logprobs = np.take_along_axis(model.numerics.log_softmax(logits), truth.columns, axis=1)
        assert truth.logprobs[rows].tobytes() == logprobs[rows].tobytes()
        assert truth.best[rows].tolist() == np.argmax(logits, axis=1)[rows].tolist()
        for row, token in tokens.items():
            assert row >= len(ids) - 1 or set(token) <= set(truth.columns[row].tolist())


def test_an_overflow_is_an_error_of_its_own_sequence(model: Model) -> None:
    values = np.array(model.weights.embedding.values)
    values[9] = 0x7F80  # infinity
    embedding = replace(model.weights.embedding, values=values)
    broken = replace(model, weights=replace(model.weights, embedding=embedding))
    items = [{"token_ids": ids, "wanted": []} for ids in ([1, 5, 6], [1, 9, 17], [1, 7])]
    results = truth_module.truth_items(broken, items)
    assert ["error" in mismatch for mismatch in results] == [False, True, False]
    with pytest.raises(NumericsError, match="attention: "):
        spoken_truths(broken, {Spoken((1, 5, 6)): {}, Spoken((1, 9, 17)): {}})


def test_a_check_on_one_thread_has_the_same_noise_to_the_bit(model: Model, asked: Checked) -> None:
    with ThreadPoolExecutor(1) as executor:
        judgement = judged(model, asked.abilities, "bfloat16", asked.pairs, known=Known(place=Place(executor)))
    assert repr(judgement.positions) == repr(asked.positions)


def test_a_check_goes_on_with_the_truths_of_a_file(model: Model, asked: Checked, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    tokens = []
    for _ in range(2):
        with ResultsFile(path, model) as record:
            known = Known(place=Place(record=record))
            judgement = judged(model, asked.abilities, "bfloat16", asked.pairs, known=known)
        assert repr(judgement.positions) == repr(asked.positions)
        tokens.append(known.place.num_tokens)
    exactly = sum(len(truth.token_ids) - 1 for truth in known.truths)
    assert tokens[0] - tokens[1] == exactly > 0, "the emulations alone are computed again"
    spot_check(model, list(merged([path], model).values()), WORKS, 3, 0)


def test_vectors_are_verified_on_an_executor() -> None:
    with ThreadPoolExecutor(2) as executor:
        assert verify(six(), few(), executor=executor) == []
    wrong = copy.deepcopy(few())
    wrong["vectors"][1]["positions"][0]["logprob"] += 2.0**-40
    with Workers(2) as executor:
        differences = verify(six(), wrong, executor=executor)
    ((where, what),) = [(difference.where, difference.what) for difference in differences]
    assert "short-2-text" in where and "position 0" in where and what == "logprob"
