"""Ways to an engine: each asks it what check.py wants to know, and answers in the form of records.py.

target.py says what a target is; python_target.py, exec_target.py (over line_process.py), http_target.py (over
http_client.py, http_dialects.py and http_replies.py), file_target.py and transformers_target.py are the available ones.
checked.py looks an answer over before it is believed.
"""
