"""The scheduler on real traffic, with a clock: latencies, throughput, and how many requests a second it takes.

Requests     traffic.py (files of traces, and drawn ones)
Steps        cost.py (how long a step takes; published figures), fit.py (a cost model from measured steps)
Simulation   run.py (the scheduler with a clock), result.py (its latencies and counts, and their report)
Many         sweep.py (settings combined; the capacity of each policy)
"""
