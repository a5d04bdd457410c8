"""An engine that preempts: what is computed again is recorded once, and only an error that a check saw is located."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import answered
from safetensors.numpy import save

from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.engine.loading import Model
from lfm2np.errors import DumpError
from lfm2np.oracle.check import Cause, judged
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import greedy
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.locate.dump import parse_dump
from lfm2np.oracle.locate.locate import Report, locate
from lfm2np.oracle.recorders import Recorder
from lfm2np.oracle.recorders.locating import cause_of
from lfm2np.oracle.recorders.registry import record_of
from lfm2np.teaching import nano
from lfm2np.teaching.tutorial import Adapter, Shown

pytestmark = [pytest.mark.rounding, pytest.mark.usefixtures("without_constants"), pytest.mark.slow]

TRAINED = Path(__file__).parents[3] / "fixtures" / "trained"
PROMPTS = (tuple(range(20, 31)), (5, 6, 7))
CHUNK, NEW, PREEMPTED = 8, 5, 2  # steps of 8 and 3 tokens, then of one; preempted when there are two new ones


class LastRows:
    """Hands on the step's start, and the last row of the logits."""

    def __init__(self, recorder: Recorder, has_starts: bool) -> None:
        self.recorder, self.has_starts = recorder, has_starts

    def step(self, ids: Sequence[int], start: int) -> None:
        self.recorder.step(ids, start if self.has_starts else None)

    def keep(self, name: str, values: Any) -> None:
        self.recorder.keep(name, values[-1:] if name == "lm_head" else values)


class PreemptingEngine(Shown):
    """The first of several requests is preempted once, then computed again from its first token on."""

    is_stale = True  # it begins again with the convolution's state of before (the bug)
    stale: nano.Array | None = None

    def step(self) -> list[nano.Sequence]:
        grown = super().step()
        for sequence in grown:
            is_first = sequence.request_id.endswith("0") and len(self.unfinished) > 1
            if is_first and self.stale is None and len(sequence.new_token_ids) == PREEMPTED:
                self.stale = self.states[sequence.slot].copy()
                self.preempt(sequence)
                return grown
        return grown

    def admit(self) -> nano.Sequence:
        sequence = super().admit()
        if self.stale is not None and self.is_stale and sequence.new_token_ids:
            self.states[sequence.slot] = self.stale
        return sequence


class Preempting(Adapter):
    """states  whether each step says where it starts"""

    is_stale, states = True, True

    def __init__(self, model: str, sizes: dict[str, Any]) -> None:
        super().__init__(PreemptingEngine(model, max_num_batched_tokens=CHUNK, prefix_caching=False))
        self.begin()

    def begin(self) -> None:
        self.engine.is_stale, self.engine.stale = self.is_stale, None  # type: ignore[attr-defined]

    def record(self, prompts: Sequence[Sequence[int]], request: int, max_tokens: int, recorder: Any) -> None:
        self.begin()
        super().record(prompts, request, max_tokens, LastRows(recorder, self.states))  # type: ignore[arg-type]


class Right(Preempting):
    is_stale = False


class Silent(Right):
    states = False


def located(model: Model, engine: str, prompts: Sequence[Sequence[int]] = PROMPTS, until: int | None = None) -> Report:
    content = record_of(f"test_preempted:{engine}", TRAINED, "float32")(prompts, 0, NEW, until)
    return locate(open_checkpoint(TRAINED, model.config), model.config, parse_dump(content, "dump", model.config))


def test_a_row_a_step_that_another_writer_dumped_is_refused_as_ambiguous(model: Model) -> None:
    tensors = {"token_ids": np.arange(92), "steps": np.array([64, 27, 1])}
    for rows in (2, 4, 92):  # of the last steps, the last ones, all
        parse_dump(save({**tensors, "lm_head": np.zeros((rows, 512), np.float32)}), "dump", model.config)
    with pytest.raises(DumpError, match=r"lm_head: 3 rows for steps of 64, 27, 1 are ambiguous"):
        parse_dump(save({**tensors, "lm_head": np.zeros((3, 512), np.float32)}), "dump", model.config)


def test_the_computation_of_a_resumed_request_counts_and_shows_its_stale_state(model: Model) -> None:
    """Pinned: both passes were taken for one sequence, and a state was blamed that was right."""
    report = located(model, "Preempting")
    assert report.num_tokens == len(PROMPTS[0]) + NEW - 1
    assert (report.findings[0].name, report.findings[0].steps) == ("model.layers.0.conv.state", "step 0 of 4")
    assert located(model, "Right").findings == ()


