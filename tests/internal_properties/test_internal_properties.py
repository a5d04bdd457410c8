"""Every property of this package's parts holds."""

import os

import pytest

from internal_properties.catalogue import INTERNAL
from lfm2np.conformance.adapters import own
from lfm2np.conformance.runner import run_property


@pytest.mark.slow
@pytest.mark.parametrize("prop", INTERNAL, ids=lambda prop: prop.id)
def test_it_holds(prop):
    result = run_property(prop, own, os.environ.get("LFM2NP_PROFILE", "quick"))
    assert (result.status, result.message) == ("passed", "")
    assert result.examples >= 1
