"""The protocol under its documented name; it stands in lfm2np/oracle/engines/protocol.py, as the oracle speaks it too."""

from lfm2np.oracle.engines.protocol import *  # noqa: F403
