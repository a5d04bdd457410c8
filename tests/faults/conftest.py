"""A sample of the catalogue, always the same; all of it with --all-faults, or those of it that -k names."""

import random

import pytest

from faults import FAULTS, VARIANTS

SAMPLE = {"fault": 8, "variant": 1}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-faults", action="store_true", help="try all faults and variants, not a sample")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for kind, catalogue in (("fault", FAULTS), ("variant", VARIANTS)):
        if kind in metafunc.fixturenames:
            few = random.Random(78).sample(catalogue, SAMPLE[kind])
            chosen = catalogue if metafunc.config.getoption("--all-faults") else few
            metafunc.parametrize(kind, chosen, ids=[each.name for each in chosen])
