"""What quantising costs: two checkpoints of one network against each other, both exact, so without any engine's noise.

pair.py says whether two checkpoints are one network, and of which parts; network.py runs one, or a mixture of both;
positions.py holds each position's two predictions against each other, as work for any executor, by divergence.py;
sequences.py cuts what is scored; figures.py makes figures of it all, and their digest; weights.py has the errors of the
weights themselves; compare.py puts it together, shown.py, compare_page.py and drawing.py show it.
"""
