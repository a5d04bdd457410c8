"""How long work tells how far it is: a callback of the caller's."""

from collections.abc import Callable

Progress = Callable[[int, int], None]  # units done, units in all
ProgressOf = Callable[[str, int, int], None]  # what is being done, then the same
