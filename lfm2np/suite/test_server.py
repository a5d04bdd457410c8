"""One test a relation of a server with itself: held, broken with where, or skipped with the reason. See --server."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest

from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.errors import Lfm2npError
from lfm2np.suite.itself.asked import Asking
from lfm2np.suite.itself.invariance_report import score_words, what_of
from lfm2np.suite.itself.relations import ALONE, RELATIONS, Relation
from lfm2np.suite.itself.rounding_spread import Outcome
from lfm2np.suite.itself.target_engine import Options, asking_of
from lfm2np.suite.plugin import cases, given_sizes, option, summarise


@pytest.fixture(scope="session")
def asking(request: pytest.FixtureRequest) -> Iterator[Asking]:
    """The server with its spread measured. A server that is not there, or can't be compared, ends the run."""
    config = request.config
    try:
        with asking_of(option(config, "server") or "", options_of(config)) as asking:
            budget = number(config, "budget")
            asking.until = math.inf if budget is None else time.monotonic() + 60 * budget
            asking.is_bitwise = option(config, "bitwise") is not None
            asking.begin()
            summarise(config, lambda: summary(asking))
            yield asking
    except pytest.UsageError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    except Lfm2npError as error:
        pytest.exit(f"--server {option(config, 'server')}: {error}", returncode=error.exit_code)


def summary(asking: Asking) -> list[str]:
    kind = "measured" if asking.spread.is_measured else "of the format"
    first = f"{asking.requests} requests, {asking.tokens} tokens; spread {asking.spread.nats:.2g} ({kind})"
    return [first, *(f"WARNING: not answered: {line}" for line in dict.fromkeys(asking.unanswered))]


def options_of(config: pytest.Config) -> Options:
    vocab = number(config, "vocab-size")
    return Options(
        checkpoint_path(None),
        given_sizes(config),
        None if vocab is None else int(vocab),
        format_name=option(config, "number-format") or "float32",
    )


def number(config: pytest.Config, name: str) -> float | None:
    """UsageError for an option that is no positive number."""
    text = option(config, name)
    try:
        value = None if text is None else float(text)
    except ValueError:
        value = math.nan
    if value is not None and not 0 < value < 1e9:
        raise pytest.UsageError(f"--{name} {text!r}: expected a number above 0")
    return value


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "relation" in metafunc.fixturenames:
        metafunc.parametrize("relation", cases({each.name: each for each in RELATIONS}, metafunc.config))


def test_alone(asking: Asking) -> None:
    if asking.refuted is not None:
        pytest.fail(f"{ALONE.sentence}\n{asking.refuted.what}", pytrace=False)


def test_relation(relation: Relation, asking: Asking) -> None:
    held = asking.ask(relation)
    if held.outcome in (Outcome.NOT_ASKED, Outcome.UNKNOWN):
        pytest.skip(held.why or "the server reports nothing that could be compared")
    if held.outcome is Outcome.BROKEN:
        pytest.fail(f"{relation.sentence}\n{relation.name}: {what_of(held)}\n{score_words(held)}", pytrace=False)
