"""The checks of the process itself, each made to fail: by setting the processor's own control register."""

import platform
import subprocess
import sys

import numpy as np
import pytest

from lfm2np.errors import NumericsError
from lfm2np.numerics import machine

# push the new value; ldmxcsr [rsp]; pop rax; ret
SET_MXCSR = """
import ctypes, mmap
def set_mxcsr(value):
    code = b"\\x68" + value.to_bytes(4, "little") + b"\\x0f\\xae\\x14\\x24\\x58\\xc3"
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
"""
DEFAULT, FLUSH, TO_ZERO = 0x1F80, 0x9FC0, 0x7F80

x86_linux = pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="sets the control register of an x86 under Linux"
)


def after_setting(mxcsr: int, then: str) -> str:
    """What a process prints that sets its control register, then runs a line."""
    lines = ["import lfm2np", "from lfm2np.numerics.machine import *", SET_MXCSR]
    script = "\n".join([*lines, f"set_mxcsr({mxcsr})", then, "print('fine')"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@x86_linux
@pytest.mark.parametrize(
    ("mxcsr", "expected"),
    [(DEFAULT, "fine"), (FLUSH, "flushes subnormal numbers"), (TO_ZERO, "does not round float64")],
)
def test_a_processor_set_to_another_arithmetic_is_refused(mxcsr: int, expected: str):
    assert expected in after_setting(mxcsr, "require_ieee()")


@x86_linux
def test_it_is_refused_even_if_set_after_loading():
    then = f"set_mxcsr({DEFAULT}); m = lfm2np.load(); set_mxcsr({FLUSH}); m.logits([1])"
    assert "flushes subnormal numbers" in after_setting(DEFAULT, then)


def test_a_matrix_product_that_is_off_by_one_is_refused(monkeypatch: pytest.MonkeyPatch):
    outer = np.outer
    machine.require_exact_product()
    monkeypatch.setattr(machine.np, "outer", lambda a, b: outer(a, b) + (a[:, None] == a[7]))
    with pytest.raises(NumericsError, match="not exact on integers below 2"):
        machine.require_exact_product()


def test_the_product_of_the_check_comes_close_to_the_bound():
    size = 512
    x = (np.arange(size * size, dtype=np.int64).reshape(size, size) * 48271) % 2**22 - 2**21
    column = (np.arange(size, dtype=np.int64) * 69621) % 2**22 - 2**21
    assert 2**51 < int((np.abs(x) @ np.abs(column)).max()) * 4 <= 2**53
