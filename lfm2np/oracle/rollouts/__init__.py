"""Sampled answers with log-probabilities of sampler and trainer, each compared with the exact ones.

rollout.py is the record, reading.py the file, TRL's and verl's included; views.py has the log-probabilities under
temperature and filters, exact.py the exact ones and what they leave of a side; hypotheses.py is the table of what may
be wrong, variants.py computes networks with one error; judge.py puts it together, measures.py and report.py show it.
"""
