"""The property-based suite: batched ragged decoding equals sequential generation, for this engine and for any other.

    pytest --pyargs lfm2np.conformance --engine package.module:factory --profile quick

protocol.py says what an engine must offer, demands/ what is demanded of it, on what trials/ draw and machines/ do;
adapters.py, plugin.py and runner.py run it, fault_trial.py against a fault.
"""
