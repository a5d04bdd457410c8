"""Checkpoints, in the Hugging Face format or as GGUF: read strictly, and prepared for one arithmetic.

files.py reads either form, weights.py prepares its tensors, loaded.py puts all of it together: LoadedModel, read_model.
"""
