"""`lfm2np.check(...)`: the command as a function that returns plain data."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lfm2np.engine.loading import Model, load
from lfm2np.engine.work.place import AnyPlace
from lfm2np.errors import RequestError
from lfm2np.oracle.check import check as checked
from lfm2np.oracle.check_report import report_of
from lfm2np.oracle.engines.named import target_named
from lfm2np.oracle.engines.protocol import Factory
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.judging.formats import KV, format_named
from lfm2np.oracle.report.as_json import as_json
from lfm2np.oracle.workloads import CASES
from lfm2np.values import require_count, show


def check(
    engine: str | Factory,
    model: Model | str | Path | None = None,
    *,
    format: str = "float32",
    max_num_seqs: int | None = None,
    seed: int = 0,
    cases: Sequence[str] | None = None,
    name: str | None = None,
    timeout: float = 60.0,
    place: AnyPlace = None,
) -> dict[str, Any]:
    """Whether an engine is right: what `lfm2np check --json` prints; "verdict" and "findings" say it in short.

    engine   a factory (engines/protocol.py), or a TARGET of the command: a URL, "package.module:factory", "exec:..."
    model    loaded under `exact`, or a checkpoint's path; None: the trained fixture
    format   the engine's number format, also with that of its cache, as in "bfloat16 kv:float8"
    name     of the model, for a server that serves several
    place    as lfm2np.score_many's executor; all else as the command's options
    errors   RequestError for what can't be, TargetError if the engine can't be run, those of `load`
    """
    format_named(format)
    if cases is not None and (isinstance(cases, str) or not set(cases) <= set(CASES)):
        raise RequestError(f"cases {show(cases)}: expected a list of some of {', '.join(CASES)}")
    most = None if max_num_seqs is None else require_count("max_num_seqs", max_num_seqs, 1, None)
    first = require_count("seed", seed, 0, None)
    oracle = exact_model(model)
    target = (
        PythonTarget(engine, oracle.path, None, most)
        if callable(engine)
        else target_named(
            engine,
            oracle.path,
            oracle.config.vocab_size,
            oracle.tokenizer_or_none,
            format.partition(KV)[0],
            name,
            most,
            timeout,
        )
    )
    with contextlib.closing(target):
        result = checked(oracle, target, format, most, first, cases, executor=place)
        return as_json(report_of(result, engine if isinstance(engine, str) else ""))


def exact_model(model: Model | str | Path | None) -> Model:
    """The model to judge by, loaded if it is not; RequestError for one of another arithmetic."""
    oracle = model if isinstance(model, Model) else load(model, "exact")
    if oracle.numerics.name != "exact":
        raise RequestError(f"model {oracle!r}: expected one that is loaded under 'exact'")
    return oracle
