"""The tutorial's engine: its bug is found, named and located, and nothing is found in the right one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dumps import DIRECTORIES, checkpoint
from engines import answered, checked_target

import lfm2np
from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.loaded import trained_fixture
from lfm2np.engine.loading import Model
from lfm2np.oracle.check import Checked, judged
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import greedy
from lfm2np.oracle.judging.verdict import Verdict
from lfm2np.oracle.locate.dump import parse_dump
from lfm2np.oracle.locate.locate import Report, locate
from lfm2np.oracle.recorders.registry import record_of

pytestmark = pytest.mark.rounding


def checked(model: Model, factory: str) -> Checked:
    target = PythonTarget(f"lfm2np.teaching.tutorial:{factory}", model.path)
    return checked_target(model, target, cases=("short-prompts",))


def located(model: Model, factory: str) -> tuple[Report, int]:
    """What `locate` says of a record of nine new tokens, and the length of the prompt."""
    config, tensors = checkpoint(trained_fixture())
    prompt = model.prompt_ids("copy: tivu zo sa")
    content = record_of(f"lfm2np.teaching.tutorial:{factory}", model.path, "float32")([prompt], 0, 9)
    return locate(tensors, config, parse_dump(content, "dump", config)), len(prompt)


def test_the_check_says_bug_and_that_decoding_is_wrong(model: Model) -> None:
    result = checked(model, "wrong")
    assert result.total.verdict is Verdict.BUG
    assert "wrong in decode, " in result.total.reasons[0]


def test_locate_names_the_state_that_the_second_step_of_one_token_found(model: Model) -> None:
    report, prompt = located(model, "wrong")
    first = report.findings[0]
    assert (first.name, first.layer, first.recomputed) == ("model.layers.0.conv.state", 0, ())
    assert first.channels == "2 tokens before: all 128 channels"
    assert first.steps == f"from step 2 on (1 row from position {prompt + 1} on), right in steps 0 to 1"
    assert {finding.name for finding in report.findings} == {
        f"model.layers.{layer}.conv.state" for layer in (0, 1, 3, 5)
    }


def test_the_right_engine_is_exact(model: Model) -> None:
    result = checked(model, "right")
    assert result.total.verdict is Verdict.EXACT
    assert 0.0 < result.total.rms < 2.0  # it does compute in float32


def test_nothing_is_located_in_the_right_engine(model: Model) -> None:
    report, _ = located(model, "right")
    assert report.is_conclusive and not report.findings


DENSE = [path for path in DIRECTORIES if load_config(path).model_type == "lfm2"]


@pytest.mark.parametrize("directory", DENSE, ids=lambda path: path.name)
def test_the_right_engine_is_lfm2_on_every_dense_fixture(directory: Path) -> None:
    exact = lfm2np.load(directory)
    ids = np.random.default_rng(0).integers(0, exact.config.vocab_size, 8).tolist()
    request = greedy("a", tuple(ids), 4, case="short-prompts", prompt_logprobs=0, tags={"length": len(ids)})
    target = PythonTarget("lfm2np.teaching.tutorial:right", directory)
    result = judged(exact, target.probe(), "float32", answered(target, [request]))
    assert result.total.verdict in (Verdict.EXACT, Verdict.TIE)
    assert len(result.positions) == 7 + 4 and all(position.error is not None for position in result.positions)
