"""What quantisation costs: two checkpoints of one network compared, both exact, so without any engine's rounding.

pair.py checks that two checkpoints are one network, and splits it into parts; network.py runs one, or a mixture of
both; positions.py compares the two predictions at each position, as work for any executor, by divergence.py;
sequences.py selects what is scored; figures.py summarises it, with a digest; compare.py puts it together, with the
errors of the weights themselves; comparison_report.py and compare_page.py show it.
"""
