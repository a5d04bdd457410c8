"""The network of reference.py over many sequences at once: the same bits, no padding.

step.py computes one step of a ragged batch over the arrays of cache.py, as the scheduler planned it; ragged.py whole
sequences without a cache. digest.py is the hash by which machines compare their bits.
"""
