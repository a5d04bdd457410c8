"""The protocol under its documented name; it stands in lfm2np/engine_protocol.py, as the oracle speaks it too."""

from lfm2np.engine_protocol import *  # noqa: F403
