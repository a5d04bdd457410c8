"""The scheduler on real traffic, with time: what would it cost?

traffic.py (one request of a trace), formats.py (files of traces), generators.py (drawn traces), fitted.py (drawn like two
real ones), draws.py (random numbers of the same bits everywhere); cost.py (how long a step takes), steps.py (measured
steps), fit.py (a cost model from them); run.py (the scheduler with a clock), histogram.py and statistics.py (what came of
it, counted), report.py (as data and text), sweep.py (many configurations, and which to choose).
Standard library, NumPy and `scheduler` only. Public: `lfm2np simulate`.
"""
