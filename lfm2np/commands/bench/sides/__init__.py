"""What is measured: each side in a process of its own (side.py, side_process.py), asked about the same cells.py.

The sides are the *_side.py: this engine, the bare matrix products (floor), transformers, the server, a whole check.
"""
