"""All of them, in the order in which they are tried."""

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
EVERYTHING = (*ALL, *INTERNAL)
