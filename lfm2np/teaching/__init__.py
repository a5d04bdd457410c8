"""A whole engine to read (nano.py); a run as pictures (drawings/) and as lessons in a browser (lab/)."""
