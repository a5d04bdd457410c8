"""Files in the Hugging Face format or GGUF, read strictly, and what is made of them before anything computes.

config.py, tensors.py, tokenizer.py, chat.py with its sandbox, and summary.py, which `lfm2np info` prints. gguf/ reads
the other form, files.py either of them; packed/ reads quantised matrices of directories.
weights.py prepares tensors for one arithmetic, and prepared/ keeps that in a file; loaded.py puts all of it together:
LoadedModel, read_model.
The weights stand here, and not in network/, so that reference.py can lie between the two.
"""
