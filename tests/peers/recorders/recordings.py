"""What `locate` says of a recorded request."""

from __future__ import annotations

from pathlib import Path

from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.oracle.locate.dump import parse_dump
from lfm2np.oracle.locate.locate import Report, locate
from lfm2np.oracle.locate.operations import operations
from lfm2np.oracle.recorders.recorder import Recorder

FIXTURES = Path(__file__).parents[3] / "fixtures"
TRAINED = FIXTURES / "trained"
PROMPTS = [[1, 17, 42, 66, 30, 8, 21], [5, 6], [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [3]]


def report_of(recorder: Recorder, model: Path = TRAINED) -> Report:
    config = load_config(model)
    return locate(open_checkpoint(model, config), config, parse_dump(recorder.content(), "dump", config))


def first_wrong(recorder: Recorder, model: Path = TRAINED) -> str:
    return report_of(recorder, model).findings[0].name


def require_right(report: Report, largest: float = 0.7) -> None:
    """Nothing is wrong, and no error is near its bound."""
    assert report.findings == ()
    assert max(check.error for check in report.checks) < largest


def left_out(report: Report, model: Path = TRAINED) -> set[str]:
    """Operations that were not recorded."""
    names = {operation.name for operation in operations(load_config(model))}
    return names - {check.name for check in report.checks}
