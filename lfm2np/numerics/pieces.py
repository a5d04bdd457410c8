"""Work cut into pieces, so that temporary arrays stay small; in exact arithmetic no choice here can change a bit."""

from __future__ import annotations

from collections.abc import Iterator

PIECE = 2**18  # elements: a float64 temporary of that size stays in the cache
SCORES = 2**19  # bytes of attention's, whose chain of operations is long
SMALL_PIECE = 2**15  # the same for a core's own, where many operations go over one temporary


def pieces(count: int, elements: int, limit: int | None = None) -> Iterator[slice]:
    """Slices of range(count) so that `elements` each stay within `limit` (PIECE) together."""
    step = max(1, (limit or PIECE) // max(1, elements))
    return (slice(start, min(count, start + step)) for start in range(0, count, step))
