"""Rule-based state machines: the pool, the scheduler over a model without arithmetic (fake_model.py), a whole engine.

demands/ and the rest of conformance/ may import it; of that it imports trials/ and protocol.py.
"""
