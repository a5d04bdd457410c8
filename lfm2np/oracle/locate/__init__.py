"""The first tensor of an engine's activations that its own inputs do not explain.

dump.py reads a dump, operations.py computes each operation again, spread.py says how far rounding reaches, patterns.py
what a difference looks like, locate.py puts it together; record.py records dumps of our own engine.
"""
