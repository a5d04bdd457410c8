"""One test a property: passed, failed with the first difference and a script, or skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lfm2np.errors import Lfm2npError, RequestError
from lfm2np.oracle.engines.protocol import Factory, load_factory
from lfm2np.suite import runner
from lfm2np.suite.catalogue import ALL
from lfm2np.suite.plugin import cases, chosen_profile, given_sizes, option, summarise
from lfm2np.suite.properties.property import Property
from lfm2np.suite.properties.rounding import Rounding


class Judged:
    """The engine, and on what it is judged."""

    def __init__(self, config: pytest.Config) -> None:
        """A factory, a format or a size that is none ends the run."""
        name, number_format = (option(config, name) for name in ("engine", "number-format"))
        try:
            self.factory: Factory = load_factory(name or "lfm2np.suite.adapters:own")
            if number_format is not None:
                self.factory = Rounding(self.factory, number_format)
            self.sizes, self.spent = given_sizes(config), 0.0
        except (Lfm2npError, pytest.UsageError) as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)

    def summary(self) -> Iterator[str]:
        yield from (runner.totals(), runner.met(self.factory))


@pytest.fixture(scope="session")
def judged(request: pytest.FixtureRequest) -> Judged:
    engine = Judged(request.config)
    summarise(request.config, engine.summary)
    return engine


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("property_", cases({prop.id: prop for prop in ALL}, metafunc.config))


def test_property(property_: Property, judged: Judged, request: pytest.FixtureRequest) -> None:
    name = chosen_profile(request.config)
    try:
        result = runner.run_property(property_, judged.factory, name, sizes=judged.sizes, spent=judged.spent)
    except RequestError as error:
        pytest.fail(str(error), pytrace=False)
    if result.status == "skipped":
        pytest.skip(result.message)
    if result.status == "failed":
        judged.spent += result.seconds
        tried = f"after {result.examples} examples: {result.message}"
        pytest.fail(f"{property_.id}: {property_.sentence}\n{tried}", pytrace=False)
