"""Engines of any kind behind one protocol: adapters that play traces, and answer in the form of records.py.

target.py says what a target is; the available ones are python_target.py, exec_target.py, http_target.py (over
http_client.py and dialects/), file_target.py and transformers_target.py. validate.py decides whether an answer is one.
"""
