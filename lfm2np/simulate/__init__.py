"""The scheduler on real traffic, with time: what would it cost?

traffic.py (one request of a trace), formats.py (files of traces), draws.py (random numbers with the same bits
everywhere), generators.py (drawn traces), fitted.py (drawn traces like two real ones), cost.py (how long a step takes),
fit.py (a cost model from measured steps), run.py (the scheduler with a clock), statistics.py (what came of it).
Standard library, NumPy and `scheduler` only. Public: `lfm2np simulate`.
"""
