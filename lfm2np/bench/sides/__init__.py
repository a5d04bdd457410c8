"""What is measured: each side in a process of its own (side.py, side_process.py), asked about the same cells.py.

The rest of bench/ may import it; it imports nothing of that.
"""
