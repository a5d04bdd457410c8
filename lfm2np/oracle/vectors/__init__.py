"""Golden vectors: chosen (chosen.py, notes.py), computed and verified (golden.py), run step by step (scripts.py).

A set is vectors.json and vectors.safetensors in one folder (set_files.py); vectors_report.py says what came of it.
"""
