"""Recorders of engines' activations: each runs requests and writes one request's tensors under the names of `locate`.

recorder.py is for an engine's author; lfm2np_recorder.py records this package's engine; the others know the internals
of one engine and refuse versions that they were not run with. registry.py chooses a recorder by a target's name.
"""

from lfm2np.oracle.recorders.recorder import Recorder

__all__ = ["Recorder"]
