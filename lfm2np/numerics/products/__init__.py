"""How activations are multiplied by weights: product.py has the ways and the rule, tiles.py one way more.

fastest.py finds the fastest by the clock, where all have the same bits; blas.py asks what kernels BLAS has.
Part of the room of numerics/, whose arithmetics use it; imports its pieces.py only.
"""
