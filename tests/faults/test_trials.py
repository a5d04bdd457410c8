"""The suite catches faults and flags no variant: each in a process of its own, so that -n N tries N at once.

pytest tests/faults                                   a sample
pytest tests/faults --all-faults -n auto              the whole catalogue
pytest tests/faults --all-faults -k slot-freed-twice
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import lfm2np
from faults import FAULTS, VARIANTS, Fault, Variant, trial
from lfm2np.suite.runner import Result

pytestmark = pytest.mark.slow


def tried(change: Fault, profile: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """What faults/trial.py says of it. AssertionError if it says nothing."""
    command = [sys.executable, "-m", "faults.trial", change.name, profile]
    variables, tests = {**os.environ, **environment}, Path(__file__).parents[1]
    ended = subprocess.run(command, cwd=tests, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{change.name}: no verdict: {ended.stderr}"
    row: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return row


@pytest.mark.night
def test_a_fault_is_caught(fault: Fault) -> None:
    row = tried(fault, "ci", {"OPENBLAS_NUM_THREADS": "1"})
    assert row["caught"], f"{fault.name} survives. {row['by']}"
    print(f"{fault.name}: by {row['by']} after {row['examples']} examples of {row['profile']}")


@pytest.mark.night
def test_a_variant_is_not_flagged(variant: Variant) -> None:
    row = tried(variant, "quick", variant.environment)
    assert not row["caught"], f"{variant.name} is flagged by {row['by']}: {row['message']}"


# --- the trial itself


def test_a_process_without_a_verdict_is_never_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for change in (FAULTS[0], VARIANTS[0]):
        with pytest.raises(AssertionError, match=f"{change.name}: no verdict"):
            tried(change, "quick", {})


def results(*statuses: str) -> Any:
    """A property's results, one run after another."""
    left = iter(statuses)
    return lambda prop, *_, **__: Result(prop.id, next(left), examples=1)


@pytest.mark.parametrize(
    ("statuses", "caught", "by"),
    [
        (("failed", "failed"), False, "scheduler-machine, which fails without it, too"),
        (("failed", "passed"), True, "scheduler-machine"),
        (("passed", "passed"), False, ""),
    ],
)
def test_a_property_catches_a_fault_that_holds_without_it(monkeypatch, statuses, caught, by) -> None:
    monkeypatch.setattr(trial, "run_property", results(*statuses))
    row = trial.try_fault(FAULTS[0], trial.EVERYTHING[:1], "ci")
    assert (row["caught"], row["by"]) == (caught, by)


@pytest.mark.parametrize("status", ["failed", "passed"])
def test_a_variant_that_fails_a_property_is_flagged(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    monkeypatch.setattr(trial, "run_property", results(status))
    assert trial.try_variant(VARIANTS[0], trial.EVERYTHING[:1], "quick")["caught"] == (status == "failed")


def test_nothing_computed_under_a_fault_is_left_when_its_catch_is_tried_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault of the reference would fail the property once more: by the logits that were kept."""
    sizes: list[int] = []

    def fills(prop: Any, *_: Any, **__: Any) -> Result:
        sizes.append(sum(cached.cache_info().currsize for cached in trial.COMPUTED))
        trial.load_once(lfm2np.trained_fixture())
        return Result(prop.id, "failed" if len(sizes) == 1 else "passed", examples=1)

    monkeypatch.setattr(trial, "run_property", fills)
    assert trial.try_fault(FAULTS[0], trial.EVERYTHING[:1])["caught"]
    assert sizes == [0, 0]
