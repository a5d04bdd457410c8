"""Golden vectors: chosen (chosen.py), computed and verified (golden.py), run step by step (scripts.py); notes.json has the
classes of bug that the flags of vectors and scripts name, with the public issues in which engines had them.

A set is vectors.json and vectors.safetensors in one folder (set_files.py); vectors_report.py says what came of it.
"""
