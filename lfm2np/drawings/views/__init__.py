"""The views: each a function from recorded runs to a section of the page.

batching.py, isolation.py, ledger.py, memory.py, timeline.py and more: a file for each view, and its parts beside it.
"""
