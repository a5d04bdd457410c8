"""Which checkpoint answers: answers.py (what is sent, which tokens came), evidence.py (exact likelihoods under every
hypothesis, and the e-value against it), vetting.py (the whole, and its report).
"""
