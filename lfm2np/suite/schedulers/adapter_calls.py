"""The calls of an adapter: each either succeeds, or ends in one line that names it."""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.protocol import load_factory, names_in, offers
from lfm2np.values import show
from scheduler.protocol import FEATURES, POLICIES, SIZES

Factory = Callable[[Mapping[str, Any]], Any]
SECONDS = 20  # a call that takes longer does not end
ENDLESS = "has not returned for"
NEEDED = {  # the method that a feature takes
    "abort": "abort",
    "abort-in-flight": "abort",
    "drafts": "propose",
    "fork": "fork",
    "free": "free_blocks",
    "preempt": "preempt",
    "verify": "verify",
}


class Violation(AssertionError):
    """A demand that is not met: its name, and what was seen."""

    def __init__(self, demand: str, message: str) -> None:
        super().__init__(f"{demand}: {message}")
        self.demand = demand
        self.is_endless = ENDLESS in message


class Unjudged(Exception):
    """The program met a demand that this run does not judge: nothing can be said of what follows."""


class Calls:
    """An adapter, made by its factory. RequestError for what is no scheduler."""

    def __init__(self, factory: Factory | str, sizes: dict[str, Any]) -> None:
        self.given = dict(sizes)
        make: Any = load_factory(factory, "scheduler") if isinstance(factory, str) else factory
        self.failed: Callable[[str, str], NoReturn] = raise_violation
        self.adapted = self._run("factory", make, dict(sizes))
        if not all(offers(self.adapted, name) for name in ("add", "step", "update")):
            raise RequestError(f"{type(self.adapted).__name__}: no scheduler, which has add, step and update")
        self.lacks = self._names("lacks", FEATURES)
        self.lacks |= {feature for feature, method in NEEDED.items() if not offers(self.adapted, method)}
        self.policies = self._names("policies", POLICIES)
        self.sizes: dict[str, Any] = {**sizes, **sizes_in(self._declared("sizes", {}))}

    def _declared(self, attribute: str, default: Any) -> Any:
        return self._run(attribute, lambda: getattr(self.adapted, attribute, default))

    def _names(self, attribute: str, known: Mapping[str, str]) -> frozenset[str]:
        expected = f"names among {', '.join(known)}"
        return names_in(attribute, self._declared(attribute, ()), known, expected)

    def has(self, method: str) -> bool:
        return offers(self.adapted, method)

    def call(self, method: str, *arguments: Any) -> Any:
        return self._run(method, getattr(self.adapted, method), *arguments)

    def refusable(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        """Whether it was accepted, and what it returned. A ValueError is a refusal."""

        def attempt(*arguments: Any) -> tuple[bool, Any]:
            try:
                return True, getattr(self.adapted, method)(*arguments)
            except ValueError:
                return False, None

        return self._run(method, attempt, *arguments)  # type: ignore[no-any-return]

    def _run(self, name: str, function: Any, *arguments: Any) -> Any:
        try:
            with watched(f"{name}()"):
                return function(*arguments)
        except (Violation, Unjudged):
            raise
        except (Exception, SystemExit, Endless) as problem:
            self.failed("verify" if name == "verify" else "calls", raised(name, arguments, problem))


def raise_violation(demand: str, message: str) -> NoReturn:
    raise Violation(demand, message)


def raised(name: str, arguments: tuple[Any, ...], problem: BaseException) -> str:
    """One line: the call, what it raised, and where."""
    given = ", ".join(map(repr, arguments))
    given = given if len(given) < 200 else f"{given[:197]}..."
    frames = traceback.extract_tb(problem.__traceback__)
    inside = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    where = f" ({Path(inside[-1].filename).name}, line {inside[-1].lineno})" if inside else ""
    return f"{name}({given}) raised {type(problem).__name__}: {' '.join(str(problem).split())}{where}"


def sizes_in(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise RequestError(f"sizes {show(given)}: expected a mapping")
    for name, value in given.items():
        if name not in SIZES:
            raise RequestError(f"sizes {show(name)}: expected names among {', '.join(SIZES)}")
        if name in ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens") and not is_size(value):
            raise RequestError(f"sizes {name!r}: {show(value)}, expected an integer of at least 1")
    return dict(given)


def is_size(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and value >= 1


class Endless(BaseException):
    """A call that does not end; no Exception, as an engine may catch those, and say something else or go on."""


@contextlib.contextmanager
def watched(name: str) -> Iterator[None]:
    """Endless, if the call takes more than SECONDS; without a watch where there is no alarm, or not in this thread."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise Endless(f"{name} {ENDLESS} {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
