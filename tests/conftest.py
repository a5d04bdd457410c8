"""Puts tests/ on the path, so that every test can import `builders`, and sets Hypothesis up.

Profiles, by the variable HYPOTHESIS_PROFILE: `ci` (default) always draws the same examples, `deep` draws new ones,
forty times as many, `few` always the same five, for emulated machines. No profile has a deadline: this is no test of
speed.

What takes long is marked `slow` or `night`, and left out by a bare `pytest`; `pytest tests` or any other folder, file,
marker or -k has all of its tests.

A test that computes in float32, float64 or bfloat16 has to be marked `rounding`, so that tests/kernels.py finds it: it
fails here if it is not. (What a child process computes is not seen.)
"""

import functools
import gc
import os
import re
import shutil
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import blas
import pytest
from hypothesis import settings

from lfm2np.arithmetic.ieee import Ieee
from lfm2np.oracle.judging.emulate import Emulated

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("few", derandomize=True, deadline=None, max_examples=5)
settings.register_profile("deep", derandomize=False, deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

LEFT_OUT = re.compile(r"^pytestmark = .*mark\.(slow|night|peers|browser|docs|clients)\b", re.MULTILINE)
SUMS = ("linear", "rms_norm", "swiglu", "attend_ragged", "convolve_ragged", "log_softmax")
computed: list[str] = []  # since the current test's setup began: which arithmetic summed what


def observed(owner: type[Ieee], name: str) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def noted(self: Ieee, *arguments: Any, **named: Any) -> Any:
        if not computed:
            computed.append(f"{name} in {self.name}")
        return method(self, *arguments, **named)

    setattr(owner, name, noted)


for owner in (Ieee, Emulated):
    for name in SUMS:
        if name in vars(owner):
            observed(owner, name)


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist share the cores: one thread each for BLAS and PyTorch, unless another number is set.

    A shell's background jobs ignore SIGINT, and so would every process that a test starts and interrupts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def is_bare(config: pytest.Config) -> bool:
    """Whether `pytest` was asked for no folder, file, marker or -k."""
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.keyword
    return not named and config.option.markexpr in config.getini("addopts")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which all is left out are not even read: that takes as long as many tests."""
    if collection_path.suffix != ".py" or not is_bare(config):
        return None
    return True if LEFT_OUT.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not is_bare(config):
        return
    left_out = [item for item in items if any(map(item.get_closest_marker, ("slow", "night")))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish() -> None:
    """Thousands of collected tests are no garbage: the collector does not walk over them, and over all else seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(2000, 10, 100)


def pytest_report_header() -> str:
    return blas.here().line()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    computed.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield
    if computed and not any(map(item.get_closest_marker, ("rounding", "peers"))):
        pytest.fail(f"{computed[0]}: expected @pytest.mark.rounding, as its bits are the machine's", pytrace=False)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for the tests marked `browser`."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "no chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()
