"""GGUF files, as llama.cpp runs them, read strictly. Needs NumPy only: with the package `gguf` tests compare."""
