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
from lfm2np.oracle.rollouts.reported_side import SIDES
from lfm2np.oracle.rollouts.rollout import Rollout, read_rollouts
from lfm2np.oracle.rollouts.rollouts import AUTO, Judged, Options, Shown, judge_rollouts, no_progress
from lfm2np.oracle.rollouts.rollouts_report import report_of


def rollouts(
    file: str | Path,
    model: LoadedModel | str | Path | None = None,
    *,
    form: str = AUTO,
    defaults: Mapping[str, Any] | None = None,
    formats: Mapping[str, str] | None = None,
    readings: Mapping[str, str] | None = None,
    previous: LoadedModel | None = None,
    sample: int | None = None,
    seed: int = 0,
    place: AnyPlace = None,
) -> dict[str, Any]:
    """Who errs: what `lfm2np rollouts --json` prints; "verdict" and "findings" say it, "figures" has the numbers.

    file      see lfm2np/oracle/schemas/rollouts.schema.json
    model     loaded under `exact`, or a checkpoint's path; None: the trained fixture
    form      auto, native, or a name of converters.CONVERTERS
    defaults  fields that lines lack, such as temperature
    formats   {"sampler": ..., "trainer": ...} number formats; auto where one is missing
    readings  what each side reports: raw, processed, ...; auto where one is missing
    previous  the checkpoint of the step before, for stale weights
    sample    so many sequences, drawn with the seed; None: all
    place     as lfm2np.score_many's executor

    RequestError where no line can be used.
    """
    loaded = model if isinstance(model, LoadedModel) else load(model, "exact")
    with Path(file).open(encoding="utf-8", errors="strict") as lines:
        usable, left = read_rollouts(lines, str(file), loaded.config, form, defaults)
    options = Options(
        dict.fromkeys(SIDES, AUTO) | dict(formats or {}), dict.fromkeys(SIDES, AUTO) | dict(readings or {}), seed=seed
    )
    judged, sampled_of = judge_some(loaded, usable, options, sample, place, previous=previous)
    return as_json(report_of(judged, loaded.sha256, left, sampled_of))


def judge_some(
    model: LoadedModel,
    usable: list[Rollout],
    options: Options,
    sample: int | None,
    place: AnyPlace = None,
    shown: Shown = no_progress,
    previous: LoadedModel | None = None,
) -> tuple[Judged, int | None]:
    """All of them, or a sample drawn with the seed, in the file's order; and how many they were sampled of."""
    chosen = usable
    if sample is not None and sample < len(usable):
        indices = np.random.default_rng(options.seed).permutation(len(usable))[:sample]
        chosen = [usable[index] for index in sorted(indices.tolist())]
    judged = judge_rollouts(model, chosen, options, place_of(place), shown, previous, usable)
    return judged, len(usable) if len(chosen) < len(usable) else None
