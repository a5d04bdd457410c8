"""One test a property: passed, failed with the first difference and a script, or skipped with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lfm2np.errors import RequestError
from lfm2np.oracle.engines.protocol import load_factory
from lfm2np.suite.plugin import ADVICE, TERMS, chosen_profile, option, terms_of
from lfm2np.suite.properties.property import Property
from lfm2np.suite.properties.rounding import Rounding
from lfm2np.suite.runner import run_property


def test_property(property_: Property, request: pytest.FixtureRequest) -> None:
    name = option(request.config, "engine") or "lfm2np.suite.adapters:own"
    try:
        factory = load_factory(name)
        number_format = option(request.config, "number-format")
        if number_format is not None:
            factory = Rounding(factory, number_format)
    except RequestError as error:
        raise pytest.UsageError(str(error)) from None
    terms = terms_of(request.config)
    try:
        result = run_property(property_, factory, chosen_profile(request.config), terms=terms)
    except RequestError as error:
        pytest.fail(str(error), pytrace=False)
    if result.status == "failed":
        lacks, spent = terms.lacks | result.undeclared, terms.spent + result.seconds
        request.config.stash[TERMS] = replace(terms, lacks=lacks, spent=spent)
    if result.undeclared:
        request.config.stash[ADVICE] = result.advice
    if result.status == "skipped":
        pytest.skip(result.message)
    if result.status == "failed":
        pytest.fail(
            f"{property_.id}: {property_.sentence}\nafter {result.examples} examples: {result.message}", pytrace=False
        )
