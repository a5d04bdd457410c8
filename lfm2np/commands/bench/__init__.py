"""How fast, beside what: this engine, the bare matrix products, and transformers, each in a process of its own.

measure.py asks the sides in turn; five.py, growth.py, large.py and profile.py ask other questions; table.py says what
came of it.
"""
