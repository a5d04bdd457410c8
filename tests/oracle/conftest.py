"""Puts tests/oracle on the path: its folders share `engines` and `vector_sets`."""
