"""All of them, and the order in which a fault meets everything.

Programs of calls come first, since what they find is a few calls; then what names the part that is wrong.
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
    schedules,
    second_implementation,
    wrong_calls,
)
from internal_properties.internal import properties_of
from lfm2np.suite.catalogue import ALL
from lfm2np.suite.properties.property import Property

EARLY = (drafts, sampling, second_implementation, policies, plans)
LATE = (misuse, wrong_calls, corruptions, large, memory, outputs)
early, late = ([each for module in modules for each in properties_of(module)] for modules in (EARLY, LATE))
calls = properties_of(schedules)
INTERNAL = (*calls, *early, *late)
equal, every_schedule, *others = ALL
EVERYTHING: tuple[Property, ...] = (*calls, equal, every_schedule, *early, *others, *late)
