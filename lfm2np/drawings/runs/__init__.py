"""Recorded runs as plain data: nothing here knows how it will look.

recorded.py makes them, with detail.py's numbers of each operation; run.py reads them; derive.py, policies.py, leaks.py
and orders.py say what follows from them.
"""
