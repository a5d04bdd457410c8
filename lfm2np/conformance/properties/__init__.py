"""What is checked of an engine, and how.

property.py says what a property is; checks.py, answers.py and engine_machine.py check; driver.py runs an example on an
engine and compares it with the reference, endings.py, ledger.py and rounding.py say what is right.
"""
