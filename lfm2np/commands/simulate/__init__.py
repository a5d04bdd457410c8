"""The scheduler on real traffic, with time: what would it cost?

Requests     traffic.py (one request of a trace), trace_files.py (files of traces), generators.py (drawn traces),
             fitted.py (drawn like two real ones), draws.py (random numbers of the same bits everywhere)
Steps        cost.py (how long a step takes), steps.py (measured steps), fit.py (a cost model from them), presets.py
             (from published figures), drawn_acceptance.py (of drafts)
Simulation   run.py (the scheduler with a clock), histogram.py and statistics.py (what came of it, counted), report.py
             (as data and text), scenario.py (one run as data), sweep.py (many configurations, and which to choose)
Standard library, NumPy and `scheduler` only; page/ (HTML with pictures) is a room of its own.
Public: `lfm2np simulate`.
"""
