"""Books of a run, kept from the calls alone: strict ones of the scheduler and its pools (strict.py), of an engine."""
