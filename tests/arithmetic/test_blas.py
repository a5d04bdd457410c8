"""Which library multiplies in this process, by what the system says is mapped."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blas as told_by_tests
import pytest

from lfm2np.arithmetic.products import blas

MAPS = b"""7f00-7f01 r-xp 00000000 08:01 11 /opt/scipy.libs/libscipy_openblas-1.so
7f01-7f02 r--p 00000000 08:01 12 /home/\xff\xfe/weights.safetensors
7f02-7f03 rw-p 00000000 00:00 0
7f03-7f04 r-xp 00000000 08:01 13 /opt/the numpy.libs/libscipy_openblas64_-2.so
"""


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    blas.blas_kernel.cache_clear()
    yield
    blas.blas_kernel.cache_clear()


def test_it_is_what_the_library_says() -> None:
    assert blas.blas_kernel() == told_by_tests.here().kernel


def test_numpys_library_goes_before_another_whatever_else_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path may hold blanks, and bytes that are no text."""
    asked: list[str] = []

    def refuse(path: str) -> Any:
        asked.append(path)
        return object()

    monkeypatch.setattr(Path, "read_bytes", lambda _: MAPS)
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert blas.blas_kernel() is None
    assert asked == [
        "/opt/the numpy.libs/libscipy_openblas64_-2.so",
        "/opt/scipy.libs/libscipy_openblas-1.so",
    ]


def test_where_nothing_is_told_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> bytes:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_bytes", fail)
    assert blas.blas_kernel() is None
