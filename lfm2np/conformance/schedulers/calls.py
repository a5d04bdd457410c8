"""The calls of an adapter: each either succeeds, or ends in one line that names it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from lfm2np.conformance.schedulers.managed import as_scheduler
from lfm2np.engine_protocol import load_factory
from lfm2np.errors import RequestError
from scheduler.protocol import FEATURES, POLICIES, SIZES

Factory = Callable[[Mapping[str, Any]], Any]
SECONDS = 60  # a call that takes longer does not end
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
    """A demand that is not met: its name, what was seen, and the place that was wrong, if it is one."""

    def __init__(self, demand: str, message: str, place: tuple[str, int] | None = None) -> None:
        super().__init__(f"{demand}: {message}")
        self.demand, self.place = demand, place


class Unjudged(Exception):
    """The program met a demand that this run does not judge: nothing can be said of what follows."""


class Calls:
    """An adapter, made by its factory; a block manager under a scheduler of the suite's own."""

    def __init__(self, factory: Factory | str, sizes: dict[str, Any]) -> None:
        self.given = dict(sizes)
        make: Any = load_factory(factory, "scheduler") if isinstance(factory, str) else factory
        self.failed: Callable[[str, str], NoReturn] = raise_violation
        adapted = self._run("factory", make, sizes)
        self.adapted = as_scheduler(adapted, sizes)
        self.lacks = names_in(self.adapted, "lacks", FEATURES)
        self.lacks |= {feature for feature, method in NEEDED.items() if not hasattr(self.adapted, method)}
        self.policies = names_in(self.adapted, "policies", POLICIES)
        own = dict(getattr(self.adapted, "sizes", {}))
        for name in own:
            if name not in SIZES:
                raise RequestError(f"sizes {name!r}: expected names among {', '.join(SIZES)}")
        self.sizes: dict[str, Any] = {**sizes, **own}

    def has(self, method: str) -> bool:
        return hasattr(self.adapted, method)

    def call(self, method: str, *arguments: Any) -> Any:
        return self._run(method, getattr(self.adapted, method), *arguments)

    def refusable(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        """Whether it was accepted, and what it returned. A ValueError is a refusal."""
        try:
            with watched(f"{method}()"):
                return True, getattr(self.adapted, method)(*arguments)
        except ValueError:
            return False, None
        except Exception as problem:
            self.failed("calls", raised(method, arguments, problem))

    def _run(self, name: str, function: Any, *arguments: Any) -> Any:
        try:
            with watched(f"{name}()"):
                return function(*arguments)
        except (Violation, Unjudged):
            raise
        except Exception as problem:
            self.failed("verify" if name == "verify" else "calls", raised(name, arguments, problem))


def raise_violation(demand: str, message: str) -> NoReturn:
    raise Violation(demand, message)


def raised(name: str, arguments: tuple[Any, ...], problem: Exception) -> str:
    given = ", ".join(map(repr, arguments))
    return f"{name}({given if len(given) < 200 else given[:197] + '...'}) raised {type(problem).__name__}: {problem}"


def names_in(adapted: Any, attribute: str, known: Mapping[str, str]) -> frozenset[str]:
    names = frozenset(getattr(adapted, attribute, ()))
    for name in names - known.keys():
        raise RequestError(f"{attribute} {name!r}: expected names among {', '.join(known)}")
    return names


class Endless(Exception):
    """A call that does not end."""


@contextlib.contextmanager
def watched(name: str) -> Iterator[None]:
    """Endless, if the call takes more than SECONDS; without a watch where there is no alarm, or not in this thread."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise Endless(f"{name} has not returned for {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
