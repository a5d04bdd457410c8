"""A link read without a model: the run that it says, or all that is wrong of it."""

from __future__ import annotations

from collections.abc import Sequence

from lfm2np.teaching.lab.settings import Problems, Settings, examine


def read_settings(query: Sequence[tuple[str, str]]) -> Settings:
    settings, problems = examine(query)
    if problems:
        raise Problems(problems)
    return settings
