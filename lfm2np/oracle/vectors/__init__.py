"""Golden vectors: chosen (chosen.py), computed and verified (golden.py), in files (set_files.py).

A set is vectors.json and vectors.safetensors in one folder.
"""
