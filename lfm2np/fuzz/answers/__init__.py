"""Judges the rest of an answer, besides its tokens and their log-probabilities.

texts.py: its text, its finish_reason and where a stop string ends it.
"""
