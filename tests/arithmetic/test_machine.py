"""The checks of the process itself, each made to fail: by setting the processor's own control register."""

import functools
import platform
import subprocess
import sys

import numpy as np
import pytest

from lfm2np.arithmetic.products import exactness
from lfm2np.errors import NumericsError

pytestmark = pytest.mark.slow

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
    lines = ["import lfm2np", "import numpy as np", "from lfm2np.truth.processor import *", SET_MXCSR]
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


@x86_linux
def test_a_thread_that_was_started_while_subnormals_were_flushed_does_not_compute():
    """NumPy 2.4, two cores: 262,144 of 524,288 numbers were flushed, as each asked the caller's thread only."""
    then = f"""
import os, threading
from lfm2np.arithmetic import exact, pieces
pieces.THREADS = 2
ones = np.ones(2**19, np.float32)
def first():
    set_mxcsr({FLUSH})
    exact.multiply(ones, ones)
thread = threading.Thread(target=first); thread.start(); thread.join()
require_ieee()
for _ in range(200):
    products = exact.multiply(ones * np.float32(1e-40), ones)
    assert (products > 0).all(), "flushed"
"""
    assert "a thread of lfm2np: this thread flushes subnormal numbers" in after_setting(DEFAULT, then)


def test_every_way_of_multiplying_is_exact_here():
    exactness.require_exact_products.__wrapped__()


ONE_ROW, SEVERAL = (1, 64, 40), (5, 300, 24)


@pytest.mark.parametrize("shape", [ONE_ROW, SEVERAL], ids=str)
def test_the_sums_that_are_asked_for_come_close_to_the_bound_and_stay_within_it(shape: tuple[int, int, int]):
    x, weights = exactness.operands(*shape)
    sums = [[sum(int(a) * int(b) for a, b in zip(row, weight, strict=True)) for weight in weights] for row in x]
    assert all(2**53 - 2**47 <= total <= 2**53 for row in sums for total in row)
    assert x.min() >= 0 and weights.min() > 0, "so that no partial sum exceeds the whole"
    assert {total % 2 for row in sums for total in row} == {0, 1}


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    significand, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(significand, bits)), exponent - bits)


def one_by_one(x: np.ndarray, weights: np.ndarray, bits: int) -> np.ndarray:
    total = np.zeros((len(x), len(weights)))
    for index in range(x.shape[1]):
        total = rounded(total + np.outer(x[:, index], weights[:, index]), bits)
    return total


def in_lanes(x: np.ndarray, weights: np.ndarray, bits: int, lanes: int = 8) -> np.ndarray:
    """As vector code adds: each lane by itself, then the lanes."""
    sums = [one_by_one(x[:, lane::lanes], weights[:, lane::lanes], bits) for lane in range(lanes)]
    return functools.reduce(lambda total, lane: rounded(total + lane, bits), sums)


def in_blocks(x: np.ndarray, weights: np.ndarray, bits: int, size: int = 16) -> np.ndarray:
    """Only within blocks in so few bits."""
    starts = range(0, x.shape[1], size)
    return sum(one_by_one(x[:, start : start + size], weights[:, start : start + size], bits) for start in starts)


def in_pairs(x: np.ndarray, weights: np.ndarray, bits: int) -> np.ndarray:
    terms = x[:, None, :] * weights[None]
    while terms.shape[-1] > 1:
        terms = np.pad(terms, ((0, 0), (0, 0), (0, terms.shape[-1] % 2)))
        terms = rounded(terms[..., ::2] + terms[..., 1::2], bits)
    return terms[..., 0]


@pytest.mark.parametrize("shape", [ONE_ROW, SEVERAL], ids=str)
@pytest.mark.parametrize("order", [one_by_one, in_lanes, in_blocks, in_pairs])
def test_an_accumulator_of_fewer_bits_is_refused_in_whatever_order_it_adds(order, shape: tuple[int, int, int]):
    """The check before this one let all from 47 bits on pass: its signs cancelled."""
    passed = [bits for bits in range(40, 54) if exactness.is_exact(functools.partial(order, bits=bits), *shape)]
    assert passed == [53]


def strassen(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """One level of it, on a number of rows, inputs and outputs that is even."""
    half = x.shape[0] // 2, x.shape[1] // 2, len(weights) // 2
    (a, b), (c, d) = (np.split(part, [half[1]], 1) for part in np.split(x, [half[0]]))
    (e, f), (g, h) = (np.split(part, [half[2]], 1) for part in np.split(weights.T, [half[1]]))
    p1, p2, p3, p4 = a @ (f - h), (a + b) @ h, (c + d) @ e, d @ (g - e)
    p5, p6, p7 = (a + d) @ (e + h), (b - d) @ (g + h), (a - c) @ (e + f)
    return np.block([[p5 + p4 - p2 + p6, p1 + p2], [p3 + p4, p1 + p5 - p3 - p7]])


def test_a_fast_algorithm_is_refused():
    assert not exactness.is_exact(strassen, 6, 300, 24)


@pytest.mark.parametrize("name", [name for name, *_ in exactness.WAYS])
def test_each_way_is_asked_and_a_wrong_last_bit_of_it_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    def off_by_one(product: exactness.Product, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return product(x, weights) - 1.0

    ways = {other: (product, shapes) for other, product, shapes in exactness.WAYS}
    ways[name] = functools.partial(off_by_one, ways[name][0]), ways[name][1]
    monkeypatch.setattr(exactness, "WAYS", [(other, *way) for other, way in ways.items()])
    with pytest.raises(NumericsError, match=f"^{name}, .*not exact on integers below 2"):
        exactness.require_exact_products.__wrapped__()
