"""What tests/kernels.py rests on: rows that say what the library said."""

from pathlib import Path

import blas
import pytest
from kernels import QUICK, Asked, Row, kernel_of, not_as_asked

MACHINE = blas.Machine("OpenBLAS", "Haswell", 2, "AVX2 FMA3", "2.4.6", "3.11.7")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["Haswell", "Sandybridge", "Nehalem"])
def test_the_kernel_taken_is_what_the_library_says(kernel: str):
    if not blas.can_run(kernel):
        pytest.skip(f"{kernel}: this CPU or this BLAS ({blas.here().blas}) does not have it")
    assert kernel_of(Asked(kernel)) == kernel


def test_what_a_process_computes_with_is_one_line_and_back():
    none = blas.Machine("libblas.so.3", None, None, "", "2.2.4", "3.13.5")
    for machine in (MACHINE, none, blas.here()):
        assert blas.machine_of(machine.line()) == machine


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (Asked(), ""),
        (Asked("Haswell", 2), ""),
        (Asked(threads=1), "asked for 1 threads, got 2"),
        (Asked(features="none"), "asked for no vector code, got AVX2 FMA3"),
    ],
)
def test_a_row_that_is_not_what_was_asked_for_says_so(asked: Asked, problem: str):
    assert not_as_asked(Row(asked, MACHINE)) == problem


def test_the_files_of_a_quick_run_are_there():
    assert [path for path in QUICK if not (Path(__file__).parents[1] / path).exists()] == []
