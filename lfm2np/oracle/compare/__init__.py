"""What quantisation costs: two checkpoints of one network compared, both exact, so without any engine's rounding.

pair.py checks that two checkpoints are one network; sequences.py selects what is scored; positions.py compares the two
predictions at each position, as work for any executor; compare.py puts it together, summarises it, with a digest, and
shows it.
"""
