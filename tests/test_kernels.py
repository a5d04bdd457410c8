"""What tests/kernels.py rests on: marks that can't be forgotten, and rows that say what the library said."""

import os
import subprocess
import sys
from pathlib import Path

import blas
import pytest
from environments import requirements
from kernels import QUICK, Asked, Row, kernel_of, not_as_asked

TESTS = """
import lfm2np, pytest

@pytest.fixture(scope="module")
def logits():
    return lfm2np.load(numerics="float32").logits([1, 2])

def test_from_a_fixture(logits): pass

def test_without_a_mark(): lfm2np.load(numerics="bfloat16").logits([1])

@pytest.mark.rounding
def test_with_one(): lfm2np.load(numerics="float64").logits([1])

def test_exact(): lfm2np.load().logits([1])
"""
MACHINE = blas.Machine("OpenBLAS", "Haswell", 2, "AVX2 FMA3", "2.4.6", "3.11.7")


@pytest.mark.slow
def test_a_test_that_rounds_without_the_mark_fails(tmp_path: Path):
    (tmp_path / "test_some.py").write_text(TESTS)
    top = Path(__file__).parent.parent
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conftest", "-c", "pyproject.toml", str(tmp_path)]
    paths = os.pathsep.join([str(top / "tests"), str(top), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *words],
        cwd=top,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    for name, what in (("from_a_fixture", "rms_norm in float32"), ("without_a_mark", "rms_norm in bfloat16")):
        assert f"FAILED test_some.py::test_{name}" in done.stdout
        assert f"{what}: expected @pytest.mark.rounding, as its bits are the machine's" in done.stdout


@pytest.mark.parametrize("kernel", ["Haswell", "Sandybridge", "Nehalem"])
def test_the_kernel_taken_is_what_the_library_says(kernel: str):
    if not blas.can_run(kernel):
        pytest.skip(f"{kernel}: this CPU or this BLAS ({blas.here().blas}) does not have it")
    assert kernel_of(Asked(kernel)) == kernel


def test_what_a_process_computes_with_is_one_line_and_back():
    none = blas.Machine("libblas.so.3", None, None, "", "2.2.4", "3.13.5")
    for one in (MACHINE, none, blas.here()):
        assert blas.machine_of(one.line()) == one


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (Asked(), ""),
        (Asked("Haswell", 2), ""),
        (Asked(threads=1), "asked for 1 threads, got 2"),
        (Asked(features="none"), "asked for no vector code, got AVX2 FMA3"),
        (Asked(python="netlib"), "asked for netlib's BLAS, got OpenBLAS"),
    ],
)
def test_a_row_that_is_not_what_was_asked_for_says_so(asked: Asked, problem: str):
    assert not_as_asked(Row(asked, MACHINE)) == problem


def test_the_oldest_versions_are_those_that_the_package_allows():
    assert {"numpy==2.0", "pytest==8"} <= set(requirements(oldest=True))
    assert not any(">" in one for one in requirements(oldest=True))


def test_the_files_of_a_quick_run_are_there():
    assert [path for path in QUICK if not (Path(__file__).parent.parent / path).exists()] == []
