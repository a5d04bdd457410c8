"""Every property of this package's parts holds."""

import os

import pytest
from faults import inject

from internal_properties.catalogue import INTERNAL
from lfm2np.suite.adapters import own
from lfm2np.suite.runner import run_property

LONGEST = "large-schedules"  # half of the time of all of them
BY_ID = {prop.id: prop for prop in INTERNAL}


@pytest.mark.parametrize(
    "prop",
    [pytest.param(prop, id=prop.id, marks=pytest.mark.slow if prop.id == LONGEST else ()) for prop in INTERNAL],
)
def test_it_holds(prop):
    result = run_property(prop, own, os.environ.get("LFM2NP_PROFILE", "quick"))
    assert (result.status, result.message) == ("passed", "")
    assert result.examples >= 1


@pytest.mark.slow
def test_a_fault_in_later_pieces_of_attention_is_found():
    with inject("later-piece-of-queries-misses-its-own-position"):
        result = run_property(BY_ID["attention-in-pieces"], own, "quick", shrink=False)
    assert result.status == "failed"
