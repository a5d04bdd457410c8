"""`lfm2np.rollouts`: the command as a function that returns plain data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.loading import load
from lfm2np.engine.work.place import AnyPlace, place_of
from lfm2np.oracle.report.as_json import as_json
from lfm2np.oracle.report.report import Report
from lfm2np.oracle.rollouts.exact import SIDES
from lfm2np.oracle.rollouts.judge import AUTO, Options, Shown, judge_rollouts, no_progress
from lfm2np.oracle.rollouts.reading import read_rollouts
from lfm2np.oracle.rollouts.report import report_of


def rollouts(
    file: str | Path,
    model: LoadedModel | str | Path | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    formats: Mapping[str, str] | None = None,
    previous: LoadedModel | None = None,
    sample: int | None = None,
    seed: int = 0,
    place: AnyPlace = None,
) -> dict[str, Any]:
    """Who errs: what `lfm2np rollouts --json` prints; "verdict" and "findings" say it, "figures" has the numbers.

    file      see lfm2np/oracle/schemas/rollouts.schema.json
    model     loaded under `exact`, or a checkpoint's path; None: the trained fixture
    defaults  fields that lines lack, such as temperature
    formats   {"sampler": ..., "trainer": ...} number formats; auto where one is missing
    previous  the checkpoint of the step before, for stale weights
    sample    so many sequences, drawn with the seed; None: all
    place     as lfm2np.score_many's executor

    RequestError where no line can be used, OSError and UnicodeDecodeError where the file can't be read.
    """
    options = Options(dict.fromkeys(SIDES, AUTO) | dict(formats or {}), seed=seed)
    loaded = model if isinstance(model, LoadedModel) else load(model, "exact")
    return as_json(judge_file(file, loaded, options, defaults, sample, place, previous=previous))


def judge_file(
    file: str | Path,
    model: LoadedModel,
    options: Options,
    defaults: Mapping[str, Any] | None = None,
    sample: int | None = None,
    place: AnyPlace = None,
    shown: Shown = no_progress,
    previous: LoadedModel | None = None,
) -> Report:
    """The report on all of a file's rollouts, or on a sample drawn with the seed, in the file's order."""
    with Path(file).open(encoding="utf-8") as lines:
        usable, left = read_rollouts(lines, str(file), model.config, defaults)
    chosen = usable
    if sample is not None and sample < len(usable):
        indices = np.random.default_rng(options.seed).permutation(len(usable))[:sample]
        chosen = [usable[index] for index in sorted(indices.tolist())]
    judged = judge_rollouts(model, chosen, options, place_of(place), shown, previous, usable)
    return report_of(judged, model.sha256, left, len(usable) if len(chosen) < len(usable) else None)
