"""Ways to an engine's activations: each runs requests and writes one request's tensors under the names of `locate`.

recorder.py is what an engine's author calls; own.py records this package's engine; the others know where one engine
keeps what, say which versions of it they were run with, and refuse others. record.py chooses by a target's name.
"""

from lfm2np.oracle.recorders.recorder import Recorder

__all__ = ["Recorder"]
