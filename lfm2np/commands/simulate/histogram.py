"""Distributions and courses of whole numbers, in memory that does not grow with their number; all sums are exact.

A value's bucket is its nine leading bits. A quantile is the upper end of its bucket, at most 1/256 too large, and never
more than the largest value; so a constant is itself, and what meets a target does. Integers only, so that adding
values one by one, or many at once, in any order, gives the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import mul, sub

import numpy as np
from numpy.typing import NDArray

BITS = 9  # of a value that its bucket keeps
MOST_BINS = 256  # of a course


def bucket_of(value: int) -> int:
    """The bucket of a value from 0 on: its leading bits behind the number of bits that are dropped."""
    dropped = max(0, value.bit_length() - BITS)
    return (dropped << BITS) | (value >> dropped)


def upper_end_of(bucket: int) -> int:
    """The largest value in it."""
    dropped, leading = bucket >> BITS, bucket & ((1 << BITS) - 1)
    return ((leading + 1) << dropped) - 1


@dataclass
class Histogram:
    """Of whole numbers from 0 on."""

    buckets: Counter[int] = field(default_factory=Counter)
    count: int = 0
    total: int = 0
    largest: int = 0

    def add(self, value: int, times: int = 1) -> None:
        self.buckets[bucket_of(value)] += times
        self.count += times
        self.total += value * times
        self.largest = max(self.largest, value)

    def add_many(self, values: NDArray[np.int64], times: int = 1) -> None:
        """Each of the values so many times; values [n] below 2**53."""
        if len(values) == 0:
            return
        _, exponents = np.frexp(values.astype(np.float64))
        dropped = np.maximum(0, exponents - BITS).astype(np.int64)
        buckets = (dropped << BITS) | (values >> dropped)
        first = int(buckets.min())
        for offset, number in enumerate(np.bincount(buckets - first).tolist()):
            if number:
                self.buckets[first + offset] += number * times
        self.count += len(values) * times
        self.total += int(values.sum()) * times
        self.largest = max(self.largest, int(values.max()))

    def merge(self, other: Histogram) -> None:
        self.buckets.update(other.buckets)
        self.count += other.count
        self.total += other.total
        self.largest = max(self.largest, other.largest)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The value that this share does not exceed; None of no values."""
        return self.quantiles((share,))[0]

    def quantiles(self, shares: Iterable[float]) -> list[float | None]:
        if not self.count:
            return [None for _ in shares]
        keys = sorted(self.buckets, key=upper_end_of)
        upto = np.cumsum([self.buckets[key] for key in keys])
        places = [min(len(keys) - 1, int(np.searchsorted(upto, share * self.count))) for share in shares]
        return [float(min(upper_end_of(keys[place]), self.largest)) for place in places]


@dataclass
class Course:
    """Sums over time, in at most MOST_BINS bins from time 0 on, of a width (in nanoseconds) that doubles as needed.

    `over(begin, end, value)` adds the value times each bin's share of the time, in nanoseconds; `at(time, amount)` adds
    the amount to the bin of that time.
    """

    width: int = 1 << 20  # about a millisecond
    bins: list[int] = field(default_factory=list)

    def over(self, begin: int, end: int, value: int) -> None:
        if begin >= end or not value:
            return
        self._reach(end - 1)
        first, last = begin // self.width, (end - 1) // self.width
        for index in range(first, last + 1):
            overlap = min(end, (index + 1) * self.width) - max(begin, index * self.width)
            self.bins[index] += value * overlap

    def over_pieces(self, borders: Sequence[int], values: Sequence[int]) -> None:
        """`over` for each value, from one border to the next."""
        self._reach(borders[-1] - 1)
        index = borders[0] // self.width
        if index == (borders[-1] - 1) // self.width:
            self.bins[index] += sum(map(mul, values, map(sub, borders[1:], borders)))
            return
        for begin, end, value in zip(borders, borders[1:], values, strict=False):
            self.over(begin, end, value)

    def at(self, time: int, amount: int) -> None:
        self._reach(time)
        self.bins[time // self.width] += amount

    def at_many(self, times: NDArray[np.int64], amount: int) -> None:
        """The same amount at each of the times, which are in order."""
        self._reach(int(times[-1]))
        places = times // self.width
        first = int(places[0])
        for offset, number in enumerate(np.bincount(places - first).tolist()):
            self.bins[first + offset] += number * amount

    def _reach(self, time: int) -> None:
        while time // self.width >= MOST_BINS:
            self.width *= 2
            self.bins = list(map(sum, zip_longest(self.bins[::2], self.bins[1::2], fillvalue=0)))
        missing = time // self.width + 1 - len(self.bins)
        if missing > 0:
            self.bins.extend([0] * missing)
