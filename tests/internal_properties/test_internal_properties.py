"""Every property of this package's parts holds."""

import os

import pytest

from internal_properties.catalogue import INTERNAL
from lfm2np.suite.adapters import own
from lfm2np.suite.runner import run_property

LONGEST = "large-schedules"  # half of the time of all of them


@pytest.mark.parametrize(
    "prop",
    [pytest.param(prop, id=prop.id, marks=pytest.mark.night if prop.id == LONGEST else ()) for prop in INTERNAL],
)
def test_it_holds(prop):
    result = run_property(prop, own, os.environ.get("LFM2NP_PROFILE", "quick"))
    assert (result.status, result.message) == ("passed", "")
    assert result.examples >= 1
