"""From logits to tokens and text: SamplingParams, the processors in order, the noise, log-probabilities, stop strings.

params.py, choice.py (process, distribution, choose, draw, and the noise: uniform, philox, request_seed), logprobs.py,
stop_strings.py. Nothing here knows of a batch: a token depends on its row, its parameters and its place.
"""
