"""The property-based suite: batched ragged decoding equals sequential generation, for this engine and for any other.

    pytest --pyargs lfm2np.conformance --engine package.module:factory --profile quick

protocol.py says what an engine must offer, properties.py what is demanded of it.
"""
