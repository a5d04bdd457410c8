"""Sampled answers with log-probabilities of sampler and trainer, each compared with the exact ones.

rollout.py reads the file, renamed.py TRL's and verl's records; exact.py has the exact log-probabilities, views.py those
under temperature and filters, fits.py compares a side with them within a number format; hypotheses.py is the table of
what may be wrong, variants.py computes networks with one error, temperature.py fits a number; judge.py puts it
together, measures.py and report.py show it.
"""
