"""All properties, in the order in which they are tried."""

from __future__ import annotations

from lfm2np.conformance.demands.corruptions import CORRUPTION
from lfm2np.conformance.demands.demands import Machine, Property
from lfm2np.conformance.demands.engine_demands import ENGINE_DEMANDS
from lfm2np.conformance.demands.internals import INTERNALS
from lfm2np.conformance.demands.large import CACHE_DEMANDS, LARGE
from lfm2np.conformance.demands.memory_demands import MEMORY_DEMANDS
from lfm2np.conformance.demands.misuse import MISUSE
from lfm2np.conformance.demands.policy_demands import POLICY_DEMANDS
from lfm2np.conformance.demands.properties import CROWDED, PROPERTIES
from lfm2np.conformance.demands.sampling_demands import SAMPLING_DEMANDS
from lfm2np.conformance.demands.scheduler_demands import SCHEDULER_DEMANDS
from lfm2np.conformance.demands.wrong_calls import WRONG_CALLS
from lfm2np.errors import RequestError

ALL: tuple[Property | Machine, ...] = (
    *INTERNALS,
    *SAMPLING_DEMANDS,
    *POLICY_DEMANDS,
    *SCHEDULER_DEMANDS,
    *PROPERTIES,
    *MISUSE,
    *WRONG_CALLS,
    *CORRUPTION,
    *LARGE,
    *CACHE_DEMANDS,
    *MEMORY_DEMANDS,
    *ENGINE_DEMANDS,
    *CROWDED,
)


def by_id(name: str) -> Property | Machine:
    """RequestError for an id that no property has."""
    for one in ALL:
        if one.id == name:
            return one
    raise RequestError(f"property {name!r}: expected one of {', '.join(one.id for one in ALL)}")
