"""The property suite: batched ragged decoding equals sequential generation, for this engine and for any other.

    pytest --pyargs lfm2np.suite --engine package.module:factory --profile quick

catalogue.py lists the properties: what is drawn (strategies/) and how it is checked (properties/). An engine offers the
methods of oracle/engines/protocol.py. plugin.py and runner.py run the suite.
"""
