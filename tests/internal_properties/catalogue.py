"""All of them, and the order in which a fault meets everything.

The state machines of pool and scheduler come first: what they find is a program of a few calls.
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
from lfm2np.conformance.catalogue import ALL
from lfm2np.conformance.properties.property import Machine, Property

FILES = (drafts, sampling, policies, plans, misuse, wrong_calls, corruptions, large, memory, outputs)
INTERNAL: tuple[Property | Machine, ...] = tuple(each for file in FILES for each in file.PROPERTIES)
MACHINES = tuple(each for each in INTERNAL if isinstance(each, Machine))
EVERYTHING = (*MACHINES, *ALL, *(each for each in INTERNAL if each not in MACHINES))
