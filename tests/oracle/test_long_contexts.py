"""The case `long`: late positions over one shared prefix. Here on few positions, as `max_model_len` allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from faults import Edit, Fault, by_name, inject

import lfm2np
from lfm2np.engine import uncached
from lfm2np.engine.loading import Model
from lfm2np.engine.work.place import Place, cut
from lfm2np.oracle.check import Checked, judged
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.judging import truth
from lfm2np.oracle.judging.scored import Known
from lfm2np.oracle.judging.verdict import Verdict
from lfm2np.oracle.sending import Collected, send_all
from lfm2np.oracle.workloads import DEFAULT_CASES, FEW, LONG, Writer, far_points, long_lengths, rounds

pytestmark = [pytest.mark.rounding, pytest.mark.slow]
FIXTURES = Path(__file__).parents[2] / "fixtures"
POSITIONS, FEWER = 384, 160
CHECKPOINTS = "cache.checkpoints[block, index] = window[end : end + columns]"
STEP = "ids, positions, mixing, progress)"
ANGLES = "ids, positions // (1 + (positions > 300)) * (1 + (positions > 300)), mixing, progress)"
AHEAD = "cache.checkpoints[block, index] = window[end - (position > 300) : end + columns - (position > 300)]"
FREED_EARLY = by_name("window-block-freed-one-early")


def late(edit: Edit) -> Edit:
    return replace(edit, new=edit.new.replace("+ 1,", "+ (request.num_computed_tokens > 300),"))


LATE: dict[str, tuple[str, tuple[Edit, ...], str]] = {
    "angles": ("trained", (Edit("lfm2np.engine.step:forward", STEP, ANGLES),), "wrong from position "),
    "checkpoint": (
        "trained",
        (Edit("lfm2np.engine.cache:keep_checkpoints", CHECKPOINTS, AHEAD),),
        "wrong in prompts whose first ",
    ),
    "window": ("lfm3", tuple(map(late, FREED_EARLY.edits)), "wrong from position "),
}


def asked(model: Model, engine: str = "float32", positions: int = POSITIONS) -> Collected:
    return send_all(model, PythonTarget(f"engines:{engine}", model.path), 4, cases=[LONG], max_model_len=positions)


def checked(model: Model, answers: Collected, place: Place | None = None) -> Checked:
    known = Known(place=place or Place())
    return judged(model, answers.abilities, "float32", answers.pairs, answers.not_put, known=known)


@cache
def of_a_right_engine(model: Model) -> tuple[Collected, Checked]:
    answers = asked(model, positions=FEWER)
    return answers, checked(model, answers)


@pytest.fixture(scope="module")
def lfm3() -> Model:
    return lfm2np.load(FIXTURES / "lfm3")


def test_long_is_sent_only_by_name_and_its_longest_request_takes_the_last_position(model: Model) -> None:
    writer = Writer(model.config, model.tokenizer, 4)
    assert LONG not in {request.case for batch in rounds(writer) for request in batch.requests}
    assert LONG not in DEFAULT_CASES
    requests = [request for batch in rounds(writer, [LONG]) for request in batch.requests]
    lengths = [len(request.prompt_token_ids) + request.max_tokens for request in requests]
    assert max(lengths) == model.config.max_position_embeddings
    assert not any(request.is_scored for request in requests)


def test_prompts_end_around_borders_far_out() -> None:
    points = far_points(32764, 1000)
    for size in (16, 32, 64, 128, 256, 512, 2048, 8192, 1000):
        borders = [point for point in points if point % size == 0 and point // size % 2]
        assert borders and {borders[-1] - 1, borders[-1] + 1} <= set(points)
        assert borders[-1] > 32764 - 2 * size


def test_lengths_that_the_model_cannot_hold_are_left_out() -> None:
    assert long_lengths(1024) == [1024 - FEW]
    assert long_lengths(4096) == [4096 - FEW]
    assert long_lengths(262144) == [4096 - FEW, 32768 - FEW, 262144 - FEW]


def test_the_truth_computes_a_shared_prefix_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its network sees hardly more rows than the longest prompt has."""
    (answers, _), rows = of_a_right_engine(model), []
    right = uncached.final_states

    def counted(weights, config, numerics, ids, *others, **named):  # type: ignore[no-untyped-def]
        rows.append(len(ids) if numerics.name == "exact" else 0)
        return right(weights, config, numerics, ids, *others, **named)

    monkeypatch.setattr(uncached, "final_states", counted)
    checked(model, answers, Place(max_num_batched_tokens=64))
    assert FEWER - FEW < sum(rows) < FEWER + 20 * (FEW + 8)


def test_a_right_engine_is_exact(model: Model, lfm3: Model) -> None:
    for subject in (model, lfm3):
        _, result = of_a_right_engine(subject)
        assert result.total.verdict is Verdict.EXACT and len(result.positions) > 16 * FEW


def test_stored_rows_begin_late_and_change_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, whole = of_a_right_engine(model)
    monkeypatch.setattr(truth, "LATE", 64)
    late = checked(model, answers)
    assert late.positions == whole.positions and late.total == whole.total


@pytest.mark.night
@pytest.mark.parametrize("fault", LATE)
def test_what_goes_wrong_late_is_a_bug(model: Model, lfm3: Model, fault: str) -> None:
    name, edits, words = LATE[fault]
    subject = {"trained": model, "lfm3": lfm3}[name]
    with inject(Fault(fault, "E", "", (), edits)):
        answers = asked(subject, "few_window_blocks" if fault == "window" else "small_steps")
    result = checked(subject, answers)
    assert result.total.verdict is Verdict.BUG
    assert words in result.total.reasons[0]
    first = result.total.first_wrong
    assert first is not None and first.row > 250


def test_runs_hold_what_shares_a_long_beginning() -> None:
    sizes = [100, 90, 90, 30, 30, 200]

    def shared(count: int) -> Callable[[int, int], int]:
        return lambda index, before: min(count, sizes[index] - 1)

    assert cut(range(6), sizes, 40) == [[0], [1], [2], [3], [4], [5]]
    assert cut(range(3), sizes, 40, shared(80)) == [[0, 1, 2]]
    assert cut(range(3), sizes, 40, shared(40)) == [[0], [1], [2]]
    assert cut([5, 0], sizes, 40, shared(50)) == [[5, 0]]


def test_common_prefix() -> None:
    drawn = np.random.Generator(np.random.Philox(key=3))
    for _ in range(50):
        ids = drawn.integers(0, 2, 40).tolist()
        other = drawn.integers(0, 2, 37).tolist()
        count = next((index for index in range(37) if ids[index] != other[index]), 37)
        assert uncached.common_prefix(ids, tuple(other)) == count
        assert uncached.common_prefix(ids, ids[:12]) == 12
