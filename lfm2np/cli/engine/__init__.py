"""Commands that run the engine: generate.py, serve.py; and the options that both have.

Part of cli/, and imported by its program.py only.
"""
