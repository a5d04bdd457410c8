"""Matrices prepared for one arithmetic, kept in a file that processes share: prepared_file.py.

checkpoint/loaded.py asks for them; it imports numerics/, values and errors.
"""
