"""From an engine's answers to judged positions: each token is compared with the exact network, within a format's noise.

formats.py has the formats and how inputs of products are rounded, emulate.py engines of a format, noise.py their
errors, truth.py the exact log-probabilities, routes.py the experts of tokens, scored.py truth and noise of each answer,
position.py what they say of its tokens, verdict.py the verdicts; judge.py puts it together. constants.py and drawn.py
look at many positions together.
"""
