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
    wrong_calls,
)
from internal_properties.internal import properties_of
from lfm2np.suite.catalogue import ALL
from lfm2np.suite.properties.property import Machine, Property

EARLY = (drafts, sampling, policies, plans)
LATE = (misuse, wrong_calls, corruptions, large, memory, outputs)
early, late = ([each for module in modules for each in properties_of(module)] for modules in (EARLY, LATE))
calls = properties_of(schedules)
INTERNAL = (*calls, *early, *late)
engine_machine, *others = ALL
EVERYTHING: tuple[Property | Machine, ...] = (*calls, engine_machine, *early, *others, *late)
