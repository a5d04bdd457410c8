"""Which checkpoint answers behind an address: sampled answers under every candidate, exactly, and a sequential test.

hypotheses.py (candidates, prompt renderings, sampling), questions.py (what is asked), asking.py (how, and what came),
provider_answers.py (recorded answers), token_ids.py (the tokens of an answer), likelihoods.py (exact log-probabilities
under every hypothesis), betting.py (the test), reported.py (reported log-probabilities as evidence), token_plan.py
(tokens needed, before anything is asked), vetting.py (the whole), vet_report.py (its report).
"""
