"""Directories with quantised safetensors, as mlx-lm, llm-compressor, AutoGPTQ and AutoAWQ write them, read strictly."""
