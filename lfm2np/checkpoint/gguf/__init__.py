"""GGUF files, as llama.cpp runs them, read strictly; the blocks of quantised tensors by the package `gguf`."""
