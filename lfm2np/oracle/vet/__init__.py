"""Which checkpoint answers: candidates.py (what may stand there), answers.py (what is sent, and which tokens came),
evidence.py (their exact likelihoods and the e-value), vetting.py (the whole), vet_report.py.
"""
