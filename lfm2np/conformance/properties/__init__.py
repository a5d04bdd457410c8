"""The properties: demands.py says what one is, the others what is demanded and how it is checked.

conformance/catalogue.py puts them in order; they import machines/, trials/ and protocol.py.
"""
