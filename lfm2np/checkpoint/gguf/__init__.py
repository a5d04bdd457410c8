"""GGUF files, as llama.cpp runs them, read strictly: quantised weights, the container, its keys and names.

blocks.py and superblocks.py hold the formats, formats.py their table; container.py reads a file or its splits,
settings.py makes a ModelConfig of the keys, vocabulary.py a tokenizer.json of its tables, names.py finds our tensors in
theirs. It needs NumPy only: the package `gguf` of llama.cpp's authors is what the tests compare with.
"""
