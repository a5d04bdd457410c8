"""Directories with quantised safetensors, as mlx-lm, llm-compressor, AutoGPTQ and AutoAWQ write them, read strictly.

codes.py and rows.py hold what number a weight is; settings.py and the modules beside it read config.json; mlx.py,
compressed.py and auto.py find our matrices in their tensors, unpacking.py calls the right one; activations.py says how
a checkpoint wants the inputs of its products rounded.
Of the rest of the room config.py, stored.py, tensors.py and files.py import it; what reads config.json here imports
nothing of ModelConfig's.
"""
