"""All of them, and the order in which a fault meets everything.

State machines come first, since what they find is a program of a few calls; then what names the part that is wrong.
"""

from __future__ import annotations

from internal_properties import (
    corruptions,
    drafts,
    large,
    memory,
    misuse,
    outputs,
    plans,
    policies,
    sampling,
    wrong_calls,
)
from internal_properties.internal import properties_of
from lfm2np.conformance.catalogue import ALL
from lfm2np.conformance.properties.property import Machine, Property

EARLY = (drafts, sampling, policies, plans)
LATE = (misuse, wrong_calls, corruptions, large, memory, outputs)
early, late = ([each for module in modules for each in properties_of(module)] for modules in (EARLY, LATE))
INTERNAL: tuple[Property | Machine, ...] = (*drafts.MACHINES, *early, *late)
engine_machine, *others = ALL
EVERYTHING = (*drafts.MACHINES, engine_machine, *early, *others, *late)
