"""What an answer says beside its tokens and their log-probabilities, judged.

texts.py: its text, its finish_reason and where a stop string ends it.
"""
