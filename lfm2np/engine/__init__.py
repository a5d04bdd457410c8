"""Continuous batching: requests in, steps, outputs; and what a batched run has to equal.

engine.py (Engine) with samples.py, answers.py and outputs.py; draft_model.py (ModelDrafter); generation.py (one greedy
prompt); sequential.py computes each request alone, audit.py says what the cache must then hold.
"""
