"""The first tensor of an engine's activations that its own inputs do not explain.

dump.py reads a dump, operations.py computes each operation again, spread.py bounds the effect of rounding, patterns.py
describes a difference, locate.py puts it together.
"""