def test_what_is_not_computed_again_is_kept_up_to_there() -> None:
    recorder = Recorder()
    for ids, start, width in (([1, 2, 3, 4], 0, 4), ([5], 4, 5), ([3, 4, 5, 6], 2, 6)):
        recorder.step(ids, start)
        first = 10 * len(ids)
        recorder.keep("model.layers.0", np.arange(first, first + len(ids))[:, None])
        recorder.keep("model.layers.0.conv.state", np.full((1, 2, 3), start))
        recorder.keep("model.layers.2.self_attn.keys_read", np.arange(width)[:, None])
        recorder.keep("lm_head", np.full((len(ids), 4), first))
    tensors = recorder.tensors()
    assert [tensors[name].tolist() for name in ("token_ids", "steps")] == [[1, 2, 3, 4, 5, 6], [2, 4]]
    assert tensors["model.layers.0"].ravel().tolist() == [40, 41, 40, 41, 42, 43]
    assert tensors["model.layers.0.conv.state"][:, 0, 0].tolist() == [0, 2]
    assert tensors["model.layers.2.self_attn.keys_read"].ravel().tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert len(tensors["lm_head"]) == 6
    with pytest.raises(DumpError, match="start=8 after 6 tokens"):
        recorder.step([9], 8)


def test_what_comes_after_the_wrong_row_is_not_recorded(model: Model) -> None:
    """So an error before a preemption is shown by the tensors that it came from, not by those computed again."""
    last = len(PROMPTS[0])  # computed with the first new token, before the preemption
    assert located(model, "Preempting", until=last).num_tokens == last + 1
    assert located(model, "Preempting", until=last).findings == ()
    assert located(model, "Preempting", until=last + 1).findings  # computed after it
    assert located(model, "Preempting", until=2).num_tokens == CHUNK  # a row of the prompt's first chunk


def test_steps_that_are_computed_again_and_do_not_say_so_are_refused() -> None:
    with pytest.raises(TargetError, match=r"recorded \d+ tokens of a request of 11 and 5 new ones.*start"):
        record_of("test_preempted:Silent", TRAINED, "float32")(PROMPTS, 0, NEW)


def located_from(model: Model, recorder: str, change: int = 0) -> Cause:
    """Of the stale engine's answers, with another recorder or its first wrong log-probability changed."""
    requests = [
        greedy(f"a-{n}", prompt, NEW, case="neighbours", tags={"beside": True}) for n, prompt in enumerate(PROMPTS)
    ]
    target = PythonTarget("test_preempted:Preempting", TRAINED)
    abilities = target.probe()
    pairs = answered(target, requests)
    if change:
        logprobs = pairs[1][1].logprobs
        assert logprobs is not None
        pairs[1] = pairs[1][0], replace(pairs[1][1], logprobs=(logprobs[0] - change, *logprobs[1:]))
        pairs = pairs[1:]
    checked = judged(model, abilities, "float32", pairs)
    renew = partial(record_of, f"test_preempted:{recorder}", TRAINED, "float32")
    cause = cause_of(checked, recorder, renew, open_checkpoint(TRAINED, model.config), model)
    assert cause is not None
    return cause


def test_the_operator_that_a_wrong_answer_came_from_is_named(model: Model) -> None:
    cause = located_from(model, "Preempting")
    assert cause.finding is not None and cause.finding["name"] == "model.layers.0.conv.state"
    assert (cause.request_id, cause.beside, len(cause.prompts)) == ("a-0", True, 2)
    assert "beside 1 others" in cause.lines[0]


class OtherFault(Right):
    """Shows one tensor a little wrong, which no logit shows."""

    def record(self, prompts: Sequence[Sequence[int]], request: int, max_tokens: int, recorder: Any) -> None:
        keep = recorder.keep
        recorder.keep = lambda name, rows: keep(name, rows * (1 + 1e-3 * name.endswith("0.conv.u")))
        super().record(prompts, request, max_tokens, recorder)


def test_a_run_without_the_error_that_the_check_saw_accuses_nothing(model: Model) -> None:
    """Pinned: whatever the recorded run showed was named as the cause."""
    cause = located_from(model, "OtherFault", change=3)
    assert cause.finding is None
    assert "nothing is wrong" in cause.lines[1]
