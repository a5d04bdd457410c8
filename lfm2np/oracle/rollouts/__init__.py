"""Sampled answers with the log-probabilities of who sampled them and of who trains on them.

rollout.py: a rollout, and a file of them; converters.py: the records of other projects; measures.py: their metrics.
"""
