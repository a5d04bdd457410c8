"""Schedulers and block managers of any engine, tested without a model: see scheduler/protocol.py."""
