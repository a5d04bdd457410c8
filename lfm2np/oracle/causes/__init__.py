"""What the errors of a check depend on: factors and their cuts (scales), what tells wrong from right (regions), and the
first cause in words (findings).

Only oracle/total.py, check.py and the reports import it; it knows positions and no engine.
"""
