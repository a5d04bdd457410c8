"""Golden vectors: chosen (chosen.py), computed and verified (golden.py), run step by step (scripts.py).

A set is one file, vectors.json (set_files.py).
notes.json has the classes of bug that vectors and scripts expose, with the public issues in which engines had them.
"""
