"""Callbacks that report progress."""

from collections.abc import Callable

Progress = Callable[[int, int], None]  # units done, units in all
ProgressOf = Callable[[str, int, int], None]  # what is being done, then the same
