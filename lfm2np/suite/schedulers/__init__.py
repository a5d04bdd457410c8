"""Schedulers of any engine, tested without a model: see scheduler/protocol.py."""
