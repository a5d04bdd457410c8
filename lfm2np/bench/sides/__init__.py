"""What is measured: each side in a process of its own (side.py, side_process.py), asked about the same cells.py."""
