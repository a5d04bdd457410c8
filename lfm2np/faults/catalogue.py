"""All faults and variants, by name."""

from __future__ import annotations

from lfm2np.errors import RequestError
from lfm2np.faults.cache import FAULTS as CACHE
from lfm2np.faults.edits import Fault, Variant
from lfm2np.faults.mixture import FAULTS as MIXTURE
from lfm2np.faults.model import FAULTS as MODEL
from lfm2np.faults.pool import FAULTS as POOL
from lfm2np.faults.sampling import FAULTS as SAMPLING
from lfm2np.faults.scheduling import FAULTS as SCHEDULING
from lfm2np.faults.state import FAULTS as STATE
from lfm2np.faults.texts import FAULTS as TEXTS
from lfm2np.faults.variants import VARIANTS

__all__ = ["FAULTS", "VARIANTS", "by_name"]

FAULTS: tuple[Fault, ...] = (*STATE, *CACHE, *POOL, *SCHEDULING, *SAMPLING, *TEXTS, *MODEL, *MIXTURE)


def by_name(name: str) -> Fault | Variant:
    """RequestError for a name that is neither a fault's nor a variant's."""
    everything: tuple[Fault | Variant, ...] = (*FAULTS, *VARIANTS)
    for one in everything:
        if one.name == name:
            return one
    raise RequestError(f"fault {name!r}: not known; `lfm2np faults --list` prints them all")
