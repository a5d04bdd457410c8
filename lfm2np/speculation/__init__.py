"""Drafts: who guesses, which guesses can be used, and which hold.

drafters.py (Drafter, NgramDrafter, ScriptedDrafter), proposals.py (what a drafter said, checked), acceptance.py (the
exact rule). The drafter that runs a second model is engine/draft_model.py, as it has an engine of its own.
"""
