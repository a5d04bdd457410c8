"""Targets: adapters through which check.py sends requests to an engine and gets answers in the form of records.py.

target.py says what a target is; the available ones are python_target.py, exec_target.py,
http_target.py (over http_client.py and dialects/), file_target.py and transformers_target.py. records.py also validates
what an engine answered.
"""
