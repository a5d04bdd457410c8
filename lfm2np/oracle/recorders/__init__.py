"""Recorders of engines' activations: each runs requests and writes one request's tensors under the names of `locate`.

recorder.py is for an engine's author, and writes the open format of docs/engine/7-locate.md; lfm2np_recorder.py records
this package's engine, transformers_recorder.py Hugging Face's. registry.py chooses one by a target's name.
"""

from lfm2np.oracle.recorders.recorder import Recorder

__all__ = ["Recorder"]
