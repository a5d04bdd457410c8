"""Golden vectors: chosen (chosen.py), computed and verified (golden.py), run step by step (scripts.py).

A set is vectors.json and vectors.safetensors in one folder (set_files.py); vectors_report.py says what came of it.
notes.json has the classes of bug that vectors and scripts expose, with the public issues in which engines had them.
"""
