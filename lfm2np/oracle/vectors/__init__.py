"""Golden vectors: chosen (chosen.py), computed and verified (golden.py), with steps to run them by (scripts.py).

A set is vectors.json and vectors.safetensors in one folder (set_files.py); vectors_report.py says what came of it.
"""
