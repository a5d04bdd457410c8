"""What `mutants.py --integers` runs for each mutant of the fast arithmetic: its comparison with integers alone.

The examples of tests/truth/test_integers.py are drawn once, and replayed without pytest and Hypothesis.
"""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.util
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import Phase, settings

TOP = Path(__file__).resolve().parent.parent
EXACT = [
    f"lfm2np/arithmetic/{name}.py"
    for name in (
        "exact",
        "exact_attention",
        "grids",
        "attention",
        "pieces",
        "convolution_windows",
        "weight_grids",
        "matrix",
        "routing",
        "products/product",
    )
]
COMPARISON = TOP / "tests" / "truth" / "test_integers.py"
COMPARED = {  # by where the mutant is, words in the names of the tests that run it; else all
    **dict.fromkeys(("attention", "exact_attention"), ("attention",)),
    "convolution_windows": ("convolution",),
    "routing": ("routes", "rows"),
    **dict.fromkeys(("matrix", "weight_grids", "product"), ("products", "weights", "refused")),
}
EXAMPLES = 60  # of each test
COMPARED_SECONDS, WHOLE_SECONDS = 15, 120  # of processor time: drawn examples, then whole models; they take 3, 30
IDLE, IDLE_SECONDS = 99, 15  # the exit code of a process that takes no processor time for so long
MEMORY = 4 << 30


class Replacing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from another source than its file's."""

    def __init__(self, file: str, source: str) -> None:
        self.name, self.path, self.source = file.removesuffix(".py").replace("/", "."), TOP / file, source

    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return None

    def exec_module(self, module) -> None:  # type: ignore[no-untyped-def]
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)


Drawn = Sequence[tuple[str, dict[str, Any]]]  # names of tests, each with the arguments of one example


def equals_integers(file: str, source: str, drawn: Drawn, whole_models: bool) -> bool:
    """In a forked process: whether the fast arithmetic still equals integers, and no thread waits for ever.

    The drawn examples are tried without pytest and Hypothesis, which take longer than all of them.
    """
    sys.meta_path.insert(0, Replacing(file, source))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.setitimer(signal.ITIMER_PROF, COMPARED_SECONDS)
    end_when_idle()
    compared = loaded_anew("lfm2np.arithmetic")
    words = COMPARED.get(Path(file).stem, ("",))
    with pytest.MonkeyPatch.context() as patch:
        compared.make_small(patch, is_drawn=True)
        for name, arguments in drawn:
            if any(word in name for word in words):
                test = getattr(compared, name)
                getattr(getattr(test, "hypothesis", None), "inner_test", test)(**arguments)
    if not whole_models:
        return True
    signal.setitimer(signal.ITIMER_PROF, WHOLE_SECONDS)
    loaded_anew("lfm2np")
    undrawn = " and ".join(f"not {name}" for name in {name for name, _ in drawn})
    options = ("-x", "-q", "--noconftest", "--assert=plain", "-p", "no:cacheprovider", "-k", undrawn)
    return pytest.main([*options, str(COMPARISON)]) == 0


def loaded_anew(package: str) -> ModuleType:
    """The comparison, with this package as the mutant has it; what else the parent process has loaded stays."""
    for name in [*sys.modules]:
        if name in (package, "test_integers", "operands") or name.startswith(f"{package}."):
            del sys.modules[name]
    return importlib.import_module("test_integers")


def draw_examples(send: Connection) -> None:
    """In a forked process: the examples that Hypothesis draws for each test of the comparison, by sending them."""
    drawn: list[tuple[str, dict[str, Any]]] = []

    def noting(name: str) -> Callable[..., None]:
        def note(**arguments: Any) -> None:
            drawn.append((name, arguments))

        return note

    for name, test in vars(importlib.import_module("test_integers")).items():
        if getattr(test, "is_hypothesis_test", False):
            test.hypothesis.inner_test = noting(name)
            for given in cases(test):
                test(**given)
        elif name.startswith("test_") and name.endswith("refused"):
            drawn.extend((name, given) for given in cases(test))
    drawn.sort(key=lambda mutant: ("products" in mutant[0], "attention" in mutant[0]))  # the quickest first
    send.send(drawn)


def cases(test: Callable[..., None]) -> list[dict[str, Any]]:
    """What pytest gives a test beside what Hypothesis draws: one parameter or none."""
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    return [{mark.args[0]: value} for mark in marks for value in mark.args[1]] or [{}]


def end_when_idle() -> None:
    """Ends this process once it waits for nothing: a deadlock takes no processor time."""
    spent = [time.process_time()]

    def look(*_: object) -> None:
        spent.append(time.process_time())
        if spent[-1] - spent[-2] < 0.01:
            os._exit(IDLE)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, IDLE_SECONDS, IDLE_SECONDS)


def prepare_comparison() -> Drawn:
    """Draws the examples, and compiles all modules, once for all mutants."""
    sys.path[:0] = [str(TOP), str(COMPARISON.parent)]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode, sys.pycache_prefix = False, tempfile.mkdtemp()
    settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, max_examples=EXAMPLES, phases=[Phase.generate]
    )
    settings.load_profile("mutants")
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=draw_examples, args=(send,))
    process.start()
    send.close()
    drawn: Drawn = receive.recv()
    process.join()
    importlib.import_module("test_integers")
    gc.freeze()
    return drawn
