"""The first tensor of an engine's activations that its own inputs do not explain.

dump.py reads a dump; operations.py computes each operation again, with attention.py, choice.py (of experts) and
rounded_inputs.py (quantised weights); spread.py has the rules for how far off rounding may take it; patterns.py
describes a difference; locate.py puts it together.
"""
