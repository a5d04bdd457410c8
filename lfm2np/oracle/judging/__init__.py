"""From an engine's answers to judged positions: each token is compared with the exact network, within a format's noise.

formats.py defines the formats and the numbers they round to, inputs.py how the inputs of products are rounded; emulate.py emulates engines of a format, noise.py measures their errors at each token; truth.py has the exact
log-probabilities; routes.py the experts that tokens went to; verdict.py the verdict on one position and the probability
of that many. scored.py collects truth and noise of each answer, position.py judges its tokens; judge.py puts it together,
and tries near ties where no routes are reported. It imports targets/, whose records
it judges, and nothing else of oracle/.
"""
