"""All properties, in the order in which they are tried."""

from __future__ import annotations

from lfm2np.conformance.cache_demands import CACHE_DEMANDS
from lfm2np.conformance.corruptions import CORRUPTION
from lfm2np.conformance.demands import Machine, Property
from lfm2np.conformance.internals import INTERNALS
from lfm2np.conformance.large import LARGE
from lfm2np.conformance.memory_demands import MEMORY_DEMANDS
from lfm2np.conformance.misuse import MISUSE
from lfm2np.conformance.policy_demands import POLICY_DEMANDS
from lfm2np.conformance.properties import PROPERTIES
from lfm2np.conformance.scheduler_demands import SCHEDULER_DEMANDS
from lfm2np.conformance.wrong_calls import WRONG_CALLS
from lfm2np.errors import RequestError

ALL: tuple[Property | Machine, ...] = (
    *INTERNALS,
    *POLICY_DEMANDS,
    *SCHEDULER_DEMANDS,
    *PROPERTIES,
    *MISUSE,
    *WRONG_CALLS,
    *CORRUPTION,
    *LARGE,
    *CACHE_DEMANDS,
    *MEMORY_DEMANDS,
)


def by_id(name: str) -> Property | Machine:
    """RequestError for an id that no property has."""
    for one in ALL:
        if one.id == name:
            return one
    raise RequestError(f"property {name!r}: expected one of {', '.join(one.id for one in ALL)}")
