"""Sampled answers with log-probabilities of sampler and trainer, each compared with the exact ones.

rollout.py reads the file, converters.py other projects' records, kinds.py names what is left out; scores.py has the
exact log-probabilities, variants.py those of a network with one error of state, weights or precision; reported_side.py
judges one side, causes.py says what explains it, measures.py has the figures of RL libraries; rollouts.py puts it
together, figures.py and rollouts_report.py make its report.
"""
