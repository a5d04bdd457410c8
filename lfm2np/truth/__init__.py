"""The network's definition: its sizes, its layers with their tensors, and the weights as the network uses them.

config.py says what a model is, weights.py what a layer holds and what each tensor is called, layers.py of which shape.
reference.py computes with it; loaders, recorders and drawings walk it.
"""
