"""Named faults, each a real engine's bug put into this one, and benign variants, which change no answer.

    with faults.inject("rejected-drafts-stay-in-the-state"):
        ...                     # every engine of this process now has that bug

A fault is an edit: a line of one function, and what stands there instead. `inject` compiles the edited source and puts
its code object into the function, for as long as the block lasts. So the engine holds no hook, an unused fault costs
nothing, each fault is as readable as a patch, and one that no longer fits the code is an error, not a fault that
silently does nothing.
"""

from lfm2np.suite.faults.edits import Edit, Fault, Variant
from lfm2np.suite.faults.inject import FAULTS, VARIANTS, by_name, inject

__all__ = ["FAULTS", "VARIANTS", "Edit", "Fault", "Variant", "by_name", "inject"]
