"""The scheduler on real traffic, with time: what would it cost?

traffic.py (one request of a trace), formats.py (files of traces), generators.py (drawn traces), cost.py (how long a
step takes), steps.py (measured steps), fit.py (a cost model of them), run.py (the scheduler with a clock),
statistics.py (what came of it).
Standard library, NumPy and `scheduler` only. Public: `lfm2np simulate`.
"""
