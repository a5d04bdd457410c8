"""What several commands need: how arguments are read and shown wrong, prompts and requests, workers, terminals.

parser.py, prompts.py, requests.py, work.py, terminal.py; shown.py is all that `generate` prints.
"""
